"""The model in service on fresh data: its figures there, and whether they call for retraining.

The fresh data are the run's own: `prepare` reads the sources that the run file names as they are at that moment. So one
reading serves the decision, the training, and the gate, which then compares champion and candidate on the same test
questions. The sources should bring questions that the champion was not trained on; those it was trained on flatter it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.config_gate import CHAMPION
from components.errors import CaltuneError, UsageError
from components.files import read_json
from pipelines.kubeflow.shipping import model_of, registry_of, tracked
from pipelines.kubeflow.steps import config_of, show, test_splits
from pipelines.progress import Reporter

if TYPE_CHECKING:
    from components.evaluation.predictions import Predictions
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
        kind: `temperature` or `flc_temperature`.
        fitted: What was fitted, as the run left it.

    Raises:
        CaltuneError: The file is missing, or speaks of router confidence that the predictions lack.
    """
    from components.posthoc.flc_temperature import FlcTemperature

    content = read_json(fitted, remedy="register the model anew")
    if kind == "temperature":
        return {split: each.tempered(content["value"]) for split, each in found.items()}
    function = FlcTemperature(content["log_temperatures"], content["levels"], content["n"])
    routed = {split: each.flc for split, each in found.items() if each.flc is not None}
    if len(routed) < len(found):
        raise CaltuneError(f"{fitted}: the champion has no routers to take a confidence from; register it anew")
    return {split: found[split].tempered(function.of(flc)) for split, flc in routed.items()}


def decide(folder: str, champion: str | None, figures: Figures) -> tuple[bool, str]:
    """Whether a retraining is due; the decision goes to the run folder and to MLflow.

    Args:
        folder: The run folder.
        champion: The champion's version; None where there is none, which makes a training due.
        figures: Gets the worsening of each figure, with its interval.

    Returns:
        The decision, and why.

    Raises:
        CaltuneError: The champion's own test results are not in the registry.
    """
    from components.evaluation.predictions import read_predictions
    from components.registry.drift import labelled_drift

    config = config_of(folder)
    if config.drift is None:
        raise UsageError(f"{folder}: its run file has no section 'drift'")
    with tracked(config) as (run_folder, logger), run_folder.stage("drift") as notes:
        if champion is None:
            notes["drifted"], notes["reason"] = True, f"{model_of(config)} has no champion yet"
        else:
            registry = registry_of(config)
            version = registry.version(model_of(config), champion)
            test = registry.results(version, [FRESH]).predictions.get(FRESH)
            if test is None:
                raise CaltuneError(f"{version.name} was registered without its answers to its own test questions")
            fresh = read_predictions(run_folder.method(CHAMPION) / "evaluation" / FRESH / "predictions.parquet")
            decision = labelled_drift(fresh, test, config.drift, config.evaluation, config.seed)
            notes |= decision.as_dict()
            shown = {
                f"{figure.name}_{part}": value
                for figure in decision.figures
                for part in ("reference", "fresh", "worsening", "ci_low", "ci_high", "limit")
                if (value := getattr(figure, part)) is not None
            }
            for name, value in shown.items():
                figures.log_metric(name, value)
            logger.log_metrics({f"drift/{name}": value for name, value in shown.items()}, 0)
        logger.log_dict(notes, "drift.json")
        logger.set_tags({"caltune.drift": notes["reason"]})
        return notes["drifted"], notes["reason"]
