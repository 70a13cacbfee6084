"""`caltune suite`: run files x methods x seeds as one job. Finished cells are not repeated, failed ones stop no other.

Each run file has a run folder for each seed, as `caltune run` makes it, in the suite's folder. Within a run the methods
are the cells; a cell that was broken off goes on from its newest checkpoint. Failed cells are tried again by the next
call. Methods, seeds and run files may be added to a suite that is done.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from components.config import MethodName
from components.errors import CaltuneError, UsageError
from components.suite_file import PlannedRun, SuitePlan
from pipelines.progress import Reporter
from pipelines.signals import sigterm_interrupts
from pipelines.suite_state import SuiteState, recalibrations, stage_of

if TYPE_CHECKING:
    from components.data.prepare import PreparedData
    from components.evaluation.open_predictions import AnyPredictions
    from components.evaluation.recalibrate import Recalibrated
    from components.models.base import ResolvedModel
    from pipelines.calibrate import Calibration

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def run_suite(plan: SuitePlan, reporter: Reporter) -> SuiteState:
    """Runs every cell that is not done.

    Args:
        plan: The suite.
        reporter: Says what is going on.

    Returns:
        How the cells stand in the end; some may have failed.

    Raises:
        UsageError: Another process works on the suite, or a run's folder was made with other settings.
        OSError: The disk is full: no other cell would fare better.
    """
    with _held(plan), sigterm_interrupts():
        state = SuiteState(plan)
        state.write()
        try:
            for run in plan.runs:
                if any(cell.state != "done" for cell in state.of_run(run.config)):
                    _run(run, state, reporter)
        except BaseException:
            with suppress(OSError):  # a full disk; the problem itself is what has to be heard of
                SuiteState(plan).write()  # a cell that was broken off is left again
            raise
        return state


@contextmanager
def _held(plan: SuitePlan) -> Iterator[None]:
    """The suite's folder, by one process at a time."""
    folder = plan.config.folder
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.suite.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{folder}: another process is working on this suite") from None
    try:
        yield
    finally:
        lock.release()


def _run(run: PlannedRun, state: SuiteState, reporter: Reporter) -> None:
    """The cells of one run, then its report over those that are done."""
    from pipelines.run import opened

    config = run.config
    begun = False
    try:
        with opened(config, config.folder, "extend", reporter) as (stages, data, resolved):
            begun = True
            tags = {"suite": state.plan.config.suite, "suite_run": run.name, "suite_seed": str(config.seed)}
            stages.logger.set_tags({f"caltune.{name}": value for name, value in tags.items()})
            _cells(stages, data, resolved, state, reporter)
    except UsageError:
        raise
    except Exception as problem:
        if begun or _stops_all(problem):
            raise
        for cell in state.of_run(config):
            if cell.state != "done":
                state.change(config.run, cell.method, state="failed", reason=_reason(problem))
        reporter.say(f"[red]{config.run} failed[/red]: {_shown(problem)}")


def _cells(
    stages: Calibration, data: PreparedData, resolved: ResolvedModel, state: SuiteState, reporter: Reporter
) -> None:
    from pipelines.run import report

    run = stages.config.run
    found: dict[str, dict[str, AnyPredictions]] = {}
    recalibrated: dict[str, Recalibrated] = {}
    well: list[MethodName] = []
    for method in stages.config.methods:
        try:
            if state.cells[run, method].state == "done":
                own, fitted = _results(stages, method, data, resolved)
            else:
                reporter.say(f"[bold]{run}: {method}[/bold] ({state.sentence()})")
                own, fitted = _cell(stages, method, data, resolved, state)
        except Exception as problem:
            if _stops_all(problem):
                raise
            state.change(run, method, state="failed", reason=_reason(problem))
            reporter.say(f"[red]{run}: {method} failed[/red]: {_shown(problem)}")
            continue
        found |= own
        recalibrated |= fitted
        well.append(method)
    if well:
        narrowed = replace(stages, config=stages.config.model_copy(update={"methods": well}))
        with stages.folder.stage("report"):
            report(narrowed, data, found, recalibrated)


def _cell(
    stages: Calibration, method: MethodName, data: PreparedData, resolved: ResolvedModel, state: SuiteState
) -> tuple[dict[str, dict[str, AnyPredictions]], dict[str, Recalibrated]]:
    """Trains, evaluates and recalibrates a method."""
    begun = time.monotonic()
    run = stages.config.run
    state.change(run, method, state="running", reason="")
    with stages.folder.stage(stage_of(method)) as notes:
        stages.train(method, resolved, resume=True)
        result = _results(stages, method, data, resolved)
        notes["seconds"] = round(time.monotonic() - begun, 3)
        notes["recalibrate"] = recalibrations(stages.config, method)
    state.change(run, method, state="done", seconds=notes["seconds"])
    return result


def _results(
    stages: Calibration, method: MethodName, data: PreparedData, resolved: ResolvedModel
) -> tuple[dict[str, dict[str, AnyPredictions]], dict[str, Recalibrated]]:
    """Predictions of a trained method, read where there are any; and recalibrated ones, which take next to no time."""
    from pipelines.run import evaluate_method

    found: dict[str, dict[str, AnyPredictions]] = {method: evaluate_method(stages, method, data, resolved)}
    fitted = stages.recalibrate(method, found[method], data)
    return {**found, **{name: dict(result.predictions) for name, result in fitted.items()}}, fitted


def _stops_all(problem: Exception) -> bool:
    """Whether every other cell would fail too."""
    return isinstance(problem, OSError) and problem.errno in _NO_ROOM


def _reason(problem: Exception) -> str:
    """In a few words; what is no error of ours says what kind it is."""
    text = str(problem).strip()
    return text if isinstance(problem, CaltuneError) else f"{type(problem).__name__}: {text}"


def _shown(problem: Exception) -> str:
    return _reason(problem).replace("[", "\\[")  # what looks like markup is none
