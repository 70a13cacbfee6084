"""The model in service on fresh data: its figures there, and whether they call for retraining.

The fresh data are the run's own: `prepare` reads the sources that the run file names as they are at that moment. So one
reading serves the decision, the training, and the gate, which then compares champion and candidate on the same test
questions. The sources should bring questions that the champion was not trained on; those it was trained on flatter it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from components.config import RunConfig
from components.config_gate import CHAMPION, DriftConfig
from components.errors import CaltuneError, UsageError
from components.evaluation.predictions import Predictions, read_predictions
from components.files import read_json
from components.registry.drift import DriftDecision, confidences, labelled_drift, unlabelled_drift
from components.registry.prediction_log import read_confidences
from pipelines.kubeflow.shipping import model_of, registry_of, tracked
from pipelines.kubeflow.steps import config_of, show, test_splits
from pipelines.progress import Reporter

if TYPE_CHECKING:
    from components.config import RecalibrationName
    from pipelines.kubeflow.steps import Figures

RAW = f"{CHAMPION}-unrecalibrated"
FRESH = "id"
"""The split that drift is judged on."""


def evaluate_on_fresh_data(folder: str, metrics: Figures) -> str | None:
    """Measures the champion on the run's splits, as it serves: with its recalibration, if it has one.

    Args:
        folder: The run folder.
        metrics: Gets the figures by split.

    Returns:
        The champion's version; None where there is none.
    """
    from components.evaluation.open_predictions import among_options
    from components.registry.candidate import note_champion
    from pipelines.run import opened

    config = config_of(folder)
    registry, model = registry_of(config), model_of(config)
    champion = registry.champion(model)
    if champion is None:
        return None
    kind = champion.method.partition("+")[2].partition("@")[0]
    with (
        registry.files(champion) as files,
        opened(config, Path(), "resume", Reporter()) as (stages, data, resolved),
    ):
        found = stages.evaluate(RAW if kind else CHAMPION, data, resolved, files)
        if kind:
            stages.keep(CHAMPION, recalibrated(among_options(found), kind, files / f"{kind}.json"), data)
        note_champion(Path(folder), model, champion.number)
        show(metrics, stages.metrics([CHAMPION], test_splits(config)))
    return champion.number


def recalibrated(found: dict[str, Predictions], kind: str, fitted: Path) -> dict[str, Predictions]:
    """Applies a recalibration that was fitted earlier.

    Args:
        found: Predictions by split.
        kind: One of the run file's recalibrations.
        fitted: What was fitted, as the run left it.

    Raises:
        CaltuneError: The file is missing, is not of this kind, or speaks of router confidence that the predictions
            lack.
    """
    from components.evaluation.recalibrate import apply, read_fitted

    content = read_json(fitted, remedy="register the model anew")
    try:
        return apply(read_fitted(cast("RecalibrationName", kind), content), found)
    except CaltuneError as problem:
        raise CaltuneError(f"{fitted}: {problem}; register the model anew") from problem


def decide(folder: str, champion: str | None, figures: Figures) -> tuple[bool, str]:
    """Whether a retraining is due; the decision goes to the run folder and to MLflow.

    It is due when the labelled questions show drift, or the confidences of `drift.prediction_log` do.

    Args:
        folder: The run folder.
        champion: The champion's version; None where there is none, which makes a training due.
        figures: Gets the worsening of each figure, with its interval.

    Returns:
        The decision, and why.

    Raises:
        CaltuneError: The champion's own test results are not in the registry, or the prediction log cannot be read.
    """
    config = config_of(folder)
    if config.drift is None:
        raise UsageError(f"{folder}: its run file has no section 'drift'")
    with tracked(config) as (run_folder, logger), run_folder.stage("drift") as notes:
        if champion is None:
            notes["drifted"], notes["reason"] = True, f"{model_of(config)} has no champion yet"
        else:
            fresh = read_predictions(run_folder.method(CHAMPION) / "evaluation" / FRESH / "predictions.parquet")
            decisions = decisions_on(fresh, champions_test(config, champion), config, config.drift)
            drifted = [decision for decision in decisions if decision.drifted]
            notes["drifted"] = bool(drifted)
            notes["reason"] = ". ".join(decision.reason for decision in drifted or decisions)
            notes["decisions"] = [decision.as_dict() for decision in decisions]
            shown = {name: value for decision in decisions for name, value in decision.values().items()}
            for name, value in shown.items():
                figures.log_metric(name, value)
            logger.log_metrics({f"drift/{name}": value for name, value in shown.items()}, 0)
        logger.log_dict(notes, "drift.json")
        logger.set_tags({"caltune.drift": notes["reason"]})
        return notes["drifted"], notes["reason"]


def champions_test(config: RunConfig, champion: str) -> Predictions:
    """The champion's answers to its own test questions.

    Args:
        config: The run.
        champion: The champion's version.

    Raises:
        CaltuneError: They are not in the registry.
    """
    registry = registry_of(config)
    version = registry.version(model_of(config), champion)
    test = registry.results(version, [FRESH]).predictions.get(FRESH)
    if test is None:
        raise CaltuneError(f"{version.name} was registered without its answers to its own test questions")
    return test


def decisions_on(
    fresh: Predictions, test: Predictions, config: RunConfig, drift: DriftConfig
) -> tuple[DriftDecision, ...]:
    """By the labels, and without them where the run file names a prediction log.

    Args:
        fresh: The champion's predictions of the fresh, labelled questions.
        test: Those of its own test questions.
        config: The run.
        drift: What is allowed.

    Raises:
        DataError: The prediction log cannot be read.
    """
    labelled = labelled_drift(fresh, test, drift, config.evaluation, config.seed)
    if drift.prediction_log is None:
        return (labelled,)
    stated = read_confidences(drift.prediction_log, test.sources)
    return labelled, unlabelled_drift(stated, confidences(test), drift)
