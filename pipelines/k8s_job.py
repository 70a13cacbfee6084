"""A run file as a RayJob: the manifest, and what has to be true of the run before there is one."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from components.config import RunConfig
from components.errors import UsageError
from components.run_file import config_hash, git_state, to_yaml
from pipelines.k8s_pods import (
    DATA,
    RAY_VERSION,
    RUN_FOLDER,
    autoscaling,
    head_template,
    submitter_template,
    worker_template,
)
from pipelines.k8s_ray_rules import QUEUE_LABEL, name_problems
from pipelines.k8s_rules import refuse_problems
from ray_jobs.job_secrets import refuse_secrets
from ray_jobs.job_states import COMMAND, COMMIT, DIRTY, FOLDER, HASH, RUN

RUN_LABEL = "caltune.io/run"
"""Tells RayJobs of one run, or of one schedule, from others."""
CORES = 4
"""CPU cores of a worker where the run file leaves `resources.cpus_per_worker` open."""
HEAD_CORES, HEAD_MEMORY = 2, "8Gi"
PRE_RUNNING_SECONDS = 1800
CLUSTER_LIFETIME_SECONDS = 600
_QUANTITY = re.compile(r"[1-9]\d*(Mi|Gi|M|G)")
_RUN_FILE = f"{RUN_FOLDER}/run.yaml"


@dataclass(frozen=True)
class Placement:
    """Where and how long a run goes.

    Attributes:
        image: Trainer image, with a tag or a digest.
        namespace: Namespace of `k8s/base`, or another one that has the same accounts, claims and secrets.
        name: The RayJob's name; None takes the run's.
        queue: A Kueue local queue; None starts at once.
        memory: Memory of each worker, a Kubernetes quantity.
        hours: After which the job is stopped.
    """

    image: str
    namespace: str
    name: str | None
    queue: str | None
    memory: str
    hours: float


@dataclass(frozen=True)
class Pods:
    """What a run asks of a cluster.

    Attributes:
        count: Worker pods.
        least: Worker pods that it starts with and goes on with; fewer than `count` for elastic training only.
        cpus: CPU cores of each.
        gpus: GPUs of each, 0 or 1.
        head_works: Evaluation runs in caltune's own process, on the head.
    """

    count: int
    least: int
    cpus: int
    gpus: int
    head_works: bool


def pods_needed(config: RunConfig, command: str) -> Pods:
    """Worker pods for everything that a command runs at the same time.

    All of them have to be there from the start, because training and evaluation refuse to begin on a cluster without
    room; unless the run file says with `resources.min_workers` that training may begin with fewer.

    Args:
        config: The run.
        command: `run`, `train`, `tune` or `evaluate`.

    Raises:
        UsageError: There is nothing to tune.
    """
    resources, actors = config.resources, config.evaluation.actors
    on_actors = actors > 1 or resources.use_gpu
    count, least = resources.workers, resources.min_workers or resources.workers
    if command == "tune":
        if config.tune is None:
            raise UsageError("the run file has no section 'tune'")
        count = least = count * config.tune.concurrency
    elif command == "evaluate":
        count = least = actors
    elif command == "run" and on_actors:
        count, least = max(count, actors), max(least, actors)
    return Pods(count, least, resources.cpus_per_worker or CORES, int(resources.use_gpu), not on_actors)


def manifests(config: RunConfig, command: str, arguments: Sequence[str], placement: Placement) -> list[dict[str, Any]]:
    """A ConfigMap with the resolved run file and the RayJob that runs it.

    A failed try is taken up again from the last checkpoint, on a new cluster: `--resume` is always given, and the run's
    name, so its folder, stays the same (E41).

    Args:
        config: The run, with all overrides.
        command: Command of `caltune`: `run`, `train`, `tune` or `evaluate`.
        arguments: More options of the command.
        placement: Where it goes.

    Returns:
        Both documents, checked against the operator's rules and ours.

    Raises:
        UsageError: A name, a path, a figure or an option cannot work, or there is a secret in the run file.
    """
    name = placement.name or config.run
    for problem in name_problems("RayJob", name):
        raise UsageError(f"{problem}; choose another one with --name")
    _check(config, arguments, placement)
    run_file = to_yaml(config)
    refuse_secrets("the run file", run_file)
    labels = {
        "app.kubernetes.io/name": "caltune",
        "app.kubernetes.io/component": "run",
        "app.kubernetes.io/part-of": "caltune",
        RUN_LABEL: config.run,
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-run", "namespace": placement.namespace, "labels": labels},
        "immutable": True,
        "data": {"run.yaml": LiteralScalarString(run_file)},
    }
    queue = {QUEUE_LABEL: placement.queue} if placement.queue else {}
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "namespace": placement.namespace, "labels": labels | queue},
        "spec": _spec(config, command, arguments, placement, f"{name}-run"),
    }
    documents: list[dict[str, Any]] = [config_map, job]
    refuse_problems(documents)
    return documents


def as_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Manifests as one YAML stream."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda data: True
    stream = io.StringIO()
    yaml.dump_all(documents, stream)
    return stream.getvalue()


def _spec(
    config: RunConfig, command: str, arguments: Sequence[str], placement: Placement, config_map: str
) -> dict[str, Any]:
    pods, image, memory = pods_needed(config, command), placement.image, placement.memory
    head = (pods.cpus, memory) if pods.head_works else (HEAD_CORES, HEAD_MEMORY)
    git = git_state()
    return {
        "entrypoint": " ".join(["caltune", command, "--config", _RUN_FILE, "--resume", *arguments]),
        "submissionMode": "K8sJobMode",
        "metadata": {  # by these `caltune list`, `status` and `logs` know the job
            RUN: config.run,
            COMMAND: command,
            FOLDER: str(config.folder),
            HASH: config_hash(config),
            COMMIT: str(git["commit"] or "unknown"),
            DIRTY: "unknown" if git["dirty"] is None else str(git["dirty"]).lower(),
        },
        "backoffLimit": 1,
        "submitterConfig": {"backoffLimit": 0},
        "activeDeadlineSeconds": math.ceil(placement.hours * 3600),
        "preRunningDeadlineSeconds": PRE_RUNNING_SECONDS,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": CLUSTER_LIFETIME_SECONDS,
        "submitterPodTemplate": submitter_template(image),
        "rayClusterSpec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token", "secretName": "caltune-ray-token"},
            "headGroupSpec": {
                "rayStartParams": {},
                "resources": {"CPU": "0"},  # nothing but the command itself runs on the head
                "template": head_template(image, *head, config_map),
            },
            **(autoscaling() if pods.least < pods.count else {}),
            "workerGroupSpecs": [
                {
                    "groupName": "gpu" if pods.gpus else "cpu",
                    "replicas": pods.count,
                    "minReplicas": pods.least,
                    "maxReplicas": pods.count,
                    "rayStartParams": {},
                    "template": worker_template(image, pods.cpus, memory, pods.gpus),
                }
            ],
        },
    }


def _check(config: RunConfig, arguments: Sequence[str], placement: Placement) -> None:
    """What no rule about manifests covers.

    Raises:
        UsageError: A path is not on the shared volume, an option would undo what a first try has done, or a figure is
            no figure.
    """
    if {"--overwrite", "--resume"} & set(arguments):
        raise UsageError("--resume is always given, so that a second try goes on with the first one's checkpoints")
    if not _QUANTITY.fullmatch(placement.memory):
        raise UsageError(f"--memory {placement.memory}: expected a quantity such as 16Gi")
    if not 0 < placement.hours <= 24 * 30:
        raise UsageError(f"--hours {placement.hours}: choose more than 0 and at most 720")
    places = {"output_dir": config.output_dir}
    data = config.data
    sources = {"data.source": data.source, "data.test_source": data.test_source}
    sources |= {f"data.ood.{name}": source for name, source in data.ood.items()}
    for key, whole in [*sources.items()]:
        sources |= {f"{key}.sources.{i}": part for i, part in enumerate(whole.sources or [] if whole else [])}
    places |= {f"{key}.path": source.path for key, source in sources.items() if source and source.path}
    model = config.model.name
    if model.startswith(("/", ".", "~")) or Path(model).is_dir():
        places["model.name"] = Path(model)
    if config.drift is not None and config.drift.prediction_log is not None:
        places["drift.prediction_log"] = config.drift.prediction_log
    storage = config.resources.storage_path
    if storage is not None and "://" not in storage:
        places["resources.storage_path"] = Path(storage)
    for key, place in places.items():
        if PurePosixPath(DATA) not in PurePosixPath(place).parents or ".." in place.parts:
            raise UsageError(
                f"{key} is '{place}', which the cluster's pods do not have; put it on the shared volume, e.g. "
                f"--set {key}={DATA}/{place.name}"
            )
