"""What is decided about a pipeline's steps when it is compiled: image, resources, retries, volume, secrets, no caching.

Nothing is ever taken from Kubeflow's cache: a step's result depends on the run folder, which the cache's key does not
see, and each execution has a folder of its own. What was done already is found in the folder instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from components.config import RunConfig
from components.errors import UsageError
from pipelines.k8s_job import CORES
from pipelines.k8s_pods import DATA, ENVIRONMENT, GPU, USER
from pipelines.kubeflow.remote import job_name
from pipelines.kubeflow.steps import JOB_LENGTH, run_name

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

TrainOn = Literal["step", "ray", "rayjob"]
CLAIM, TOKEN_SECRET, HUB_SECRET = "caltune-data", "caltune-ray-token", "caltune-hub"
LIGHT_MEMORY = "4Gi"
BACKOFF, BACKOFF_FACTOR, LONGEST_BACKOFF = "60s", 2.0, "600s"
RETRIES = {
    "prepare": 2,
    "train": 3,
    "evaluate": 2,
    "recalibrate": 2,
    "compare": 2,
    "decide": 1,
    "gate": 1,
    "register": 2,
}
"""How often a step is tried again. Steps that are not here are tried once: a promotion that may have happened is for a
person to look at, and what says why a run ends cannot go wrong another way."""
_HEAVY = ("train", "evaluate")


@dataclass(frozen=True)
class Settings:
    """Choices made when a pipeline is compiled.

    Attributes:
        image: Image of the steps.
        train_on: Where methods are trained: in the step's own container, on a Ray cluster that is there, or on that of
            a RayJob which the step creates.
        ray_address: The cluster's dashboard, for `ray`.
        trainer_image: Image of Ray's pods, for `rayjob`.
        memory: Memory of each worker.
        hours: After which a RayJob is stopped.
        job: Name of this execution, for one on this machine; on a cluster it is the id that Kubeflow gives, and steps
            have the shared volume.
    """

    image: str
    train_on: TrainOn = "step"
    ray_address: str | None = None
    trainer_image: str | None = None
    memory: str = "16Gi"
    hours: float = 24.0
    job: str | None = None


@dataclass(frozen=True)
class Needs:
    """What a step's container gets.

    Attributes:
        cpus: CPU cores.
        memory: A Kubernetes quantity.
        gpus: GPUs.
        retries: How often it is tried again.
    """

    cpus: int
    memory: str
    gpus: int
    retries: int


def check(config: RunConfig, settings: Settings) -> None:
    """Refuses what would fail only on the cluster.

    Raises:
        UsageError: A name is too long, a path is not on the volume, the run file holds a secret, or a choice lacks
            what it needs.
    """
    if not config.tracking.enabled:
        raise UsageError("tracking.enabled is false, but the pipelines keep models and verdicts in MLflow")
    if config.gate is None:
        raise UsageError("the run file has no section 'gate', which says what may become champion")
    if settings.train_on == "ray" and not settings.ray_address:
        raise UsageError("--train-on ray needs --ray-address http://<head>:8265")
    longest = run_name(config.run, "0" * JOB_LENGTH)
    if len(longest) > 47:
        raise UsageError(
            f"run '{config.run}' is too long: each execution adds {JOB_LENGTH + 1} characters to it, of 47"
        )
    if settings.job is not None:
        if settings.train_on == "rayjob":
            raise UsageError("--train-on rayjob works on a cluster only")
        return
    from pipelines.k8s_job import Placement, manifests

    image = settings.trainer_image or settings.image
    methods = config.methods if settings.train_on == "rayjob" else config.methods[:1]
    for method in methods:
        name = job_name(longest, method) if settings.train_on == "rayjob" else None
        manifests(config, "train", [], Placement(image, "caltune", name, None, settings.memory, settings.hours))


def needs(step: str, config: RunConfig, settings: Settings) -> Needs:
    """What a step's container gets, after the run file's `resources`.

    Args:
        step: `train`, `evaluate` and so on.
        config: The run.
        settings: Where training happens; elsewhere the step only waits for it.
    """
    retries = RETRIES.get(step, 0)
    if step not in _HEAVY or (step == "train" and settings.train_on != "step"):
        return Needs(1, LIGHT_MEMORY, 0, retries)
    resources = config.resources
    count = resources.workers if step == "train" else config.evaluation.actors
    cores = resources.cpus_per_worker or CORES
    return Needs(cores * count, times(settings.memory, count), count if resources.use_gpu else 0, retries)


def times(quantity: str, count: int) -> str:
    """A multiple of a quantity of memory, `16Gi` twice is `32Gi`.

    Raises:
        UsageError: It is no quantity.
    """
    found = re.fullmatch(r"([1-9]\d*)(Mi|Gi|M|G)", quantity)
    if found is None:
        raise UsageError(f"--memory {quantity}: expected a quantity such as 16Gi")
    return f"{int(found.group(1)) * count}{found.group(2)}"


def place(task: PipelineTask, step: str, config: RunConfig, settings: Settings) -> None:
    """Gives a step its image, resources, retries, volume and variables; takes caching from it."""
    wanted = needs(step, config, settings)
    task.set_caching_options(False)
    task.set_container_image(settings.image)
    for set_cpus in (task.set_cpu_request, task.set_cpu_limit):
        set_cpus(str(wanted.cpus))
    for set_memory in (task.set_memory_request, task.set_memory_limit):
        set_memory(wanted.memory)
    if wanted.gpus:
        task.set_accelerator_type(GPU).set_accelerator_limit(wanted.gpus)
    if wanted.retries:
        task.set_retry(wanted.retries, BACKOFF, BACKOFF_FACTOR, LONGEST_BACKOFF)
    if settings.job is None:
        _put_on_cluster(task, step, config, settings)


def _put_on_cluster(task: PipelineTask, step: str, config: RunConfig, settings: Settings) -> None:
    from kfp import kubernetes

    for name, value in ENVIRONMENT.items():
        if name != "MLFLOW_TRACKING_URI" or config.tracking.uri is None:  # the variable would win over the run file
            task.set_env_variable(name, value)
    kubernetes.mount_pvc(task, CLAIM, DATA)
    kubernetes.use_secret_as_env(task, HUB_SECRET, {"HF_TOKEN": "HF_TOKEN"}, optional=True)
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    if step == "train" and settings.train_on == "ray":
        task.set_env_variable("RAY_AUTH_MODE", "token")
        kubernetes.use_secret_as_env(task, TOKEN_SECRET, {"auth_token": "RAY_AUTH_TOKEN"})
