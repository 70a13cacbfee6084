"""The end of a pipeline: gate, registration, promotion, or the reason why nothing ships.

How it ended is written to `outcome.json` in the run folder and to tags of the tracked run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from components.errors import UsageError
from components.files import write_json
from components.tracking.logger import Logger, ending
from pipelines.kubeflow.steps import config_of
from pipelines.run_folder import RunFolder, open_run_folder

if TYPE_CHECKING:
    from components.config import RunConfig
    from components.registry.registry import Registry
    from pipelines.kubeflow.steps import Artifact

OUTCOME = "outcome.json"
Outcome = Literal["stopped", "refused", "registered", "promoted"]


def registry_of(config: RunConfig) -> Registry:
    """The registry of the server that the run is tracked on."""
    from components.registry.client import Connection
    from components.registry.registry import Registry
    from components.tracking.mlflow_logger import resolve_tracking

    return Registry(Connection(resolve_tracking(config, config.output_dir).uri))


def model_of(config: RunConfig) -> str:
    """Name of the registered model.

    Raises:
        UsageError: The run file has no section `gate`.
    """
    if config.gate is None:
        raise UsageError(f"run {config.run}: the run file has no section 'gate'")
    return config.gate.registered_model


@contextmanager
def tracked(config: RunConfig) -> Iterator[tuple[RunFolder, Logger]]:
    """Takes hold of a run that exists, and of its tracked run."""
    from components.tracking.mlflow_logger import open_logger

    with open_run_folder(config, "resume") as folder, ending(open_logger(config, folder.path)) as logger:
        yield folder, logger


def judge_candidate(folder: str, table: Artifact) -> tuple[bool, str]:
    """The gate's verdict on the method that the run file names.

    Args:
        folder: The run folder.
        table: Gets the verdict as Markdown.

    Returns:
        Whether it passed, and the verdict in a sentence.
    """
    from components.registry.candidate import read_candidate
    from components.registry.judging import judge_run

    config = config_of(folder)
    with tracked(config) as (run_folder, logger), run_folder.stage("gate") as notes:
        verdict = judge_run(registry_of(config), model_of(config), read_candidate(Path(folder)))
        notes["passed"], notes["reason"] = verdict.passed, verdict.sentence
        logger.log_dict(verdict.as_dict(), "verdict.json")
        logger.set_tags({"caltune.gate": verdict.sentence})
    Path(table.path).write_text(verdict.as_markdown(), encoding="utf-8")
    table.metadata |= {"passed": verdict.passed, "candidate": verdict.candidate, "champion": verdict.champion or "none"}
    return verdict.passed, verdict.sentence


def register_candidate(folder: str) -> str:
    """Makes the candidate a version; registering it again gives the same one.

    Returns:
        The version.
    """
    from components.registry.candidate import read_candidate
    from components.tracking.mlflow_logger import resolve_tracking
    from components.tracking.spool import sync_spool

    config = config_of(folder)
    runs = sync_spool(Path(folder), resolve_tracking(config, config.output_dir).uri).runs
    root = [run_id for key, run_id in runs.items() if "/" not in key][-1]  # the last of those that continue one another
    version = registry_of(config).register(model_of(config), read_candidate(Path(folder)), root)
    end(folder, "registered", f"{version.name} is challenger")
    return version.number


def promote_version(folder: str, version: str, by: str) -> None:
    """Makes a version champion if it passes the gate against the champion of this moment.

    Args:
        folder: The run folder.
        version: The version.
        by: Who promotes.

    Raises:
        GateError: It does not pass.
        PromotionConflictError: Somebody else decided about the champion meanwhile.
    """
    from components.registry.judging import judge_version
    from components.registry.promotion import promote

    config = config_of(folder)
    registry = registry_of(config)
    chosen = registry.version(model_of(config), version)
    entry = promote(registry, chosen, judge_version(registry, chosen), by)
    before = f"version {entry.before}" if entry.before else "none"
    end(folder, "promoted", f"{chosen.name} is champion; before it: {before}")


def stop_run(folder: str, reason: str) -> str:
    """Ends well without a new model.

    Args:
        folder: The run folder.
        reason: Why.

    Returns:
        The reason.
    """
    end(folder, "stopped", reason)
    return reason


def refuse_candidate(folder: str, reason: str) -> None:
    """Ends as failed. The gate's own step ends well, so that its verdict is kept with the pipeline.

    Args:
        folder: The run folder.
        reason: The verdict in a sentence.

    Raises:
        GateError: Always.
    """
    from components.errors import GateError

    end(folder, "refused", reason)
    raise GateError(reason)


def end(folder: str, outcome: Outcome, reason: str) -> None:
    """Writes down how a pipeline ended."""
    with tracked(config_of(folder)) as (run_folder, logger):
        write_json(run_folder.path / OUTCOME, {"outcome": outcome, "reason": reason})
        logger.set_tags({"caltune.outcome": outcome, "caltune.outcome_reason": reason})
    print(f"{outcome}: {reason}", flush=True)
