"""Drift: do fresh data call for retraining the champion?

With labels, the champion's ECE and accuracy on the fresh data are set against those on its own test data. Drift is
declared when the whole interval of the worsening lies beyond what the run file allows: a retraining costs something, so
it needs evidence, not mere doubt.

Without labels, neither can be computed. What can be seen is whether the distribution of the champion's confidence, and
of its routers' confidence where it has routers, is the one it had on its test data: the two-sample Kolmogorov-Smirnov
test. Its p-value alone will not do, because with enough questions it falls below any level for shifts that matter to
no one; D alone will not do either, because with few questions it is large by chance. A shift therefore counts when D,
the size of the effect, exceeds `drift.max_shift` and the p-value is small too. A shift says that the questions have
changed, not that the confidence is wrong; and answers can change while it stays. Label some questions where it
matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from components.config import EvaluationConfig
from components.config_gate import DriftConfig
from components.errors import CaltuneError
from components.evaluation.checks import FloatArray, unit_interval
from components.evaluation.predictions import Predictions
from components.registry.comparison import Difference, difference

WORSENING = {"ece": 1.0, "accuracy": -1.0}
"""Figures watched with labels; the sign makes a rise a worsening."""


@dataclass(frozen=True)
class DriftFigure:
    """One figure that was watched.

    Attributes:
        name: `ece`, `accuracy`, or `shift of softmax` and `shift of flc`.
        reference: On the champion's test data, at the size of the smaller sample; the mean confidence for a shift.
        fresh: On the fresh data, likewise.
        worsening: How much worse, positive is worse; D for a shift.
        ci_low: Lower end of its interval; None for a shift.
        ci_high: Upper end.
        p_value: Of a shift; None otherwise.
        limit: What is allowed.
        drifted: Whether it is beyond that for certain.
    """

    name: str
    reference: float
    fresh: float
    worsening: float
    ci_low: float | None
    ci_high: float | None
    p_value: float | None
    limit: float
    drifted: bool

    @property
    def sentence(self) -> str:
        """The figure in words."""
        if self.p_value is not None:
            return (
                f"{self.name}: D {self.worsening:.3f} (p {self.p_value:.2g}), mean {self.reference:.3f} on the test "
                f"data and {self.fresh:.3f} now; {self.limit:.3f} is allowed"
            )
        return (
            f"{self.name} {self.reference:.3f} on the test data and {self.fresh:.3f} now, worse by "
            f"{self.worsening:+.3f} [{self.ci_low:+.3f}, {self.ci_high:+.3f}]; {self.limit:.3f} is allowed"
        )


@dataclass(frozen=True)
class DriftDecision:
    """Whether to retrain.

    Attributes:
        drifted: The decision.
        labelled: Whether labels were there to judge by.
        questions: Fresh questions.
        figures: What it rests on.
    """

    drifted: bool
    labelled: bool
    questions: int
    figures: tuple[DriftFigure, ...]

    @property
    def reason(self) -> str:
        """The decision in words."""
        shown = [figure for figure in self.figures if figure.drifted] or list(self.figures)
        basis = f"{self.questions} {'labelled' if self.labelled else 'unlabelled'} fresh questions"
        verdict = "drift" if self.drifted else "no drift"
        return f"{verdict} on {basis}: " + "; ".join(figure.sentence for figure in shown)

    def values(self) -> dict[str, float]:
        """Everything about the figures that is a number, by name: `ece_worsening`, `shift_of_softmax_p_value` ..."""
        parts = ("reference", "fresh", "worsening", "ci_low", "ci_high", "p_value", "limit")
        return {
            f"{figure.name.replace(' ', '_')}_{part}": value
            for figure in self.figures
            for part in parts
            if (value := getattr(figure, part)) is not None
        }

    def as_dict(self) -> dict[str, Any]:
        """The decision, its figures and its reason as JSON types."""
        return {
            "drifted": self.drifted,
            "labelled": self.labelled,
            "questions": self.questions,
            "reason": self.reason,
            "figures": [asdict(figure) for figure in self.figures],
        }


def labelled_drift(
    fresh: Predictions,
    test: Predictions,
    config: DriftConfig,
    evaluation: EvaluationConfig,
    seed: int,
    source: str | None = None,
) -> DriftDecision:
    """Drift by ECE and accuracy.

    Args:
        fresh: The champion's predictions of fresh, labelled questions.
        test: Its predictions of its own test split, from the registry.
        config: What is allowed.
        evaluation: Bins, draws and level of the intervals.
        seed: Of the bootstrap.
        source: Confidence source; None is the primary one.

    Raises:
        ValueError: A source that one of the two lacks.
    """
    limits = {"ece": config.max_ece_increase, "accuracy": config.max_accuracy_drop}
    figures = tuple(
        _worsening(metric, difference(metric, fresh, test, evaluation, seed, source=source), limit)
        for metric, limit in limits.items()
    )
    return DriftDecision(any(figure.drifted for figure in figures), True, len(fresh), figures)


def unlabelled_drift(
    fresh: Mapping[str, FloatArray], test: Mapping[str, FloatArray], config: DriftConfig
) -> DriftDecision:
    """Drift by the distributions of confidence.

    Args:
        fresh: Confidence [n] in [0, 1] on fresh questions by source, `softmax` and, with routers, `flc`.
        test: The same on the champion's test split (`confidences`).
        config: What is allowed.

    Raises:
        CaltuneError: The two have not the same sources.
        ValueError: A confidence is NaN or outside [0, 1], or there are none.
    """
    from scipy.stats import ks_2samp

    if not fresh or fresh.keys() != test.keys():
        raise CaltuneError(
            f"fresh data have the confidences {', '.join(fresh) or 'none'} and the champion's test data "
            f"{', '.join(test) or 'none'}; evaluate both with the champion"
        )
    figures = []
    for source, values in fresh.items():
        now, then = unit_interval(values, f"fresh {source}"), unit_interval(test[source], f"test {source}")
        found = ks_2samp(now, then)
        shift, p_value = float(found.statistic), float(found.pvalue)
        drifted = shift > config.max_shift and p_value < config.significance / len(fresh)
        means = float(np.mean(then)), float(np.mean(now))
        figures.append(DriftFigure(f"shift of {source}", *means, shift, None, None, p_value, config.max_shift, drifted))
    questions = len(next(iter(fresh.values())))
    return DriftDecision(any(figure.drifted for figure in figures), False, questions, tuple(figures))


def confidences(predictions: Predictions) -> dict[str, FloatArray]:
    """Confidence [n] by source, for `unlabelled_drift`."""
    return {source: predictions.confidence(source) for source in predictions.sources}


def _worsening(metric: str, found: Difference, limit: float) -> DriftFigure:
    sign = WORSENING[metric]
    low, high = sorted((sign * found.ci_low, sign * found.ci_high))
    return DriftFigure(metric, found.b, found.a, sign * found.value, low, high, None, limit, drifted=low > limit)
