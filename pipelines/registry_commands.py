"""The registry's commands: `caltune register`, `gate`, `promote`, `rollback` and `history`."""

from __future__ import annotations

import getpass
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.errors import GateError, UsageError
from pipelines.options import Json

if TYPE_CHECKING:
    from components.config import RunConfig
    from components.registry.candidate import Candidate
    from components.registry.promotion import History
    from components.registry.registry import Registry
    from components.registry.verdict import Verdict

Run = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]
Method = Annotated[
    str | None, typer.Option(help="Method of the run; by default the run file's gate.method.", show_default=False)
]
Model = Annotated[
    str | None,
    typer.Option(help="Registered model; by default gate.registered_model, else 'caltune'.", show_default=False),
]
Uri = Annotated[
    str | None,
    typer.Option(help="MLflow server; by default the run file's, or MLFLOW_TRACKING_URI.", show_default=False),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Run file: its section gate, its MLflow server.", show_default=False),
]
By = Annotated[str | None, typer.Option(help="Who decides; by default the user's name.", show_default=False)]


def add_registry_commands(app: typer.Typer) -> None:
    """Puts the commands into `app`."""
    for command in (register, gate, promote, rollback, history):
        app.command()(command)


def register(run: Run, method: Method = None, model: Model = None, uri: Uri = None, json_: Json = False) -> None:
    """Make a method of a run a version of a registered model, with the alias challenger."""
    from components.registry.candidate import read_candidate
    from components.tracking.spool import sync_spool

    candidate = read_candidate(run, method)
    server = _server_of(candidate, uri)
    registry = _registry(server)
    runs = sync_spool(run, server).runs
    root = [run_id for key, run_id in runs.items() if "/" not in key][-1]  # the last of those that continue one another
    made = registry.register(_model(model, candidate.config), candidate, root)
    if json_:
        print(json.dumps(asdict(made), indent=2))
    else:
        print(f"{made.name}: {made.method} of run {candidate.run}, {', '.join(made.aliases)}")


def gate(
    run: Run,
    method: Method = None,
    config: Config = None,
    model: Model = None,
    uri: Uri = None,
    json_: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the verdict as Markdown.")] = False,
) -> None:
    """Judge a method of a run by the rules of the section gate; exit code 3 when it does not pass.

    It is judged against the registry's champion, or against another method of the same run, as each rule says.
    """
    from components.registry.candidate import read_candidate
    from components.registry.judging import judge_run
    from components.run_file import load_run_file

    candidate = read_candidate(run, method)
    named = load_run_file(config) if config is not None else candidate.config
    tracked = uri is not None or candidate.config.tracking.enabled
    registry = _registry(_server_of(candidate, uri)) if tracked else None
    verdict = judge_run(registry, _model(model, named), candidate, named.gate)
    _print_verdict(verdict, json_, markdown)
    if not verdict.passed:
        raise typer.Exit(GateError.exit_code)


def promote(
    version: Annotated[str | None, typer.Option(help="By default the challenger.", show_default=False)] = None,
    config: Config = None,
    model: Model = None,
    uri: Uri = None,
    by: By = None,
    json_: Json = False,
) -> None:
    """Make a registered version the champion, if it passes the gate; exit code 3 when it does not.

    The rules are those of the run file that it was registered with, or of --config.
    """
    from components.registry.judging import judge_version
    from components.registry.promotion import promote as move
    from components.registry.registry import CHALLENGER

    named = _loaded(config)
    registry, name = _registry(_server(named, uri)), _model(model, named)
    chosen = registry.version(name, version) if version else registry.by_alias(name, CHALLENGER)
    if chosen is None:
        raise UsageError(f"'{name}' has no challenger; register a version or name one with --version")
    verdict = judge_version(registry, chosen, None if named is None else named.gate)
    if not json_:
        _print_verdict(verdict, as_json=False, as_markdown=False)
    entry = move(registry, chosen, verdict, by or getpass.getuser())
    if json_:
        print(json.dumps({"decision": asdict(entry), "verdict": verdict.as_dict()}, indent=2))
    else:
        print(f"{chosen.name} is champion; before it: {f'version {entry.before}' if entry.before else 'none'}")


def rollback(
    reason: Annotated[str, typer.Option(help="Why; kept in the history.", show_default=False)],
    config: Config = None,
    model: Model = None,
    uri: Uri = None,
    by: By = None,
    json_: Json = False,
) -> None:
    """Make the champion before the present one champion again."""
    from components.registry.promotion import rollback as move_back

    named = _loaded(config)
    entry = move_back(_registry(_server(named, uri)), _model(model, named), by or getpass.getuser(), reason)
    if json_:
        print(json.dumps(asdict(entry), indent=2))
    else:
        print(f"{_model(model, named)} version {entry.version} is champion again, in the place of {entry.before}")


def history(config: Config = None, model: Model = None, uri: Uri = None, json_: Json = False) -> None:
    """List promotions and rollbacks."""
    from components.registry.promotion import history as read

    named = _loaded(config)
    name = _model(model, named)
    found = read(_registry(_server(named, uri)), name)
    if json_:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print_history(name, found)


def _loaded(config: Path | None) -> RunConfig | None:
    from components.run_file import load_run_file

    return None if config is None else load_run_file(config)


def _model(model: str | None, config: RunConfig | None) -> str:
    from components.config_gate import GateConfig

    if model is not None:
        return model
    if config is not None and config.gate is not None:
        return config.gate.registered_model
    return str(GateConfig.model_fields["registered_model"].default)


def _server_of(candidate: Candidate, uri: str | None) -> str:
    """Where a run was tracked, unless another server is named."""
    from components.tracking.mlflow_logger import resolve_tracking

    return uri or resolve_tracking(candidate.config, candidate.folder.parent).uri


def _server(config: RunConfig | None, uri: str | None) -> str:
    from components.tracking.mlflow_logger import resolve_tracking

    if uri is not None:
        return uri
    if config is not None:
        return resolve_tracking(config, config.output_dir).uri
    if found := os.environ.get("MLFLOW_TRACKING_URI"):
        return found
    raise UsageError("name the MLflow server with --uri or MLFLOW_TRACKING_URI, or a run file with --config")


def _registry(uri: str) -> Registry:
    from components.registry.client import Connection
    from components.registry.registry import Registry

    return Registry(Connection(uri))


def _print_verdict(verdict: Verdict, as_json: bool, as_markdown: bool) -> None:
    from pipelines.progress import stdout_console

    if as_json:
        print(json.dumps(verdict.as_dict(), indent=2))
    elif as_markdown:
        print(verdict.as_markdown(), end="")
    else:
        stdout_console().print(verdict.as_table())
        print("\n".join(verdict.notes))


def _print_history(name: str, found: History) -> None:
    """One line a decision, for people and for grep."""
    for entry in found.entries:
        commit = entry.details.get("git_commit", "unknown")[:10]
        print(
            f"{entry.number}  {entry.at}  {entry.action} version {entry.version} (before: {entry.before or 'none'})  "
            f"by {entry.by}  commit {commit}  {entry.state}: {entry.reason}"
        )
    print(f"champion of {name}: {f'version {found.champion}' if found.champion else 'none'}")
    if found.moved_by_hand:
        print("the alias was moved by hand: it is not where the last decision put it")
