"""Every overlay renders, is valid where unknown fields are refused, keeps to the rules, and holds together."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from components.run_file import load_run_file
from pipelines.k8s_job import pods_needed
from pipelines.k8s_launch import copy_of
from pipelines.k8s_pod_rules import DIGEST, containers, pod_specs
from pipelines.k8s_pods import GPU, RAY_VERSION, ROLE

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("kind", "dev", "gpu-prod")
EVERYTHING = ("base", *OVERLAYS)
UNITS = {"m": Decimal("0.001"), "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}


def amount(quantity: object) -> Decimal:
    """A Kubernetes quantity as a number."""
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(quantity)).groups()
    return Decimal(number) * UNITS[unit]


def clusters(documents):
    """Name and specification of every Ray cluster that may be there at the same time."""
    for doc in documents:
        if doc["kind"] == "RayCluster":
            yield doc["metadata"]["name"], doc["spec"]
        if doc["kind"] == "RayJob":
            yield doc["metadata"]["name"], doc["spec"]["rayClusterSpec"]


def pod_count(path, document):
    """How many pods of a template there may be at the same time."""
    group = re.search(r"workerGroupSpecs\[(\d+)\]", path)
    if group is None:
        return document["spec"].get("replicas", 1)
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    return spec["workerGroupSpecs"][int(group.group(1))]["maxReplicas"]


@pytest.mark.parametrize("name", EVERYTHING)
def test_it_is_valid_and_keeps_to_the_rules(name, overlay, all_problems):
    documents = overlay(name)
    kinds = {doc["kind"] for doc in documents}
    assert {"Namespace", "ServiceAccount", "Role", "RayCluster", "RayJob", "CronJob", "Deployment"} <= kinds
    assert {"StatefulSet", "PersistentVolumeClaim", "NetworkPolicy", "ResourceQuota", "LimitRange"} <= kinds
    assert "Secret" not in kinds
    assert all_problems(documents, digests=name == "gpu-prod") == []


@pytest.mark.parametrize("name", EVERYTHING)
def test_everything_lies_in_the_namespace(name, overlay):
    assert {doc["metadata"].get("namespace") for doc in overlay(name) if doc["kind"] != "Namespace"} == {"caltune"}


def test_the_banner_says_what_an_overlay_is_for():
    for name in OVERLAYS:
        assert (ROOT / f"k8s/overlays/{name}/kustomization.yaml").read_text().startswith(f"# {name}: ")


def test_production_names_no_image_by_tag(overlay):
    images = {c["image"] for doc in overlay("gpu-prod") for _, spec in pod_specs(doc) for c in containers(spec)}
    assert len(images) == 5
    assert all(DIGEST.search(image) for image in images)


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_referred_to_exists(name, overlay):
    documents = overlay(name)
    there = {(doc["kind"], doc["metadata"]["name"]) for doc in documents}
    made = set(re.findall(r"^ *make (\S+)", (ROOT / "k8s/secrets.sh").read_text(), re.MULTILINE))
    assert len(made) == 4
    for doc in documents:
        for path, spec in pod_specs(doc):
            assert ("ServiceAccount", spec["serviceAccountName"]) in there, path
            volumes = spec.get("volumes", [])
            for claim in (v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v):
                assert ("PersistentVolumeClaim", claim) in there
            for config in (v["configMap"]["name"] for v in volumes if "configMap" in v):
                assert ("ConfigMap", config) in there
            secrets = [v["secret"]["secretName"] for v in volumes if "secret" in v]
            for container in containers(spec):
                secrets += [s["secretRef"]["name"] for s in container.get("envFrom", [])]
                variables = [v["valueFrom"] for v in container.get("env", []) if "valueFrom" in v]
                secrets += [v["secretKeyRef"]["name"] for v in variables if "secretKeyRef" in v]
                templates = doc["spec"].get("volumeClaimTemplates", [])
                known = {v["name"] for v in volumes} | {t["metadata"]["name"] for t in templates}
                assert {m["name"] for m in container["volumeMounts"]} <= known
            assert set(secrets) <= made
    for _, spec in clusters(documents):
        assert spec["authOptions"]["secretName"] in made


@pytest.mark.parametrize("name", EVERYTHING)
def test_policies_and_services_select_pods(name, overlay):
    documents = overlay(name)
    roles, selected = set(), set()
    for doc in documents:
        if doc["kind"] == "NetworkPolicy":
            selected.add(doc["spec"]["podSelector"].get("matchLabels", {}).get(ROLE))
        elif doc["kind"] == "Service":
            assert set(doc["spec"]["selector"]) == {ROLE}
            selected.add(doc["spec"]["selector"][ROLE])
        else:
            roles |= set(re.findall(rf"'{ROLE}': '(\w+)'", str(doc)))
    assert roles == {"ray", "submitter", "scheduler", "mlflow", "postgres", "s3"}
    assert selected == roles | {None}, "None is the policy that forbids everything to every pod"


@pytest.mark.parametrize("name", EVERYTHING)
def test_only_two_kinds_of_pods_may_call_the_api_server(name, overlay):
    allowed = {
        spec["serviceAccountName"]
        for doc in overlay(name)
        for _, spec in pod_specs(doc)
        if spec["automountServiceAccountToken"]
    }
    assert allowed == {"caltune-ray-head", "caltune-scheduler"}


def test_the_scheduler_may_start_jobs_and_no_more(overlay, pick):
    role = pick(overlay("base"), "Role", "caltune-scheduler")
    assert role["rules"] == [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "list", "create"]}]
    assert [doc["kind"] for doc in overlay("base") if "ClusterRole" in str(doc)] == []


@pytest.mark.parametrize("name", EVERYTHING)
def test_all_at_once_fits_into_the_quota(name, overlay, pick):
    """Both clusters at their largest, besides MLflow and the scheduler: nothing has to wait for a quota."""
    documents = overlay(name)
    quota = pick(documents, "ResourceQuota", "caltune")["spec"]["hard"]
    for kind, what in itertools.product(("requests", "limits"), ("cpu", "memory")):
        total = Decimal(0)
        for doc in documents:
            for path, spec in pod_specs(doc):
                each = sum(amount(container["resources"][kind][what]) for container in spec["containers"])
                total += each * pod_count(path, doc)
        autoscalers = [spec["autoscalerOptions"]["resources"] for _, spec in clusters(documents)]
        total += sum(amount(resources[kind][what]) for resources in autoscalers)
        assert 0 < total <= amount(quota[f"{kind}.{what}"]), f"{kind}.{what}"


@pytest.mark.parametrize("name", EVERYTHING)
def test_gpus_and_storage_fit_into_the_quota(name, overlay, pick):
    documents = overlay(name)
    quota = pick(documents, "ResourceQuota", "caltune")["spec"]["hard"]
    limits = {part["type"]: part["max"] for part in pick(documents, "LimitRange", "caltune")["spec"]["limits"]}
    gpus = Decimal(0)
    for doc in documents:
        for path, spec in pod_specs(doc):
            for container in containers(spec):
                wanted = container["resources"]["limits"]
                gpus += amount(wanted.get(GPU, "0")) * pod_count(path, doc)
                assert amount(wanted["cpu"]) <= amount(limits["Container"]["cpu"])
                assert amount(wanted["memory"]) <= amount(limits["Container"]["memory"])
    assert gpus <= amount(quota[f"requests.{GPU}"])
    assert (gpus > 0) == (name == "gpu-prod")
    claims = [doc["spec"] for doc in documents if doc["kind"] == "PersistentVolumeClaim"]
    claims += [t["spec"] for doc in documents for t in doc.get("spec", {}).get("volumeClaimTemplates", [])]
    sizes = [amount(claim["resources"]["requests"]["storage"]) for claim in claims]
    assert len(sizes) == 3
    assert sum(sizes) <= amount(quota["requests.storage"])
    assert max(sizes) <= amount(limits["PersistentVolumeClaim"]["storage"])


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_scheduled_run_fits_its_cluster(name, overlay, pick, tmp_path):
    """The run file is one, writes where all pods see it, and asks for no more workers than there are at its start."""
    documents = overlay(name)
    spec = pick(documents, "RayJob", "caltune-retrain")["spec"]
    (tmp_path / "run.yaml").write_text(pick(documents, "ConfigMap", "caltune-retrain-run")["data"]["run.yaml"])
    config = load_run_file(tmp_path / "run.yaml")
    assert config.run == "caltune-retrain"
    assert str(config.folder) == spec["metadata"]["caltune_folder"] == "/data/outputs/caltune-retrain"
    needed = pods_needed(config, "run")
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert needed.least <= group["minReplicas"]
    assert needed.count <= group["maxReplicas"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert needed.cpus <= amount(limits["cpu"])
    assert needed.gpus == amount(limits.get(GPU, "0"))


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_the_schedule_starts_is_valid_too(name, overlay, pick, all_problems):
    documents = overlay(name)
    pod = pick(documents, "CronJob", "caltune-retrain")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    template = pick(documents, "RayJob", pod["containers"][0]["command"][-1])
    owner = {"CALTUNE_OWNER_NAME": "caltune-retrain-29", "CALTUNE_OWNER_UID": "6d2f"}
    assert {variable["name"] for variable in pod["containers"][0]["env"]} == set(owner)
    made = copy_of(template, datetime(2027, 1, 4, 3, 0, tzinfo=UTC), owner)
    assert made["metadata"]["name"] == "caltune-retrain-20270104-0300"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "caltune"
    assert all_problems([made], digests=name == "gpu-prod") == []


def test_the_template_itself_is_never_started(overlay, pick):
    for name in EVERYTHING:
        template = pick(overlay(name), "RayJob", "caltune-retrain")
        assert template["spec"]["suspend"] is True
        assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"], "Kueue would start it"


def test_raycronjob_replaces_the_cronjob_and_runs_the_same(overlay, rendered, pick, all_problems, tmp_path):
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{os.path.relpath(ROOT / 'k8s/base', tmp_path)}]\n"
        f"components: [{os.path.relpath(ROOT / 'k8s/components/raycronjob', tmp_path)}]\n"
    )
    documents = rendered(tmp_path)
    assert all_problems(documents) == []
    assert "CronJob" not in {doc["kind"] for doc in documents}
    made = pick(documents, "RayCronJob", "caltune-retrain")["spec"]["jobTemplate"]
    base = pick(overlay("base"), "RayJob", "caltune-retrain")["spec"]
    del base["suspend"], base["metadata"]
    base["entrypoint"] += "-$(date -u +%Y%m%d)"
    assert made == base


def test_versions_agree(overlay):
    """Ray's version in the manifests, in the code and in what the images install."""
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    assert pinned == RAY_VERSION
    assert {spec["rayVersion"] for _, spec in clusters(overlay("base"))} == {RAY_VERSION}


def test_the_server_has_the_settings_of_the_mlflow_folder(overlay, pick):
    """The same variables; of the values, those that do not name a host."""
    text = (ROOT / "mlflow/server-postgres-s3.env").read_text()
    theirs = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))
    (server,) = pick(overlay("base"), "Deployment", "caltune-mlflow")["spec"]["template"]["spec"]["containers"]
    ours = {variable["name"]: variable.get("value") for variable in server["env"]}
    secret = {name for name, value in ours.items() if value is None}
    assert secret == {"PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert set(ours) - secret == set(theirs)
    assert ours["MLFLOW_ARTIFACTS_DESTINATION"] == theirs["MLFLOW_ARTIFACTS_DESTINATION"]


@pytest.mark.slow
def test_the_bucket_is_made_once(overlay, pick):
    """The init container's code against a real S3 server: it makes the bucket, and leaves one that is there."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install -e '.[dev]'")
    pod = pick(overlay("base"), "Deployment", "caltune-mlflow")["spec"]["template"]["spec"]
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        environment = {**os.environ, **keys, "MLFLOW_S3_ENDPOINT_URL": address}
        for _ in range(2):
            command = [sys.executable, *pod["initContainers"][0]["command"][1:], *pod["initContainers"][0]["args"]]
            subprocess.run(command, env=environment, check=True, timeout=60)
        client = boto3.client(
            "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["mlflow"]
    finally:
        server.stop()
