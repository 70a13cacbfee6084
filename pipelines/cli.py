"""The `caltune` command. Thin: parse, load the run file, call, print, exit code. Heavy imports wait for their command.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, or stopped by SIGTERM with all in place for
--resume, 1 the work failed, 2 bad usage or run file, 3 a gate was not passed, 4 timed out, 5 contact with the job lost,
130 interrupted.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from components.errors import CaltuneError, Interrupted, UsageError
from pipelines.abstain_command import add_abstain_command
from pipelines.export_command import add_export_command
from pipelines.jobs import add_job_commands
from pipelines.monitor_command import add_monitor_command
from pipelines.options import Config, Json, Overrides, Overwrite, Quiet
from pipelines.pipeline_command import add_pipeline_command
from pipelines.plan import add_plan_command
from pipelines.predict_command import add_predict_command
from pipelines.registry_commands import add_registry_commands
from pipelines.render_command import add_render_command
from pipelines.serve_command import add_serve_command
from pipelines.suite_command import add_suite_command
from pipelines.tune_command import add_tune_command

INTERRUPTED = 130

app = typer.Typer(
    name="caltune",
    help="Fine-tune a language model so that its stated confidence can be trusted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CheckedConfig = Annotated[Path | None, typer.Option("--config", "-c", help="Run file to check.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with this run where it was broken off.")]


def main() -> None:
    """Entry point: turns errors into sentences and exit codes."""
    _calm_logging()
    try:
        code = app(standalone_mode=False)
    except CaltuneError as problem:
        _fail(str(problem), problem.exit_code)
    except FloatingPointError as problem:
        _fail(str(problem), 1)
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"{problem}: make room and go on with --resume", 1)
    except Interrupted as stop:
        print(f"caltune: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as problem:
        if not hasattr(problem, "exit_code") or not hasattr(problem, "format_message"):
            raise
        # A usage error of the command line itself; its exit code is 2.
        problem.show()  # type: ignore[attr-defined]
        sys.exit(problem.exit_code)
    if code == INTERRUPTED:
        _fail("interrupted; go on with --resume", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def run(
    config: Config,
    set_: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train, evaluate and recalibrate every method of a run file, compare them, write the report."""
    from components.run_file import load_run_file
    from components.tracking.mlflow_logger import resolve_tracking, view_command
    from pipelines.run import run as run_pipeline

    loaded = load_run_file(config, set_ or [])
    reporter = _reporter(quiet or json_)
    result = run_pipeline(loaded, config.parent, _on_existing(resume, overwrite), reporter)
    _print_summary(result.summary, json_)
    if not json_:
        reporter.say(f"report: {result.report}")
        if loaded.tracking.enabled:
            reporter.say(f"MLflow: {view_command(resolve_tracking(loaded, loaded.output_dir).uri)}")


@app.command()
def train(
    config: Config,
    method: Annotated[str | None, typer.Option(help="Only this method of the run file.", show_default=False)] = None,
    set_: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the methods of a run file; leave an adapter folder of each."""
    from components.run_file import load_run_file
    from pipelines.run import train_only

    loaded = load_run_file(config, set_ or [])
    existing, reporter = _on_existing(resume, overwrite), _reporter(quiet or json_)
    adapters = train_only(loaded, config.parent, existing, reporter, only=method)
    if json_:
        print(json.dumps({name: str(path) for name, path in adapters.items()}))
        return
    for name, path in adapters.items():
        print(f"{name}: {path}")


@app.command()
def evaluate(
    config: Config,
    adapter: Annotated[
        Path | None, typer.Option(help="An adapter folder; without it the model as it is.", show_default=False)
    ] = None,
    set_: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how calibrated a model or adapter is on the run file's data."""
    from components.run_file import load_run_file
    from pipelines.run import evaluate_only

    loaded = load_run_file(config, set_ or [])
    reporter = _reporter(quiet or json_)
    result = evaluate_only(loaded, config.parent, _on_existing(resume, overwrite), reporter, adapter)
    _print_summary(result.summary, json_)
    reporter.say(f"predictions and metrics: {result.folder}")


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; one is enough to compare its methods. Or a suite's folder.")
    ],
    json_: Json = False,
) -> None:
    """Set the methods of one or several runs side by side, with paired intervals where the questions are the same.

    Of a suite's folder it makes the tables (Markdown, CSV, LaTeX) and figures, in the folder's `tables`.
    """
    from pipelines.compare import compare_runs
    from pipelines.compare_suite import is_suite, print_suite

    if len(runs) == 1 and is_suite(runs[0]):
        print_suite(runs[0], json_)
        return
    _print_summary(compare_runs(runs), json_)


@app.command()
def validate(
    config: CheckedConfig = None,
    set_: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the run file's JSON schema, for editors.")] = False,
) -> None:
    """Check a run file and print it with all defaults filled in."""
    from components.run_file import json_schema, load_run_file, to_yaml

    if schema:
        print(json.dumps(json_schema(), indent=2))
        return
    if config is None:
        raise UsageError("name a run file with --config, or ask for the --schema")
    print(to_yaml(load_run_file(config, set_ or [])), end="")


@app.command()
def doctor(
    config: CheckedConfig = None,
    json_: Json = False,
) -> None:
    """Say what this machine has, which settings win, and what stands in the way."""
    from pipelines.doctor import examine

    findings = examine(config)
    if json_:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FIX '} {finding.what}: {finding.found}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def sync(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or output directories that hold some.")],
    uri: Annotated[str | None, typer.Option(help="Another server than the run's own.", show_default=False)] = None,
    json_: Json = False,
) -> None:
    """Deliver to MLflow what runs have logged while the server could not be reached."""
    from components.tracking.spool import find_spools, sync_spool

    found = [spool for folder in folders for spool in find_spools(folder)]
    if not found:
        raise UsageError(f"no tracked run in {', '.join(map(str, folders))}")
    reports = {str(folder): vars(sync_spool(folder, uri)) for folder in found}
    if json_:
        print(json.dumps(reports, indent=2))
        return
    for name, report in reports.items():
        print(f"{name}: {report['delivered']} events delivered to {report['uri']}, {report['before']} were there")
        for gone in report["missing"] + report["refused"]:
            print(f"  not delivered: {gone}")


add_job_commands(app)
add_plan_command(app)
add_tune_command(app)
add_suite_command(app)
add_render_command(app)
add_registry_commands(app)
add_predict_command(app)
add_serve_command(app)
add_pipeline_command(app)
add_abstain_command(app)
add_export_command(app)
add_monitor_command(app)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(importlib.metadata.version("caltune"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def _on_existing(resume: bool, overwrite: bool) -> Any:
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    return "resume" if resume else "overwrite" if overwrite else "refuse"


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    from components.evaluation.tables import print_summary
    from pipelines.progress import stdout_console

    print_summary(summary, stdout_console())


def _reporter(quiet: bool) -> Any:
    from pipelines.progress import Reporter

    if not quiet:
        logging.getLogger("components").setLevel(logging.INFO)
    return Reporter(quiet=quiet)


def _calm_logging() -> None:
    """Warnings and errors of everything we use go to stderr, advice to its own developers nowhere."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("DeepSpeed").addFilter(_to_stderr)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|peft|ray|mlflow")


def _to_stderr(record: logging.LogRecord) -> bool:
    """Takes DeepSpeed's records away from its own handler, which writes to stdout, where only results belong."""
    if not record.getMessage().startswith("Setting accelerator to CPU"):  # said even where there is no other
        logging.getLogger().handle(record)
    return False


def _fail(message: str, code: int) -> NoReturn:
    print(f"caltune: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
