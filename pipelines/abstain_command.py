"""`caltune abstain`: from which confidence on a method answers, chosen on labelled questions, kept with its adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.errors import UsageError
from pipelines.options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from components.evaluation.abstention_file import Policy, Target
    from components.evaluation.open_predictions import AnyPredictions
    from components.evaluation.selective import Achieved

DELTA = 0.1
"""Probability of not keeping to a target risk, unless another is asked for."""

CAPTION = "* chosen on this split, so its figures flatter"
WARNING = (
    "The guarantee is for questions like those of the first row. Elsewhere, out of domain above all, nothing is "
    "guaranteed: compare what is achieved with the target."
)


@dataclass(frozen=True)
class Outcome:
    """What a policy does on each split.

    Attributes:
        name: The policy's name in the adapter folder.
        policy: The policy.
        splits: By split, the one it was chosen on first: what its threshold achieves and what the naive one does.
        figure: The risk-coverage curves.
    """

    name: str
    policy: Policy
    splits: Mapping[str, tuple[Achieved, Achieved]]
    figure: Path

    def as_dict(self) -> dict[str, Any]:
        """As JSON types."""
        splits = {
            split: {"chosen": _figures(chosen), "naive": _figures(naive) if self.policy.target.kind == "risk" else None}
            for split, (chosen, naive) in self.splits.items()
        }
        own = self.policy.as_dict() | {"naive_threshold": self.policy.naive}
        return {"name": self.name, "policy": own, "splits": splits, "figure": str(self.figure)}


def add_abstain_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(abstain)


def abstain(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    method: Annotated[str, typer.Option(help="Method of the run, one with an adapter.", show_default=False)],
    risk: Annotated[
        float | None, typer.Option(help="At most this share of the answers may be wrong.", show_default=False)
    ] = None,
    coverage: Annotated[
        float | None, typer.Option(help="At least this share of the questions is answered.", show_default=False)
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help=f"Probability of not keeping to --risk; {DELTA} unless given.", show_default=False),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Confidence source: softmax, flc ...; by default the primary one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the policy; by default its target, risk_0.1.")] = None,
    fitted_on: Annotated[str, typer.Option(help="Labelled split to choose on.")] = "validation",
    json_: Json = False,
) -> None:
    """Choose the confidence from which a method answers, for a target risk or coverage; keep it with the adapter.

    The policy goes into the adapter folder's abstention.json and is the default of what predicts with it.
    """
    target = _target(risk, coverage, delta)
    outcome = choose(run, method, target, source, name, fitted_on)
    if json_:
        print(json.dumps(outcome.as_dict(), indent=2))
        return
    from pipelines.progress import stdout_console

    console = stdout_console()
    console.print(_table(outcome))
    console.print(f"Policy: {_rule(outcome.policy)}.", soft_wrap=True)
    console.print(f"Guaranteed: {outcome.policy.sentence}.", soft_wrap=True)
    console.print(WARNING, soft_wrap=True)
    console.print(f"figure: {outcome.figure}", soft_wrap=True)


def choose(run: Path, method: str, target: Target, source: str | None, name: str | None, fitted_on: str) -> Outcome:
    """Chooses a policy, keeps it with the method's adapter, writes its curves and what it achieves beside.

    Args:
        run: Run folder.
        method: One of its methods.
        target: What to keep to.
        source: Confidence source; None takes the primary one.
        name: Of the policy; None names it by its target, and by its source where that is not the primary one.
        fitted_on: Split to choose on.

    Raises:
        UsageError: There is no such run, method, split or source, or a figure is out of range.
        ModelError: The adapter folder is damaged.
    """
    from components.evaluation.abstention_file import add_policy, choose_policy
    from components.evaluation.plot_style import save_png
    from components.evaluation.selective import achieved
    from components.evaluation.selective_plot import risk_coverage_with_thresholds
    from components.files import write_json

    adapter, found = _evaluated(run, method, fitted_on)
    try:
        policy = choose_policy(found[fitted_on], source, target, fitted_on)
    except ValueError as error:
        raise UsageError(f"{method}: {error}") from error
    pairs = {split: (of.confidence(policy.source), of.correctness(policy.source)) for split, of in found.items()}
    is_primary = policy.source == found[fitted_on].sources[0]
    called = name or (target.name if is_primary else f"{target.name}_{policy.source}")
    beside = run / method / "abstention"
    figure = beside / f"{called}.png"
    splits = {s: (achieved(*pair, policy.threshold), achieved(*pair, policy.naive)) for s, pair in pairs.items()}
    outcome = Outcome(called, policy, splits, figure)
    add_policy(adapter, called, policy)
    wanted = {target.kind: target.value}
    save_png(figure, risk_coverage_with_thresholds(pairs, policy.threshold, policy.naive, **wanted))
    write_json(beside / f"{called}.json", outcome.as_dict())
    return outcome


def _target(risk: float | None, coverage: float | None, delta: float | None) -> Target:
    from components.evaluation.abstention_file import Target

    if (risk is None) == (coverage is None):
        raise UsageError("name a target: either --risk or --coverage")
    if risk is not None:
        return Target("risk", risk, DELTA if delta is None else delta)
    if delta is not None:
        raise UsageError("--delta belongs to --risk; a coverage is kept to on average")
    assert coverage is not None
    return Target("coverage", coverage, None)


def _evaluated(run: Path, method: str, fitted_on: str) -> tuple[Path, dict[str, AnyPredictions]]:
    """The method's adapter folder and its predictions: of the split to choose on, then of every test split."""
    from components.evaluation.open_predictions import read_any_predictions
    from components.run_file import load_run_file
    from pipelines.run_folder import RUN_FILE

    if not (run / RUN_FILE).is_file():
        raise UsageError(f"{run} is not a run folder (it has no {RUN_FILE})")
    adapter = run / method / "adapter"
    if not adapter.is_dir():
        with_one = sorted(path.parent.name for path in run.glob("*/adapter"))
        there = f"; there is: {', '.join(with_one)}" if with_one else ""
        raise UsageError(f"{run}: '{method}' has no adapter folder to keep a policy in{there}")
    evaluated = run / method / "evaluation"
    if not (evaluated / fitted_on / "predictions.parquet").is_file():
        splits = ", ".join(sorted(path.parent.name for path in evaluated.glob("*/predictions.parquet"))) or "none"
        raise UsageError(f"{run}: '{method}' is not evaluated on '{fitted_on}'; evaluated splits: {splits}")
    tests = ["id", *load_run_file(run / RUN_FILE).data.ood]
    paths = {split: evaluated / split / "predictions.parquet" for split in dict.fromkeys([fitted_on, *tests])}
    return adapter, {split: read_any_predictions(path) for split, path in paths.items() if path.is_file()}


def _rule(policy: Policy) -> str:
    if policy.threshold is None:
        return "never answer"
    return f"answer where {policy.source} confidence >= {policy.threshold:.4f}"


def _figures(found: Achieved) -> dict[str, Any]:
    return asdict(found) | {"coverage": found.coverage}


def _table(outcome: Outcome) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    target = outcome.policy.target
    of_risk = target.kind == "risk"
    table = Table(box=box.SIMPLE_HEAD, title=f"{outcome.name}: target {target.kind} {target.value:g}", caption=CAPTION)
    table.padding, table.pad_edge = (0, 1, 0, 0), False  # all of it within 80 columns
    table.title_justify = table.caption_justify = "left"
    table.add_column("split", no_wrap=True)
    for heading in ("n", "coverage", "risk (95 %)", *(("naive\ncoverage", "naive\nrisk (95 %)") if of_risk else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for split, (chosen, naive) in outcome.splits.items():
        label = escape(split) + (" *" if split == outcome.policy.fitted_on else "")
        compared = (_coverage(naive, False), _risk(naive)) if of_risk else ()
        table.add_row(label, str(chosen.n), _coverage(chosen, not of_risk), _risk(chosen), *compared)
    return table


def _coverage(found: Achieved, with_interval: bool) -> str:
    interval = f" ({found.coverage_low:.2f}-{found.coverage_high:.2f})" if with_interval else ""
    return f"{found.coverage:.2f}{interval}"


def _risk(found: Achieved) -> str:
    if found.risk is None:
        return "none answered"
    return f"{found.risk:.3f} ({found.risk_low:.2f}-{found.risk_high:.2f})"
