"""Submitting a `caltune` command to a cluster as a Ray job.

What runs there is `python -m pipelines.cli <command> --config run.yaml ...` in a working directory with our code and
the resolved run file. The job's environment is set here and nowhere else; what workers need on top of it the job sets
itself (`ray_jobs/cluster.py`), and the two share no name, which Ray would refuse (E27).
"""

from __future__ import annotations

import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.config import RunConfig
from components.errors import JobError, UsageError
from components.run_file import config_hash, git_state
from ray_jobs.job_follow import POLL_SECONDS, Patience
from ray_jobs.job_package import RUN_FILE, UPLOAD_LIMIT_MIB, Package, make_package
from ray_jobs.job_secrets import job_environment, refuse_secrets
from ray_jobs.job_server import JobServer, ServerUnreachableError, contact
from ray_jobs.job_states import COMMAND, COMMIT, CONTACT_LOST, DIRTY, FOLDER, HASH, RUN, TIMED_OUT, find_twin

QUEUE_SECONDS = 5 * POLL_SECONDS


@dataclass(frozen=True)
class JobRequest:
    """A job, ready to be sent.

    Attributes:
        job_id: Its id, ours to choose.
        entrypoint: Shell command that it runs.
        environment: Variables of the job; no secrets.
        tags: Where its results are and what made them.
        package: What is sent.
    """

    job_id: str
    entrypoint: str
    environment: dict[str, str]
    tags: dict[str, str]
    package: Package


def make_request(
    command: str,
    config: RunConfig,
    arguments: Sequence[str] = (),
    *,
    env: Sequence[str] = (),
    data_on_cluster: bool = False,
    limit_mib: int = UPLOAD_LIMIT_MIB,
) -> JobRequest:
    """Prepares a job without contact to a cluster.

    Args:
        command: Command of `caltune`, e.g. `train`.
        config: The run, with all overrides.
        arguments: More options of the command, e.g. `--resume`.
        env: Variables of the job, each `NAME=VALUE` or `NAME` for its value here.
        data_on_cluster: Data paths are the cluster's; otherwise the files are sent.
        limit_mib: The most to send.

    Raises:
        UsageError: Something cannot work on a cluster, is too large, or is a secret.
    """
    package = make_package(config, data_on_cluster=data_on_cluster, limit_mib=limit_mib)
    environment = job_environment(env)
    entrypoint = shlex.join(["python", "-m", "pipelines.cli", command, "--config", RUN_FILE, *arguments])
    refuse_secrets("the command", entrypoint)
    if package.data:
        entrypoint = f"python -m ray_jobs.shipped_data && exec {entrypoint}"
    git = git_state()
    tags = {
        "job_name": config.run,  # shown by Ray's dashboard
        RUN: config.run,
        COMMAND: command,
        FOLDER: str(config.folder),
        HASH: config_hash(package.config),
        COMMIT: str(git["commit"] or "unknown"),
        DIRTY: "unknown" if git["dirty"] is None else str(git["dirty"]).lower(),
    }
    # Begins with the run's name so that a person can tell jobs apart, ends so that it is never used twice.
    job_id = f"{config.run}-{command}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return JobRequest(job_id, entrypoint, environment, tags, package)


def submit(server: JobServer, request: JobRequest, say: Callable[[str], None]) -> None:
    """Sends a job unless another one is at work on the same run.

    A head that has just come up answers some time before it accepts jobs, so that is tried again.

    Args:
        server: The cluster.
        request: The job.
        say: Gets a line when the cluster does not answer.

    Raises:
        UsageError: Another one is.
        JobError: The cluster does not answer.
    """
    with contact(server):
        twin = find_twin(server.jobs(), request.tags)
        if twin is not None:
            raise UsageError(
                f"the run '{request.tags[RUN]}' is already worked on by job {twin.id} ({twin.tags.get(COMMAND)}, "
                f"{twin.status}); wait for it with --queue\n"
                f"  see it end:  {server.command('logs', twin.id, '--follow')}\n"
                f"  stop it:     {server.command('stop', twin.id)}"
            )
    patience = Patience(say)
    with tempfile.TemporaryDirectory(prefix="caltune-job-") as folder:
        request.package.write(Path(folder))
        while True:
            try:
                server.submit(request.job_id, request.entrypoint, Path(folder), request.environment, request.tags)
                return
            except ServerUnreachableError as problem:
                if patience.ends_with(problem):
                    raise JobError(f"{server.address} accepts no job: {problem}", CONTACT_LOST) from None
            time.sleep(QUEUE_SECONDS)


def wait_in_queue(
    server: JobServer, request: JobRequest, say: Callable[[str], None], timeout: float | None = None
) -> None:
    """Returns when no job is at work on the same run any more.

    Args:
        server: The cluster.
        request: The job that waits; nothing of it is sent yet.
        say: Gets a line for each job that is waited for.
        timeout: Seconds after which to give up.

    Raises:
        JobError: It took too long (4), or the cluster does not answer (5).
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    patience, waited_for = Patience(say), ""
    while True:
        try:
            twin = find_twin(server.jobs(), request.tags)
            patience.answered()
            if twin is None:
                return
            if twin.id != waited_for:
                waited_for = twin.id
                say(f"waiting for job {twin.id} ({twin.tags.get(COMMAND)}, {twin.status}) on the same run")
        except ServerUnreachableError as problem:
            if patience.ends_with(problem):
                raise JobError("no contact with the cluster; nothing was submitted", CONTACT_LOST) from None
        if deadline is not None and time.monotonic() > deadline:
            raise JobError(f"timed out waiting for job {waited_for}; nothing was submitted", TIMED_OUT)
        time.sleep(QUEUE_SECONDS)
