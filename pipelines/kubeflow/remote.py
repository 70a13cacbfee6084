"""Training by Ray's workers instead of in the step's own container: on a cluster that is there, or on a RayJob's.

Either way the workers' side is `caltune train --resume --method ...` on the same run folder, so it has to be on storage
that the cluster mounts at the same place. A step that is tried again, because its pod was lost, follows the job that it
finds at work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.errors import JobError
from pipelines.kubeflow.steps import check_data, config_of, hand_over_adapter
from pipelines.run_folder import RUN_FILE

if TYPE_CHECKING:
    from components.config import RunConfig
    from pipelines.k8s_job import Placement
    from pipelines.kubeflow.steps import Artifact


def train_by_job(folder: str, method: str, address: str, data: Artifact, adapter: Artifact) -> None:
    """Submits the training to a Ray cluster and waits for its end.

    Args:
        folder: The run folder, at the same place on the cluster.
        method: The method.
        address: Ray's dashboard, `http://<head>:8265`.
        data: The splits, as the pipeline shows them.
        adapter: Gets a copy of the adapter folder.

    Raises:
        JobError: The job did not end well.
    """
    from ray_jobs.job_follow import follow
    from ray_jobs.job_server import JobServer, contact
    from ray_jobs.job_states import find_twin
    from ray_jobs.submit import make_request, submit

    check_data(folder, data)
    request = make_request("train", config_of(folder), ["--resume", "--method", method], data_on_cluster=True)
    server = JobServer.connect(address)
    with contact(server):
        twin = find_twin(server.jobs(), request.tags)
    if twin is None:
        submit(server, request, _say)
    ended = follow(server, request.job_id if twin is None else twin.id, write=_write, say=_say)
    if ended.exit_code != 0:
        raise JobError(ended.ending(), ended.exit_code)
    hand_over_adapter(folder, method, adapter)


def train_by_rayjob(
    folder: str, method: str, image: str, memory: str, hours: float, data: Artifact, adapter: Artifact
) -> None:
    """Creates a RayJob in this pod's namespace and waits for its end.

    Args:
        folder: The run folder.
        method: The method.
        image: Image of Ray's pods.
        memory: Memory of each worker.
        hours: After which it is stopped.
        data: The splits, as the pipeline shows them.
        adapter: Gets a copy of the adapter folder.

    Raises:
        JobError: It did not end well, or the API server refuses.
    """
    from pipelines.k8s_api import RayJobs
    from pipelines.k8s_job import RUN_LABEL, Placement
    from pipelines.k8s_launch import follow

    check_data(folder, data)
    config, jobs = config_of(folder), RayJobs.here()
    placement = Placement(image, jobs.namespace, job_name(config.run, method), None, memory, hours)
    document = ray_job(config, method, placement)
    name = document["metadata"]["name"]
    if name not in {job["metadata"]["name"] for job in jobs.with_label(RUN_LABEL, config.run)}:
        jobs.create(document)
    code = follow(jobs, name)
    if code != 0:
        raise JobError(f"RayJob {name} did not end well (exit code {code}); see kubectl describe rayjob {name}", code)
    hand_over_adapter(folder, method, adapter)


def job_name(run: str, method: str) -> str:
    """Name of the RayJob that trains a method of a run."""
    return f"{run}-{method}".replace("_", "-")


def ray_job(config: RunConfig, method: str, placement: Placement) -> dict[str, Any]:
    """The RayJob that trains a method. Its run file is the run folder's own, so it needs no ConfigMap.

    Args:
        config: The run.
        method: The method.
        placement: Where it goes.

    Raises:
        UsageError: A name or a path cannot work.
    """
    from pipelines.k8s_job import manifests
    from pipelines.k8s_pods import RUN_FOLDER

    _, job = manifests(config, "train", ["--method", method], placement)
    spec = job["spec"]
    words = spec["entrypoint"].split(" ")
    words[words.index("--config") + 1] = str(config.folder / RUN_FILE)
    spec["entrypoint"] = " ".join(words)
    pod = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounted = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == RUN_FOLDER]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] not in mounted]
    mounts = pod["containers"][0]["volumeMounts"]
    pod["containers"][0]["volumeMounts"] = [mount for mount in mounts if mount["name"] not in mounted]
    return job


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(text: str) -> None:
    print(text, flush=True)
