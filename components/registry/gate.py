"""The gate: does a candidate meet the rules of the run file, judged by intervals?

Pure: results in, verdict out. An absolute rule reads the interval in `metrics.json`. A comparison takes the bootstrap
of the difference, paired where both answered the same questions. The end of the interval that speaks against the
candidate decides, so too few questions refuse a model rather than let it through. What is undefined or missing fails.

The two-sided intervals of `evaluation.level` are used as they are: at 0.95 a model that lies exactly at a limit passes
one time in forty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from components.config import EvaluationConfig
from components.config_gate import CHAMPION, GateConfig, GateRule
from components.evaluation.predictions import SOFTMAX, Predictions
from components.registry.comparison import PAIRED, Difference, difference
from components.registry.verdict import RuleResult, Verdict


@dataclass(frozen=True)
class Evaluated:
    """What is known of one model's results.

    Attributes:
        name: Its name in the verdict, `calm` or `champion (version 3)`.
        metrics: Content of `metrics.json` by split.
        predictions: Predictions by split.
        version: Its version in the registry; None for a model that is not there.
    """

    name: str
    metrics: Mapping[str, Mapping[str, Any]]
    predictions: Mapping[str, Predictions] = field(default_factory=dict)
    version: str | None = None


@dataclass(frozen=True)
class _Demand:
    """A rule as an inequality on `value`, which is candidate - weight * reference.

    Attributes:
        limit: What the interval is held against.
        at_most: Whether values below the limit are wanted, else above.
        strict: Whether the interval must stay clear of the limit itself.
        weight: Of the reference; 0 for an absolute rule.
    """

    limit: float
    at_most: bool
    strict: bool
    weight: float

    @classmethod
    def of(cls, rule: GateRule) -> _Demand:
        """The inequality of a rule."""
        at_most = not rule.greater_is_better
        better = -1.0 if at_most else 1.0
        if rule.threshold is not None:
            return cls(rule.threshold, at_most, strict=False, weight=0.0)
        if rule.non_inferiority_margin is not None:
            return cls(-better * rule.non_inferiority_margin, at_most, strict=False, weight=1.0)
        if rule.min_absolute_change is not None:
            return cls(better * rule.min_absolute_change, at_most, strict=True, weight=1.0)
        assert rule.min_relative_change is not None
        return cls(0.0, at_most, strict=True, weight=1.0 + better * rule.min_relative_change)

    def met_by(self, value: float) -> bool:
        """Whether one number satisfies it."""
        if self.strict:
            return value < self.limit if self.at_most else value > self.limit
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        side = {(True, False): "at most", (False, False): "at least", (True, True): "below", (False, True): "above"}
        return f"{side[self.at_most, self.strict]} {self.limit + 0.0:.4g}"


def judge(
    gate: GateConfig,
    candidate: Evaluated,
    references: Mapping[str, Evaluated | None],
    evaluation: EvaluationConfig,
    seed: int,
) -> Verdict:
    """The verdict on a candidate.

    Args:
        gate: The rules.
        candidate: The model that is to ship.
        references: Results by the name that `against` calls them by. `champion: None` says that there is no champion:
            comparisons with it are skipped, which the verdict shows. A name that is absent fails its rules.
        evaluation: Bins, draws and level of the comparisons.
        seed: Of their bootstrap.
    """
    rules = tuple(_judge_rule(rule, candidate, references, evaluation, seed) for rule in gate.rules)
    champion = references.get(CHAMPION)
    return Verdict(candidate.name, candidate.version, None if champion is None else champion.version, rules)


def _judge_rule(
    rule: GateRule,
    candidate: Evaluated,
    references: Mapping[str, Evaluated | None],
    evaluation: EvaluationConfig,
    seed: int,
) -> RuleResult:
    demand = _Demand.of(rule)
    figure, problem = _figure(candidate, rule)
    if problem is not None:
        return _row(rule, demand, "fail", problem)
    if rule.reference is None:
        return _held(rule, demand, figure["value"], figure, None, "")
    if rule.reference not in references:
        return _row(rule, demand, "fail", f"there are no results of '{rule.reference}'")
    reference = references[rule.reference]
    if reference is None:
        return _row(rule, demand, "skipped", f"there is no {rule.reference} yet to compare with")
    for side in (candidate, reference):
        found = side.predictions.get(rule.split)
        if found is None or rule.source not in found.sources:
            what = f"of confidence '{rule.source}' " if found is not None else ""
            return _row(rule, demand, "fail", f"no predictions {what}of {side.name} on '{rule.split}'")
    mine, theirs = candidate.predictions[rule.split], reference.predictions[rule.split]
    found_difference = difference(rule.metric, mine, theirs, evaluation, seed, source=rule.source, weight=demand.weight)
    return _held(rule, demand, found_difference.a, vars(found_difference), found_difference, reference.name)


def _figure(candidate: Evaluated, rule: GateRule) -> tuple[dict[str, float], str | None]:
    """The candidate's figure with its interval, or what is wrong with it."""
    where = f"metrics of {candidate.name} on '{rule.split}'"
    if rule.split not in candidate.metrics:
        return {}, f"there are no {where}"
    block = candidate.metrics[rule.split].get("sources", {}).get(rule.source)
    if block is None:
        return {}, f"{where} have no confidence '{rule.source}'"
    if rule.metric not in block:
        return {}, f"{where} lack {rule.metric}"
    figure = {name: block[rule.metric].get(name) for name in ("value", "ci_low", "ci_high")}
    if not all(_finite(value) for value in figure.values()):
        return {}, f"{rule.metric} in the {where} is undefined"
    return figure, None


def _held(
    rule: GateRule,
    demand: _Demand,
    own: float,
    figures: Mapping[str, Any],
    compared: Difference | None,
    other: str,
) -> RuleResult:
    """The row of a rule whose value could be computed."""
    value, low, high = figures["value"], figures["ci_low"], figures["ci_high"]
    basis = _basis(compared, other)
    if not all(map(_finite, (value, low, high))):
        return _row(rule, demand, "fail", f"the difference is undefined{basis}")
    against = high if demand.at_most else low
    passed = demand.met_by(against) and demand.met_by(value)
    if passed:
        reason = f"even the interval's worse end, {against:.4f}, is {demand}"
    elif demand.met_by(value):
        reason = f"the figure itself is {demand}, but its interval reaches {against:.4f}"
    else:
        reason = f"{value:.4f} is not {demand}"
    return _row(
        rule,
        demand,
        "pass" if passed else "fail",
        reason + basis,
        candidate_figure=own,
        reference=None if compared is None else compared.b,
        interval=(value, low, high),
    )


def _basis(compared: Difference | None, other: str) -> str:
    if compared is None:
        return ""
    if compared.kind == PAIRED:
        return f"; paired with {other} on {compared.questions[0]} questions"
    return f"; {other} answered other questions ({compared.questions[1]} against {compared.questions[0]})"


def _row(
    rule: GateRule,
    demand: _Demand,
    outcome: Any,
    reason: str,
    *,
    candidate_figure: float | None = None,
    reference: float | None = None,
    interval: tuple[float | None, float | None, float | None] = (None, None, None),
) -> RuleResult:
    share = "" if demand.weight in (0.0, 1.0) else f"{demand.weight:g} x "
    source = "" if rule.source == SOFTMAX else f" ({rule.source})"
    what = f"{rule.metric}{source} on {rule.split}"
    words = what if rule.reference is None else f"{what} minus {share}{rule.reference}"
    return RuleResult(
        words,
        rule.metric,
        rule.split,
        rule.source,
        rule.reference,
        candidate_figure,
        reference,
        *interval,
        str(demand),
        outcome,
        reason,
    )


def _finite(value: Any) -> bool:
    """MLflow keeps NaN with a flag and infinity as 1.8e308; neither is a figure to ship a model by."""
    return isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 1e300
