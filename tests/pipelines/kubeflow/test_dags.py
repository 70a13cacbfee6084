"""Both pipelines, compiled: which steps there are, in which order, with what, and what stands in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from components.errors import UsageError
from pipelines.kubeflow.settings import Settings, times

ROOT = Path(__file__).parents[3]


def containers(spec):
    return {name.removeprefix("exec-"): each["container"] for name, each in spec["deploymentSpec"]["executors"].items()}


def graphs(spec):
    """The tasks of the root and of every branch, by the graph's name."""
    parts = {"root": spec["root"], **spec["components"]}
    return {name: part["dag"]["tasks"] for name, part in parts.items() if "dag" in part}


def branches(spec, graph):
    """The two branches at the end of a graph: for each its condition, and the graph behind it."""
    (fork,) = (task for key, task in graphs(spec)[graph].items() if key.startswith("condition-branches"))
    return [
        (task["triggerPolicy"]["condition"], task["componentRef"]["name"])
        for task in graphs(spec)[fork["componentRef"]["name"]].values()
    ]


def every_task(spec):
    """The tasks that do something, by the title that is shown."""
    found = [task for tasks in graphs(spec).values() for task in tasks.values()]
    working = [task for task in found if "executorLabel" in spec["components"][task["componentRef"]["name"]]]
    return {task["taskInfo"]["name"]: task for task in working}


def titles(tasks):
    """Titles in an order that the dependencies allow; there is only one for a chain."""
    left, order = dict(tasks), []
    while left:
        ready = [key for key, task in left.items() if not set(task.get("dependentTasks", [])) & left.keys()]
        assert len(ready) == 1, f"not a chain: {ready}"
        order.append(left.pop(ready[0])["taskInfo"]["name"])
    return order


METHODS = [
    "evaluate-base",
    "train-sft",
    "evaluate-sft",
    "train-calm-uq4ct",
    "evaluate-calm-uq4ct",
    "recalibrate-calm-uq4ct",
]


def test_calibrate_is_one_chain_up_to_the_gate(compiled):
    spec, _ = compiled("calibrate")
    assert titles(graphs(spec)["root"])[:-1] == ["prepare", "evaluate-champion", *METHODS, "compare", "gate"]


def test_a_gate_without_the_champion_does_not_measure_it(compiled, run_file):
    """The run file's own rule compares with the champion; one that sets a bound does not."""
    gate = {"method": "sft", "rules": [{"metric": "accuracy", "threshold": 0.5}]}
    spec, _ = compiled("calibrate", run_file(gate=gate))
    assert titles(graphs(spec)["root"])[:-1] == ["prepare", *METHODS, "compare", "gate"]


def test_calibrate_registers_on_a_pass_and_refuses_otherwise(compiled):
    spec, _ = compiled("calibrate")
    passed, refused = branches(spec, "root")
    assert passed[0] == "inputs.parameter_values['pipelinechannel--gate-passed'] == true"
    assert refused[0] == f"!({passed[0]})"
    assert [titles(graphs(spec)[graph]) for _, graph in (passed, refused)] == [["register"], ["refuse"]]


def test_retrain_trains_only_behind_the_drift_decision(compiled):
    spec, _ = compiled("retrain")
    assert titles(graphs(spec)["root"])[:-1] == ["prepare", "evaluate-champion", "decide-drift"]
    drifted, not_drifted = branches(spec, "root")
    assert drifted[0].endswith("['pipelinechannel--decide-drift-drifted'] == true")
    assert not_drifted[0] == f"!({drifted[0]})"
    assert titles(graphs(spec)[not_drifted[1]]) == ["stop"]
    assert titles(graphs(spec)[drifted[1]])[:-1] == [*METHODS, "compare", "gate"]
    passed, refused = branches(spec, drifted[1])
    assert titles(graphs(spec)[passed[1]]) == ["register", "promote"]
    assert titles(graphs(spec)[refused[1]]) == ["refuse"]


@pytest.mark.parametrize("which", ["calibrate", "retrain"])
def test_no_step_is_ever_taken_from_the_cache(compiled, which):
    """Caching is on for a task whose options say `enableCache: true`, and off where they are empty."""
    spec, _ = compiled(which)
    tasks = every_task(spec)
    assert {"evaluate-sft", "train-sft"} <= tasks.keys()
    assert {title: task["cachingOptions"] for title, task in tasks.items() if task["cachingOptions"]} == {}


@pytest.mark.parametrize("which", ["calibrate", "retrain"])
def test_nothing_is_installed_when_a_step_runs(compiled, which):
    spec, _ = compiled(which)
    for name, container in containers(spec).items():
        text = " ".join(container["command"] + container["args"])
        assert "pip" not in text.replace("pipelines", "").replace("pipeline", ""), name
        assert "python3 -m kfp.dsl.executor_main" in text
        assert container["image"] == "registry/steps:1"


@pytest.mark.slow
def test_steps_import_modules_that_there_are(compiled):
    """Read off the source that is sent to the pods: a wrong name would show only there."""
    import importlib
    import re

    for on in ("step", "ray", "rayjob"):
        spec, _ = compiled("calibrate" if on != "step" else "retrain", train_on=on, ray_address="http://head:8265")
        for container in containers(spec).values():
            found = re.findall(r"from (pipelines\S+) import (.+)", container["command"][-1])
            assert found
            for module, names in found:
                assert all(hasattr(importlib.import_module(module), name) for name in names.split(", "))


def test_artifacts_have_types(compiled):
    spec, _ = compiled("retrain")
    found = {
        (name.removeprefix("comp-"), key): artifact["artifactType"]["schemaTitle"]
        for name, part in spec["components"].items()
        for key, artifact in part.get("outputDefinitions", {}).get("artifacts", {}).items()
    }
    assert found["prepare", "data"] == "system.Dataset"
    assert found["train", "adapter"] == "system.Model"
    assert found["evaluate-adapter", "metrics"] == "system.Metrics"
    assert found["compare", "report"] == "system.HTML"
    assert found["gate", "verdict"] == "system.Markdown"


def test_what_is_measured_is_what_was_trained(compiled):
    spec, _ = compiled("calibrate")
    tasks = graphs(spec)["root"]
    names = {task["taskInfo"]["name"]: key for key, task in tasks.items()}
    for method in ("sft", "calm-uq4ct"):
        source = tasks[names[f"evaluate-{method}"]]["inputs"]["artifacts"]["adapter"]["taskOutputArtifact"]
        assert source == {"outputArtifactKey": "adapter", "producerTask": names[f"train-{method}"]}


def test_resources_are_the_run_files(compiled, run_file):
    """Two workers of three cores and 16Gi train in one container: six cores, 32Gi, and with GPUs two of them."""
    config = run_file(methods=["sft"], recalibrate={}, resources={"workers": 2, "cpus_per_worker": 3, "use_gpu": True})
    spec, _ = compiled("calibrate", config)
    made = containers(spec)
    train = made["train"]["resources"]
    assert (train["resourceCpuLimit"], train["resourceMemoryLimit"]) == ("6", "32Gi")
    assert (train["resourceCpuRequest"], train["resourceMemoryRequest"]) == ("6", "32Gi")
    assert train["accelerator"]["resourceType"] == "nvidia.com/gpu"
    assert train["accelerator"]["resourceCount"] == "2"
    assert made["evaluate-adapter"]["resources"]["resourceCpuLimit"] == "3"
    assert "accelerator" not in made["gate"]["resources"]
    for name, container in made.items():
        limits = container["resources"].keys()
        assert {"resourceCpuRequest", "resourceCpuLimit", "resourceMemoryRequest", "resourceMemoryLimit"} <= limits, (
            name
        )


def test_retries(compiled):
    """A training goes on from its checkpoint; a promotion is never repeated blindly."""
    spec, _ = compiled("retrain")
    found = {title: task.get("retryPolicy", {}).get("maxRetryCount", 0) for title, task in every_task(spec).items()}
    assert found["train-sft"] == 3
    assert found["evaluate-sft"] == found["prepare"] == 2
    assert found["promote"] == found["stop"] == found["refuse"] == 0
    assert every_task(spec)["train-sft"]["retryPolicy"]["backoffDuration"] == "60s"


@pytest.mark.parametrize("which", ["calibrate", "retrain"])
def test_every_step_has_the_volume_and_is_not_root(compiled, which):
    spec, platform = compiled(which)
    placed = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert placed.keys() == spec["deploymentSpec"]["executors"].keys()
    for each in placed.values():
        assert each["pvcMount"][0]["constant"] == "caltune-data"
        assert each["pvcMount"][0]["mountPath"] == "/data"
        assert each["securityContext"]["runAsNonRoot"] is True


@pytest.mark.slow
def test_a_ray_cluster_trains(compiled):
    spec, platform = compiled("calibrate", train_on="ray", ray_address="http://head:8265")
    step = spec["root"]["dag"]["tasks"]["train-on-ray"]
    assert step["inputs"]["parameters"]["address"]["runtimeValue"]["constant"] == "http://head:8265"
    assert containers(spec)["train-on-ray"]["resources"]["resourceCpuLimit"] == "1"
    secrets = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-train-on-ray"]["secretAsEnv"]
    assert {secret["secretName"] for secret in secrets} == {"caltune-hub", "caltune-ray-token"}


@pytest.mark.slow
def test_a_rayjob_trains(compiled):
    spec, _ = compiled("calibrate", train_on="rayjob", ray_address="http://head:8265")
    inputs = spec["root"]["dag"]["tasks"]["train-as-rayjob"]["inputs"]["parameters"]
    assert inputs["image"]["runtimeValue"]["constant"] == "registry/steps:1"
    assert inputs["hours"]["runtimeValue"]["constant"] == 24.0


@pytest.mark.slow
def test_the_same_run_file_gives_the_same_text(text, run_file):
    assert text("retrain") == text("retrain", run_file(), image="registry/steps:1")


@pytest.mark.slow
def test_the_run_files_own_tracking_server_is_kept(compiled, run_file):
    """The variable would win over the run file."""
    named = run_file(methods=["sft"], recalibrate={}, tracking={"uri": "http://elsewhere:5000"})
    for config, expected in ((run_file(), True), (named, False)):
        spec, _ = compiled("calibrate", config)
        variables = {variable["name"] for variable in containers(spec)["prepare"]["env"]}
        assert "CALTUNE_CACHE" in variables
        assert ("MLFLOW_TRACKING_URI" in variables) is expected


@pytest.mark.parametrize(
    ("sections", "settings", "problem"),
    [
        ({"gate": None}, {}, "no section 'gate'"),
        ({"drift": None}, {}, "no section 'drift'"),
        ({"tracking": {"enabled": False}}, {}, "keep models and verdicts in MLflow"),
        ({"output_dir": "outputs"}, {}, "output_dir is 'outputs'"),
        ({"run": "a" * 40}, {}, "too long"),
        ({"run": "a" * 30}, {"train_on": "rayjob"}, "47"),
        ({}, {"train_on": "ray"}, "--ray-address"),
        ({}, {"memory": "lots"}, "--memory lots"),
        ({}, {"train_on": "rayjob", "job": "1"}, "on a cluster only"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(compiled, run_file, sections, settings, problem):
    with pytest.raises(UsageError, match=problem):
        compiled("retrain", run_file(**sections), **settings)


def test_compiling_needs_no_torch():
    code = "import sys, pipelines.kubeflow.dags; print({'torch', 'ray', 'mlflow'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(("quantity", "count", "expected"), [("16Gi", 2, "32Gi"), ("512Mi", 3, "1536Mi")])
def test_memory_is_multiplied(quantity, count, expected):
    assert times(quantity, count) == expected


def test_settings_are_for_a_cluster_unless_a_job_is_named():
    assert Settings("image").job is None
