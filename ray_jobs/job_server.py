"""A cluster's job server: Ray's client, with our addresses, time limits and words."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from packaging.requirements import Requirement

from components.errors import CaltuneError, JobError, UsageError
from ray_jobs.job_states import CONTACT_LOST, RUN, Job

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
_CHATTY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
_ADDRESS, _API_ADDRESS = "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"


class ServerUnreachableError(Exception):
    """The job server does not answer, now; it may later."""


class JobGoneError(CaltuneError):
    """The cluster does not know a job."""


class JobServer:
    """The jobs of one cluster. Use `JobServer.connect`.

    Args:
        client: Ray's client.
        named: The `--address` that it was found by; None if the environment named it.
    """

    def __init__(self, client: Any, named: str | None) -> None:
        self._client, self._named = client, named

    @classmethod
    def connect(cls, address: str | None) -> JobServer:
        """Finds a cluster: by `address`, else by `RAY_API_SERVER_ADDRESS` or `RAY_ADDRESS`.

        Raises:
            UsageError: None is named, it wants another token, or its version of Ray does not do.
            JobError: It cannot be reached.
        """
        chosen = address or os.environ.get(_API_ADDRESS) or os.environ.get(_ADDRESS)
        if not chosen:
            raise UsageError("no cluster named: --address http://<head>:8265, or set RAY_ADDRESS")
        if address and address != "auto" and "://" not in address:
            raise UsageError(f"--address {address}: write http://{address} (the address of Ray's dashboard)")
        with _environment({_API_ADDRESS: chosen}):  # Ray's client prefers the environment to its argument
            try:
                client = _client(chosen)
            except ServerUnreachableError as problem:
                raise JobError(
                    f"no cluster answers at {chosen} ({problem}); is the address that of Ray's dashboard "
                    "(http://<head>:8265), and is the cluster up?",
                    CONTACT_LOST,
                ) from None
        check_version(client.server_version)
        return cls(client, address)

    @property
    def address(self) -> str:
        """URL of the job server."""
        return str(self._client.get_address())

    def command(self, *words: str) -> str:
        """A `caltune` command line on this cluster, to be shown."""
        return " ".join(["caltune", *words, *(["--address", self._named] if self._named else [])])

    def jobs(self) -> list[Job]:
        """Our jobs that the cluster knows, in no order.

        Raises:
            ServerUnreachableError: No answer.
        """
        found = [Job.of(details) for details in _asked(self._client.list_jobs)]
        return [job for job in found if RUN in job.tags]

    def job(self, job_id: str) -> Job:
        """One job.

        Raises:
            ServerUnreachableError: No answer.
            JobGoneError: There is no such job.
        """
        return Job.of(_asked(self._client.get_job_info, job_id))

    def submit(
        self, job_id: str, entrypoint: str, working_dir: Path, env: dict[str, str], tags: dict[str, str]
    ) -> None:
        """Sends the folder and starts the command. May be called again with the same id when it has failed.

        Raises:
            ServerUnreachableError: No answer, and the job is not known to have been accepted.
        """
        try:
            _asked(
                self._client.submit_job,
                entrypoint=entrypoint,
                submission_id=job_id,
                runtime_env={"working_dir": str(working_dir), "env_vars": env},
                metadata=tags,
            )
        except CaltuneError as problem:
            if f"{job_id} already exists" not in str(problem):  # else an earlier call got through after all
                raise
        except ServerUnreachableError as problem:
            # The request may have arrived and only its answer got lost. The id is ours, so that can be found out.
            try:
                self.job(job_id)
            except JobGoneError:
                raise problem from None

    def stop(self, job_id: str) -> None:
        """Asks for a job to be stopped, which takes effect later.

        Raises:
            ServerUnreachableError: No answer.
            JobGoneError: There is no such job.
        """
        _asked(self._client.stop_job, job_id)

    def log(self, job_id: str) -> str:
        """All of the log so far.

        Raises:
            ServerUnreachableError: No answer; also where the node that has the log is gone.
            JobGoneError: There is no such job.
        """
        return str(_asked(self._client.get_job_logs, job_id))

    async def tail(self, job_id: str) -> AsyncIterator[str]:
        """The log from its beginning, in pieces as they come; ends when the server closes it.

        Raises:
            ServerUnreachableError: The connection broke.
        """
        import aiohttp

        try:
            async for piece in self._client.tail_job_logs(job_id):
                yield piece
        except (aiohttp.ClientError, RuntimeError, OSError) as problem:
            raise ServerUnreachableError(str(problem)) from problem


@contextmanager
def contact(server: JobServer) -> Iterator[None]:
    """For questions that are asked once: a cluster that does not answer is an error.

    Raises:
        JobError: It does not (5).
    """
    try:
        yield
    except ServerUnreachableError as problem:
        raise JobError(f"{server.address} does not answer: {problem}", CONTACT_LOST) from None


def check_version(server: str, required: str | None = None) -> None:
    """Refuses a cluster whose Ray our code does not run on; the code travels, Ray does not.

    Args:
        server: The cluster's version.
        required: Accepted versions; those of our own installation unless given.

    Raises:
        UsageError: Says which version is needed.
    """
    if required is None:
        requirements = map(Requirement, importlib.metadata.requires("caltune") or [])
        required = next(str(r.specifier) for r in requirements if r.name == "ray")
    if not Requirement(f"ray{required}").specifier.contains(server, prereleases=True):
        here = importlib.metadata.version("ray")
        raise UsageError(
            f"the cluster runs Ray {server}, this caltune needs ray{required} there (here: {here}); "
            "update the cluster's image, or use the caltune that belongs to it"
        )


def _client(address: str) -> Any:
    """Ray's client, which alone would wait for ever for a server that does not answer."""
    from ray.job_submission import JobSubmissionClient

    for name in _CHATTY:  # after the import, which sets them to INFO
        logging.getLogger(name).setLevel(logging.WARNING)

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            options.setdefault("timeout", (CONNECT_SECONDS, ANSWER_SECONDS))
            return super()._do_request(method, endpoint, **options)

        @property
        def server_version(self) -> str:
            return str(self._server_ray_version)

    return _asked(Client, address)


def _asked(ask: Any, *arguments: Any, **options: Any) -> Any:
    """Calls Ray's client and sorts its failures: unreachable at the moment, no such job, or not allowed."""
    import requests
    from ray.exceptions import AuthenticationError, RpcError

    try:
        return ask(*arguments, **options)
    except AuthenticationError as problem:
        _refused(str(problem))
    except (requests.RequestException, ConnectionError, RpcError) as problem:
        raise ServerUnreachableError(_briefly(problem)) from problem
    except RuntimeError as problem:
        text = str(problem)
        if "status code 404" in text and "does not exist" in text:
            raise JobGoneError(f"the cluster does not know the job {arguments[0] if arguments else ''}") from None
        if "status code 5" in text:
            raise ServerUnreachableError(_briefly(problem)) from problem
        raise CaltuneError(f"the cluster refuses: {_briefly(problem)}") from problem


def _refused(words: str) -> NoReturn:
    how = "into RAY_AUTH_TOKEN, or into a file that RAY_AUTH_TOKEN_PATH names (else ~/.ray/auth_token)"
    if "Authentication failed" in words or "Forbidden" in words:
        raise UsageError(f"the cluster refuses this token; put the cluster's own {how}")
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise UsageError(f"the cluster wants a token: set RAY_AUTH_MODE=token, and put the token {how}")
    raise UsageError(f"RAY_AUTH_MODE=token, but there is no token: put it {how}")


def _briefly(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    text = lines[-1 if "Traceback" in lines[0] else 0]
    return text if len(text) <= 200 else f"{text[:200]} ..."


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
