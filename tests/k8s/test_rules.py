"""A planted mistake of each kind is found, and named so that one sees where it is."""

from __future__ import annotations

import pytest

from components.errors import UsageError
from pipelines.k8s_entrypoints import command_problems
from pipelines.k8s_ray_rules import name_problems
from pipelines.k8s_rules import problems, refuse_problems

JOB, CLUSTER, CRON = ("RayJob", "caltune-retrain"), ("RayCluster", "caltune"), ("CronJob", "caltune-retrain")
SERVER, DATABASE = ("Deployment", "caltune-mlflow"), ("StatefulSet", "caltune-postgres")
ZERO_DIGEST = "@sha256:" + "0" * 64


def put(document, path, value):
    """Sets what a path of keys and indices leads to; `del` takes it away."""
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in way:
        document = document[key] if isinstance(document, list) else document.setdefault(key, {})
    if value == "del":
        del document[last]
    else:
        document[last] = value


POD = "spec/rayClusterSpec/headGroupSpec/template/spec"
BOX = f"{POD}/containers/0"
RULE = {"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED"}}
GROUP = "spec/rayClusterSpec/workerGroupSpecs/0"
CRON_POD = "spec/jobTemplate/spec/template/spec"
MISTAKES = [
    # What schemas find once unknown fields are refused.
    (JOB, "spec/backOffLimit", 3, "'backOffLimit' was unexpected"),
    (JOB, f"{GROUP}/template/spec/containers/0/resource", {}, "'resource' was unexpected"),
    (JOB, "spec/ttlSecondsAfterFinished", "600", "is not of type 'integer'"),
    (JOB, "spec/rayClusterSpec/headGroupSpec", "del", "'headGroupSpec' is a required property"),
    (CLUSTER, "spec/enableAutoscaling", True, "'enableAutoscaling' was unexpected"),
    (SERVER, "spec/template/spec/containers/0/imagPullPolicy", "Always", "'imagPullPolicy' was unexpected"),
    (CRON, "spec/concurencyPolicy", "Forbid", "'concurencyPolicy' was unexpected"),
    # Names.
    (JOB, "metadata/name", "r" * 48, "has 48 characters; a RayJob may have 47"),
    (JOB, "metadata/name", "7days", "must begin with a lower-case letter"),
    (CLUSTER, "metadata/name", "c" * 54, "has 54 characters; a RayCluster may have 53"),
    (CRON, "metadata/name", "c" * 53, "has 53 characters; a CronJob may have 52"),
    # Entrypoints.
    (JOB, "spec/entrypoint", "python -m ray_jobs.no_such_module", "there is no module 'ray_jobs.no_such_module'"),
    (JOB, "spec/entrypoint", "python -m no_such_package.main", "there is no module 'no_such_package.main'"),
    (JOB, "spec/entrypoint", "caltune trian --config /etc/caltune/run.yaml", "caltune has no command 'trian'"),
    (JOB, "spec/entrypoint", "caltune run --confg /etc/caltune/run.yaml", "caltune run: No such option: --confg"),
    (JOB, "spec/entrypoint", "caltune run", "caltune run: Missing option"),
    (JOB, "spec/entrypoint", "caltune run --config a.yaml && rm b", "characters that a shell would read"),
    (JOB, "spec/entrypoint", "traln --config a.yaml", "'traln' is neither caltune"),
    (CRON, f"{CRON_POD}/containers/0/command", ["python", "-m", "pipelines.launch"], "there is no module"),
    (SERVER, "spec/template/spec/containers/0/command", ["mlfow", "server"], "'mlfow' is neither caltune"),
    (SERVER, "spec/template/spec/initContainers/0/args", ["import os,"], "python -c: "),
    # The operator's rules for RayJob.
    (JOB, "spec/activeDeadlineSeconds", 0, "activeDeadlineSeconds must be a positive"),
    (JOB, "spec/preRunningDeadlineSeconds", "del", "preRunningDeadlineSeconds must be a positive"),
    (JOB, "spec/preRunningDeadlineSeconds", 50_000, "must be less than activeDeadlineSeconds"),
    (JOB, "spec/backoffLimit", "del", "backoffLimit must be said"),
    (JOB, "spec/submitterConfig", "del", "submitterConfig.backoffLimit must be said"),
    (JOB, "spec/shutdownAfterJobFinishes", False, "suspend needs shutdownAfterJobFinishes"),
    (JOB, "spec/shutdownAfterJobFinishes", False, "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"),
    (JOB, "spec/shutdownAfterJobFinishes", False, "or the cluster stays and costs money"),
    (JOB, "spec/deletionStrategy", {"deletionRules": [RULE]}, "exclude each other"),
    (JOB, "spec/deletionStrategy", {"onSuccess": {"policy": "DeleteCluster"}}, "onSuccess and onFailure go together"),
    (JOB, "spec/jobId", "mine", "jobId does not go with backoffLimit"),
    (JOB, "spec/managedBy", "me", "managedBy must be one of"),
    (JOB, "spec/clusterSelector", {"ray.io/cluster": "caltune"}, "exactly one of rayClusterSpec and clusterSelector"),
    (JOB, "spec/submissionMode", "SidecarMode", "submitterConfig does not go with SidecarMode"),
    (JOB, "spec/submissionMode", "InteractiveMode", "backoffLimit does not go with InteractiveMode"),
    (JOB, "spec/runtimeEnvYAML", "env_vars: {", "runtimeEnvYAML is not YAML"),
    (JOB, "apiVersion", "ray.io/v1alpha1", "use ray.io/v1"),
    # Its rules for the cluster.
    (JOB, "spec/rayClusterSpec/authOptions", "del", "authOptions.mode must be token"),
    (JOB, "spec/rayClusterSpec/rayVersion", "2.51.1", "needs Ray 2.52.0 or newer"),
    (CLUSTER, "spec/rayVersion", "del", "authOptions.mode token needs rayVersion"),
    (CLUSTER, "spec/workerGroupSpecs/0/maxReplicas", "del", "'maxReplicas' is a required property"),
    (CLUSTER, "spec/workerGroupSpecs/0/replicas", 9, "must lie between minReplicas 1 and maxReplicas 4"),
    (CLUSTER, "spec/autoscalerOptions/version", "v1", "autoscalerOptions.version must be v2"),
    (CLUSTER, "spec/autoscalerOptions/resources", "del", "autoscalerOptions.resources.limits is missing"),
    (CLUSTER, "spec/headGroupSpec/template/spec/restartPolicy", "Always", "needs restartPolicy Never"),
    (CLUSTER, "spec/headGroupSpec/rayStartParams", {"num-cpus": "0"}, "stand in rayStartParams and in resources"),
    # Pods.
    (JOB, f"{POD}/securityContext/runAsNonRoot", "del", "runAsNonRoot must be true"),
    (JOB, f"{POD}/automountServiceAccountToken", "del", "automountServiceAccountToken must be said"),
    (JOB, f"{BOX}/securityContext/readOnlyRootFilesystem", False, "readOnlyRootFilesystem must be true"),
    (JOB, f"{BOX}/securityContext/capabilities", "del", "capabilities.drop must be [ALL]"),
    (JOB, f"{BOX}/resources/limits/memory", "del", "container 'ray-head': resources.limits.memory is missing"),
    (JOB, "spec/submitterPodTemplate/spec/containers/0/resources", "del", "resources.requests.cpu is missing"),
    (SERVER, "spec/template/spec/initContainers/0/securityContext", "del", "container 'bucket': securityContext"),
    (JOB, f"{BOX}/image", "caltune-trainer:latest", "needs a tag other than latest"),
    (JOB, f"{BOX}/image", "registry.example.com:5000/caltune/trainer", "needs a tag other than latest"),
    (JOB, f"{BOX}/env/0", {"name": "HF_TOKEN", "value": "abc"}, "env HF_TOKEN is a secret written out"),
    (JOB, f"{BOX}/env/0", {"name": "PGPASSWORD", "value": "abc"}, "env PGPASSWORD is a secret written out"),
    (JOB, f"{BOX}/env/0", {"name": "URI", "value": "s3://me:pass@host/x"}, "has a password in a URL"),
    (DATABASE, "spec/template/spec/volumes/0", {"name": "run", "hostPath": {"path": "/"}}, "is a hostPath"),
    # Schedules.
    (CRON, "spec/concurrencyPolicy", "Allow", "concurrencyPolicy must be Forbid"),
    (CRON, "spec/schedule", "0 0 3 * * 1", "must have five fields"),
    (CRON, "spec/schedule", "CRON_TZ=Europe/Berlin 0 3 * * 1", "names a time zone; use timeZone"),
    (CRON, "spec/timeZone", "Europe/Berlni", "timeZone 'Europe/Berlni' is unknown"),
    (CRON, "spec/startingDeadlineSeconds", "del", "startingDeadlineSeconds is missing"),
    (CRON, "spec/jobTemplate/spec/backoffLimit", "del", "backoffLimit is missing"),
]


@pytest.mark.parametrize(("which", "path", "value", "said"), MISTAKES, ids=lambda part: str(part)[:48])
def test_a_planted_mistake_is_found(which, path, value, said, overlay, pick, all_problems):
    document = pick(overlay("base"), *which)  # in which nothing is found: test_overlays.py
    put(document, path, value)
    found = all_problems([document])
    assert any(said in problem for problem in found), found
    assert all(problem.startswith(f"{document['kind']} {document['metadata']['name']}: ") for problem in found)


def test_unknown_fields_pass_where_they_are_not_refused(overlay, pick, lenient_ray_validator):
    """Which is why the checker has a stricter schema than the resource definition."""
    job = pick(overlay("base"), *JOB)
    job["spec"]["backOffLimit"] = 3
    assert list(lenient_ray_validator("RayJob").iter_errors(job)) == []


def test_production_wants_digests(overlay, pick):
    job = pick(overlay("base"), *JOB)
    assert any("must be named by digest" in problem for problem in problems([job], digests=True))
    for template in (job["spec"]["submitterPodTemplate"], *_templates(job)):
        template["spec"]["containers"][0]["image"] = f"registry.example.com/caltune/trainer{ZERO_DIGEST}"
    assert problems([job], digests=True) == []


def _templates(job):
    spec = job["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED", "ttlSeconds": 60}}], None),
        ([{"policy": "DeleteSelf", "condition": {"ttlSeconds": 60}}], "exactly one of jobStatus"),
        ([{"policy": "DeleteWorkers", "condition": {"jobStatus": "FAILED"}}], "does not go with autoscaling"),
        ([{"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED"}}] * 2, "two rules say when DeleteSelf happens"),
        (
            [
                {"policy": "DeleteCluster", "condition": {"jobStatus": "FAILED", "ttlSeconds": 60}},
                {"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED", "ttlSeconds": 30}},
            ],
            "for FAILED, ttlSeconds must not fall",
        ),
    ],
)
def test_deletion_rules(rules, said, overlay, pick):
    job = pick(overlay("base"), *JOB)
    for name in ("shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "suspend"):
        del job["spec"][name]
    job["spec"]["deletionStrategy"] = {"deletionRules": rules}
    found = problems([job])
    assert found == [] if said is None else [problem for problem in found if said in problem]


def test_a_kueue_queue_needs_the_cluster_to_go(overlay, pick):
    job = pick(overlay("base"), *JOB)
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "caltune"
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert problems([job]) == []
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"] = [{**groups[0], "groupName": f"g{i}"} for i in range(8)]
    assert [p for p in problems([job]) if "7 worker groups" in p]


@pytest.mark.parametrize(("kind", "longest"), [("RayJob", 47), ("RayCluster", 53), ("RayCronJob", 36)])
def test_the_longest_name_passes_and_one_more_does_not(kind, longest):
    assert name_problems(kind, "n" * longest) == []
    assert name_problems(kind, "n" * (longest + 1)) != []


def test_a_raycronjob_has_no_queue_and_no_long_name(overlay, pick):
    spec = pick(overlay("base"), *JOB)["spec"]
    made = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCronJob",
        "metadata": {"name": "n" * 37, "labels": {"kueue.x-k8s.io/queue-name": "q"}},
        "spec": {"schedule": "0 3 * *", "timeZone": "Etc/UTC", "jobTemplate": spec},
    }
    found = "\n".join(problems([made]))
    assert "37 characters; a RayCronJob may have 36" in found
    assert "does not reach the RayJobs" in found
    assert "must have five fields" in found


def test_a_secret_in_a_manifest_is_refused():
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {}}
    with pytest.raises(UsageError, match="Secret s: a Secret does not belong into a manifest"):
        refuse_problems([secret])


@pytest.mark.parametrize(
    "entrypoint",
    [
        "caltune run --config /etc/caltune/run.yaml --resume",
        "caltune train --config /etc/caltune/run.yaml --method calm",
        "caltune evaluate --config a.yaml --set evaluation.bins=10",
        "python -m pipelines.k8s_launch caltune-retrain",
    ],
)
def test_entrypoints_that_exist_pass(entrypoint):
    assert command_problems(entrypoint) == []
