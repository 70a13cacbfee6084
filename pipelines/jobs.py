"""`caltune submit`, `status`, `logs`, `stop` and `list`: the commands that work on a cluster's jobs.

Exit codes of `submit`, and of `logs --follow`: those of the command that the job runs (0 done, 1 the work failed, 2,
3), 130 if the job was stopped or Ctrl-C pressed, 4 timed out, 5 no contact with the cluster. 0 only means success.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from components.errors import JobError, UsageError
from pipelines.options import Config, Json, Overrides

SUBMITTABLE = ("run", "train", "tune", "evaluate")

Address = Annotated[
    str | None,
    typer.Option(
        help="Ray's dashboard, http://<head>:8265; without it RAY_API_SERVER_ADDRESS or RAY_ADDRESS.",
        show_default=False,
    ),
]
JobName = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help="A job's id, or a run's name; without it the newest.", show_default=False),
]
Timeout = Annotated[
    float | None, typer.Option(help="Seconds to wait; then exit code 4, and the job goes on.", show_default=False)
]


def add_job_commands(app: typer.Typer) -> None:
    """Puts the commands of this module into `app`."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(submit)
    app.command()(status)
    app.command()(logs)
    app.command()(stop)
    app.command("list")(list_jobs)


def submit(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="What to run there: run, train, tune or evaluate.")],
    config: Config,
    set_: Overrides = None,
    address: Address = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Variable of the job: NAME=VALUE, or NAME as it is here. No secrets.", show_default=False),
    ] = None,
    queue: Annotated[bool, typer.Option("--queue", help="Wait while another job works on this run.")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-wait", help="Show the log and wait for the end.")] = True,
    timeout: Timeout = None,
    data_on_cluster: Annotated[
        bool, typer.Option("--data-on-cluster", help="Data paths are the cluster's; send no data files.")
    ] = False,
    upload_limit: Annotated[int, typer.Option(help="The most to send, in MiB.")] = 100,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent; send nothing.")] = False,
    json_: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Neither log nor progress.")] = False,
) -> None:
    """Run a command on a Ray cluster and end with its exit code.

    Other options are the command's own, e.g. --resume, --overwrite, --method. The job's log goes to stderr.
    """
    from components.run_file import load_run_file
    from ray_jobs.job_follow import follow as follow_job
    from ray_jobs.job_server import JobServer
    from ray_jobs.submit import make_request, wait_in_queue
    from ray_jobs.submit import submit as send

    arguments = _command_arguments(context, command)
    loaded = load_run_file(config, set_ or [])
    request = make_request(
        command, loaded, arguments, env=env or [], data_on_cluster=data_on_cluster, limit_mib=upload_limit
    )
    say = (lambda text: None) if quiet else _to_stderr
    for line in _description(request):
        say(line)
    if dry_run:
        _result(_as_dict(request), json_, request.job_id)
        return
    server = JobServer.connect(address)
    if queue:
        wait_in_queue(server, request, say, timeout)
    send(server, request, say)
    say(f"job {request.job_id} submitted to {server.address}")
    if not follow:
        _result(_as_dict(request), json_, request.job_id)
        return
    if not json_:
        print(request.job_id, flush=True)
    job = follow_job(server, request.job_id, write=None if quiet else _raw_to_stderr, say=_to_stderr, timeout=timeout)
    if json_:
        print(json.dumps(job.as_dict(), indent=2))
    _end_as(job, say, where="" if not quiet else f"; its log: {server.command('logs', job.id)}")


def status(job: JobName = None, address: Address = None, json_: Json = False) -> None:
    """Say how a job stands. The exit code is 0 unless it has failed or was stopped."""
    server, found = _find(job, address)
    if json_:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(f"{found.id}: {found.status}")
        for name, value in found.as_dict().items():
            if name not in ("job", "status", "message") and value is not None:
                print(f"  {name:<16} {value}")
    if found.has_ended:
        _end_as(found, lambda text: None, where=f"; its log: {server.command('logs', found.id)}")


def logs(
    job: JobName = None,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    timeout: Timeout = None,
) -> None:
    """Print a job's log; with --follow, end with the job's exit code."""
    from ray_jobs.job_follow import follow as follow_job
    from ray_jobs.job_server import contact

    server, found = _find(job, address)
    if not follow:
        with contact(server):
            _raw_to_stdout(server.log(found.id))
        return
    ended = follow_job(server, found.id, write=_raw_to_stdout, say=_to_stderr, timeout=timeout)
    _end_as(ended, _to_stderr)


def stop(job: JobName = None, address: Address = None, json_: Json = False) -> None:
    """Stop a job: it gets a minute to save a last checkpoint. Go on later with submit ... --resume."""
    from ray_jobs.job_follow import follow as follow_job
    from ray_jobs.job_secrets import STOP_GRACE_SECONDS
    from ray_jobs.job_server import contact

    if job is None:
        raise UsageError("name the job to stop: its id or its run's name")
    server, found = _find(job, address)
    if not found.has_ended:
        with contact(server):
            server.stop(found.id)
        _to_stderr(f"stopping {found.id}")
        found = follow_job(server, found.id, write=None, say=_to_stderr, timeout=2.0 * STOP_GRACE_SECONDS)
    _result(found.as_dict(), json_, f"{found.id}: {found.status}")


def list_jobs(address: Address = None, json_: Json = False) -> None:
    """List the jobs of caltune that a cluster knows, the newest first."""
    from ray_jobs.job_server import JobServer, contact

    server = JobServer.connect(address)
    with contact(server):
        found = sorted(server.jobs(), key=lambda job: job.started or 0.0, reverse=True)
    if json_:
        print(json.dumps([job.as_dict() for job in found], indent=2))
        return
    if not found:
        _to_stderr(f"no job of caltune on {server.address}")
        return
    from pipelines.progress import stdout_console

    table = Table("job", "run", "command", "status", "exit", "started", "took", box=None, pad_edge=False)
    for job in found:
        facts = job.as_dict()
        code = "" if facts["exit_code"] is None else str(facts["exit_code"])
        started = "" if job.started is None else f"{datetime.fromtimestamp(job.started):%Y-%m-%d %H:%M}"
        table.add_row(job.id, job.run, facts["command"], job.status, code, started, _took(job))
    console = stdout_console()
    if not console.is_terminal:
        console.width = 200  # a table for a program or a file is not broken into lines
    console.print(table)


def _command_arguments(context: typer.Context, command: str) -> list[str]:
    """The options that are the command's own, checked here: on the cluster a mistake would show after minutes."""
    group: Any = context.parent.command if context.parent else None
    known = [name for name in SUBMITTABLE if name in group.commands]
    if command not in known:
        raise UsageError(f"'{command}' cannot be submitted; choose {', '.join(known)}")
    arguments = list(context.args)
    parsed = group.commands[command].make_context(command, ["--config", "run.yaml", *arguments], parent=context.parent)
    for name, value in parsed.params.items():
        if isinstance(value, Path) and name != "config" and not value.is_absolute():
            raise UsageError(f"--{name} {value}: give the absolute path that it has on the cluster; it is not sent")
    return arguments


def _find(name: str | None, address: str | None) -> tuple[Any, Any]:
    from ray_jobs.job_server import JobServer, contact
    from ray_jobs.job_states import find_job

    server = JobServer.connect(address)
    with contact(server):
        return server, find_job(server.jobs(), name)


def _description(request: Any) -> list[str]:
    git = request.tags
    dirty = " with uncommitted changes" if git["git_dirty"] == "true" else ""
    lines = [
        f"run {request.package.config.run}: {request.entrypoint}",
        f"  to send      {request.package.size / 2**20:.1f} MiB, code of commit {git['git_commit'][:12]}{dirty}",
        f"  results      {request.tags['caltune_folder']}, on the cluster",
        f"  environment  {' '.join(f'{name}={value}' for name, value in request.environment.items())}",
    ]
    return lines + [f"  data         {target}" for target in request.package.data.values()]


def _as_dict(request: Any) -> dict[str, Any]:
    return {
        "job": request.job_id,
        "entrypoint": request.entrypoint,
        "environment": request.environment,
        "tags": request.tags,
        "bytes": request.package.size,
        "data": list(request.package.data.values()),
    }


def _end_as(job: Any, say: Callable[[str], None], where: str = "") -> None:
    """Leaves with the job's exit code.

    Args:
        job: A job that has ended.
        say: Gets a line where it ended well.
        where: Added to the error where it did not.
    """
    if job.exit_code == 0:
        say(f"{job.ending()} after {_took(job)}")
        return
    raise JobError(job.ending() + where, job.exit_code)


def _took(job: Any) -> str:
    if job.started is None:
        return ""
    seconds = int((job.ended or datetime.now().timestamp()) - job.started)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _result(content: dict[str, Any], as_json: bool, line: str) -> None:
    print(json.dumps(content, indent=2) if as_json else line)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _raw_to_stderr(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _raw_to_stdout(text: str) -> None:
    print(text, end="", flush=True)
