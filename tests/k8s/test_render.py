"""`caltune render k8s`: what it writes is valid and runs the run file; what cannot work is not written."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from components.errors import UsageError
from components.run_file import load_run_file
from pipelines.render_command import add_render_command

QUICKSTART = Path(__file__).resolve().parents[2] / "ray_jobs" / "configs" / "quickstart.yaml"
THERE = ["--set", "output_dir=/data/outputs"]


@pytest.fixture
def render_k8s():
    """Runs the command; returns its two documents, or raises what it raises."""

    def run(*arguments, config=QUICKSTART, there=True):
        app = typer.Typer()
        add_render_command(app)
        command = ["render", "k8s", "--config", str(config), *(THERE if there else []), *map(str, arguments)]
        result = CliRunner().invoke(app, command)
        if result.exception is not None:
            raise result.exception
        return list(yaml.safe_load_all(result.stdout))

    return run


def worker_group(job):
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return group


def limits(template):
    return template["spec"]["containers"][0]["resources"]["limits"]


def test_it_is_valid_and_carries_the_run_file(render_k8s, all_problems, tmp_path):
    config_map, job = render_k8s("--queue", "research")
    assert all_problems([config_map, job]) == []
    (tmp_path / "run.yaml").write_text(config_map["data"]["run.yaml"])
    assert load_run_file(tmp_path / "run.yaml") == load_run_file(QUICKSTART, ["output_dir=/data/outputs"])
    assert job["metadata"]["name"] == "quickstart"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert job["spec"]["entrypoint"] == "caltune run --config /etc/caltune/run.yaml --resume"
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"name": "run", "configMap": {"name": config_map["metadata"]["name"]}} in head["volumes"]
    assert {"name": "run", "mountPath": "/etc/caltune", "readOnly": True} in head["containers"][0]["volumeMounts"]
    assert job["spec"]["metadata"]["caltune_folder"] == "/data/outputs/quickstart"


def test_its_pods_are_those_of_the_base(render_k8s, overlay, pick):
    """Written once by hand and once by code: accounts, security, volumes and environment must not drift apart."""
    _, made = render_k8s("--set", "resources.cpus_per_worker=4", "--memory", "16Gi")
    base = pick(overlay("base"), "RayJob", "caltune-retrain")
    ours, theirs = made["spec"]["rayClusterSpec"], base["spec"]["rayClusterSpec"]
    assert made["spec"]["submitterPodTemplate"] == base["spec"]["submitterPodTemplate"]
    assert worker_group(made)["template"] == worker_group(base)["template"]
    theirs["headGroupSpec"]["template"]["spec"]["volumes"][-1]["configMap"]["name"] = "quickstart-run"
    assert ours["headGroupSpec"] == theirs["headGroupSpec"]
    assert ours["authOptions"] == theirs["authOptions"]
    _, elastic = render_k8s("--set", "resources.workers=4", "--set", "resources.min_workers=2")
    assert elastic["spec"]["rayClusterSpec"]["autoscalerOptions"] == theirs["autoscalerOptions"]


def test_workers_as_the_run_file_says(render_k8s, all_problems):
    settings = ["resources.workers=4", "resources.use_gpu=true", "resources.cpus_per_worker=6"]
    config_map, job = render_k8s(*[part for text in settings for part in ("--set", text)], "--memory", "64Gi")
    assert all_problems([config_map, job]) == []
    group = worker_group(job)
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 4, 4)
    assert limits(group["template"]) == {"cpu": "6", "memory": "64Gi", "nvidia.com/gpu": "1"}
    assert group["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert limits(head["template"]) == {"cpu": "2", "memory": "8Gi"}
    assert head["resources"] == {"CPU": "0"}
    assert "enableInTreeAutoscaling" not in job["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    ("command", "settings", "least", "most"),
    [
        ("run", ["resources.workers=2", "evaluation.actors=4"], 4, 4),
        ("train", ["resources.workers=2", "evaluation.actors=4"], 2, 2),
        ("evaluate", ["resources.workers=2", "evaluation.actors=4"], 4, 4),
        ("train", ["resources.workers=4", "resources.min_workers=2"], 2, 4),
        ("tune", ["resources.workers=2", "tune={concurrency: 3, space: {calm.eta: {uniform: [0.1, 1.0]}}}"], 6, 6),
    ],
)
def test_as_many_pods_as_run_at_the_same_time(command, settings, least, most, render_k8s, all_problems):
    options = [part for text in settings for part in ("--set", text)]
    config_map, job = render_k8s("--command", command, *options)
    assert all_problems([config_map, job]) == []
    group = worker_group(job)
    assert (group["minReplicas"], group["maxReplicas"]) == (least, most)
    assert job["spec"]["rayClusterSpec"].get("enableInTreeAutoscaling", False) is (least < most)


def test_other_options_are_the_commands_own(render_k8s):
    _, job = render_k8s("--command", "train", "--method", "calm", "--hours", "1.5", "--name", "calm-only")
    assert job["spec"]["entrypoint"] == "caltune train --config /etc/caltune/run.yaml --resume --method calm"
    assert job["spec"]["activeDeadlineSeconds"] == 5400
    assert job["metadata"]["name"] == "calm-only"
    assert job["metadata"]["labels"]["caltune.io/run"] == "quickstart"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "n" * 48], "48 characters; a RayJob may have 47; choose another one with --name"),
        (["--set", "run=2027-01"], "must begin with a lower-case letter"),
        (["--set", "output_dir=outputs"], "--set output_dir=/data/outputs"),
        (["--set", "output_dir=/data/../etc"], "output_dir is '/data/../etc'"),
        (["--set", "data.source={kind: file, path: /home/me/rows.jsonl}"], "--set data.source.path=/data/rows.jsonl"),
        (["--set", "model.name=/models/llama"], "--set model.name=/data/llama"),
        (["--set", "resources.storage_path=/scratch/x"], "--set resources.storage_path=/data/x"),
        (["--command", "validate"], "--command validate: choose run, train, tune, evaluate"),
        (["--command", "tune"], "the run file has no section 'tune'"),
        (["--command", "train", "--methd", "calm"], "caltune train: No such option: --methd"),
        (["--command", "train", "--method", "calm; rm"], "characters that a shell would read"),
        (["--overwrite"], "--resume is always given"),
        (["--image", "registry.example.com/caltune/trainer"], "needs a tag other than latest"),
        (["--memory", "16"], "expected a quantity such as 16Gi"),
        (["--hours", "0"], "--hours 0.0: choose more than 0"),
        (["--hours", "0.4"], "preRunningDeadlineSeconds must be less than activeDeadlineSeconds"),
        (["--set", "tracking.uri=http://me:pass@mlflow"], "has a password in a URL"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_written(arguments, said, render_k8s, tmp_path):
    with pytest.raises(UsageError) as refused:
        render_k8s(*arguments, "--output", tmp_path / "job.yaml")
    assert said in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_output_goes_to_a_file(render_k8s, tmp_path):
    target = tmp_path / "job.yaml"
    assert render_k8s("--output", target) == []
    assert [doc["kind"] for doc in yaml.safe_load_all(target.read_text())] == ["ConfigMap", "RayJob"]
