"""What a search leaves: `search.json`, the best run file, figures, and the Pareto front as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from components.config import RunConfig
from components.config_population import PbtConfig
from components.config_tune import TuneConfig, with_values
from components.evaluation.plot_style import save_png
from components.evaluation.search_plots import SearchPoint, importance_plot, parallel_coordinates, pareto_plot
from components.files import replacing, write_json
from components.run_file import to_yaml
from components.tracking.logger import Logger
from pipelines.progress import Reporter
from ray_jobs.trial_choice import Objective, choose_best, pareto_front
from ray_jobs.trial_lineage import course
from ray_jobs.trial_search import importances
from ray_jobs.trial_table import Trial, TrialTable

RESULT, BEST = "search.json", "best.yaml"
_LONGEST_NAME = 47


def write_result(
    config: RunConfig, table: TrialTable, objective: Objective, folder: Path, logger: Logger, reporter: Reporter
) -> dict[str, Any]:
    """Writes and logs what a search found.

    Args:
        config: The run that was searched.
        table: Its trials.
        objective: What was looked for.
        folder: Where the files go.
        logger: The run's tracker.
        reporter: Told where the figures are, and of a floor that no trial reached.

    Returns:
        Content of `search.json`.

    Raises:
        CaltuneError: No trial was finished.
    """
    trials = list(table)
    best, front = choose_best(trials, objective), pareto_front(trials, objective)
    if not objective.suffices(best):
        reporter.say(
            f"[yellow]no trial reaches an accuracy of {objective.floor:.3f}; the best is the most accurate one[/yellow]"
        )
    run_file = folder / BEST
    ece, accuracy = objective.figures(best)
    note = f"# Trial {best.number} of the search in '{config.run}': {_words(ece, accuracy)} on validation data.\n"
    values = _course_of(best, trials, objective)
    note += "".join(f"{line}\n" for line in _course_note(values, best))
    with replacing(run_file) as temporary:
        temporary.write_text(note + to_yaml(best_config(config, best)), encoding="utf-8")
    steps, reference = config.training.steps, table.reference
    shares = importances(trials, objective)
    result = {
        "run": config.run,
        "method": objective.tune.method,
        "mode": objective.tune.mode,
        "accuracy_floor": objective.floor,
        "reference_accuracy": objective.tune.figure(reference.metrics, "accuracy")
        if reference
        else objective.tune.reference_accuracy,
        "trials": dict(Counter(trial.state for trial in trials)),
        "exchanges": [{"trial": trial.number, **event} for trial in trials for event in trial.perturbations],
        "steps_saved": sum(steps - trial.step for trial in trials if trial.state == "stopped"),
        "best": _entry(best, objective) | ({"course": values} if values else {}),
        "front": [_entry(trial, objective) for trial in front],
        "importance": shares,
        "best_run_file": str(run_file),
    }
    write_json(folder / RESULT, result)
    for path in (folder / RESULT, run_file, table.path, *_figures(trials, best, front, objective, shares, folder)):
        logger.log_artifact(path, f"tune/{path.name}")
    reporter.say(f"table and figures: {folder}")
    return result


def _course_of(best: Trial, trials: list[Trial], objective: Objective) -> list[dict[str, Any]]:
    """With which values the best trial's weights were trained, where they changed on the way."""
    scheduler = objective.tune.scheduler
    if not isinstance(scheduler, PbtConfig):
        return []
    values = course({trial.number: trial for trial in trials}, best.number, scheduler.keys)
    return values if len(values) > 1 else []


def _course_note(values: list[dict[str, Any]], best: Trial) -> list[str]:
    """Comment lines of the run file; none where nothing changed."""
    if not values:
        return []
    lines = ["# Its weights were trained with values that changed on the way; below stand the last ones for all steps:"]
    for entry in values:
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in entry["values"].items())
        lines.append(f"#   from step {entry['step']} on, in trial {entry['trial']}: {shown}")
    return [*lines, f"# Training from this file may end elsewhere; its own adapter: {best.adapter}"]


def best_config(config: RunConfig, best: Trial) -> RunConfig:
    """The run that was searched with the best trial's values, under a name of its own and without the search."""
    tree = with_values(config.model_dump(mode="json", exclude={"tune"}), best.parameters)
    tree["run"] = f"{config.run[: _LONGEST_NAME - len('-best')].rstrip('-')}-best"
    return RunConfig.model_validate(tree)


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Prints the Pareto front, the best trial marked, and what to do next."""
    table = Table(box=box.SIMPLE_HEAD, title="Pareto front on validation data", title_justify="left")
    keys = list(result["best"]["parameters"])
    for name in ("trial", "ECE", "accuracy", "step"):
        table.add_column(name, justify="right")
    last = Counter(key.rpartition(".")[2] for key in keys)
    for key in keys:
        name = key.rpartition(".")[2]
        table.add_column(name if last[name] == 1 else key, justify="right", overflow="fold")
    numbers = [entry["trial"] for entry in result["front"]]
    entries = result["front"] if result["best"]["trial"] in numbers else [*result["front"], result["best"]]
    for entry in entries:
        is_best = entry["trial"] == result["best"]["trial"]
        cells = [f"{entry['trial']}{' *' if is_best else ''}", f"{entry['ece']:.3f}", f"{entry['accuracy']:.3f}"]
        cells += [str(entry["step"]), *(_shown(entry["parameters"][key]) for key in keys)]
        table.add_row(*cells, style="bold" if is_best else None)
    console.print(table)
    states = ", ".join(f"{count} {state}" for state, count in result["trials"].items())
    saved = f"; stopping early saved {result['steps_saved']} steps" if result["steps_saved"] else ""
    console.print(f"trials: {states}{saved}", soft_wrap=True)
    if result["exchanges"]:
        console.print(f"exchanges between trials: {len(result['exchanges'])}", soft_wrap=True)
    if result["accuracy_floor"] is not None:
        console.print(f"accuracy required: {result['accuracy_floor']:.3f}", soft_wrap=True)
    console.print(f"* best; train it with: caltune train --config {result['best_run_file']}", soft_wrap=True)


def words_of(metrics: Mapping[str, float], section: TuneConfig) -> str:
    """ECE and accuracy of an evaluation; the softmax's ECE where the method has no routers."""
    if not any(name.endswith("/flc_ece") for name in metrics):
        section = section.model_copy(update={"confidence": "softmax"})
    return _words(section.figure(metrics, "ece"), section.figure(metrics, "accuracy"))


def _words(ece: float, accuracy: float) -> str:
    return f"ECE {ece:.3f}, accuracy {accuracy:.3f}"


def _entry(trial: Trial, objective: Objective) -> dict[str, Any]:
    ece, accuracy = objective.figures(trial)
    return {
        "trial": trial.number,
        "ece": ece,
        "accuracy": accuracy,
        "step": trial.step,
        "parameters": trial.parameters,
        "adapter": str(trial.adapter),
    }


def _figures(
    trials: list[Trial],
    best: Trial,
    front: list[Trial],
    objective: Objective,
    shares: Mapping[str, float],
    folder: Path,
) -> list[Path]:
    chosen = {trial.number for trial in front}
    points = [
        SearchPoint(t.number, t.parameters, *objective.figures(t), t.number in chosen, t.number == best.number)
        for t in trials
        if t.state == "finished"
    ]
    log_keys = [key for key, dimension in objective.tune.space.items() if dimension.log_uniform]
    images = {
        "pareto_front.png": pareto_plot(points, objective.floor),
        "parallel_coordinates.png": parallel_coordinates(points, log_keys),
    }
    if shares:
        images["parameter_importance.png"] = importance_plot(shares)
    for name, image in images.items():
        save_png(folder / name, image)
    return [folder / name for name in images]


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
