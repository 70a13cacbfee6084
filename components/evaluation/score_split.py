"""From a model and a split to predictions: the bridge between scoring (models) and metrics (pure functions)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.data.schema import Question
from components.evaluation.checks import FloatArray
from components.evaluation.metrics import metric_value
from components.evaluation.predictions import FLC, Predictions
from components.models.score_questions import SplitScores

TRACED = ("nll", "ece", "accuracy", "mean_confidence")
"""Metrics that stop rules read and traces hold."""

_ROUNDING = 1e-5  # of a float32 mean over layers of sums over experts


def predictions_of(questions: Sequence[Question], scores: SplitScores) -> Predictions:
    """Predictions of questions from their scores, in the same order.

    Args:
        questions: n questions.
        scores: Of the same n questions.
    """
    return Predictions(
        ids=tuple(q.id for q in questions),
        gold=scores.answers,
        option_log_probs=scores.log_probs,
        # By text the sum passes 1 where an option begins with another or equals it, else only by rounding.
        option_mass=np.clip(scores.mass, 0.0, 1.0),
        groups=tuple(q.group for q in questions),
        flc=without_rounding(scores.flc),
    )


def traced_metrics(scores: SplitScores, bins: int) -> dict[str, float]:
    """The few metrics that are followed during training; with routers also `flc_ece` and `flc_mean`.

    Of open-ended questions, whose one option is the right answer, there is only `nll`: of that answer as a whole, in
    nats, and with routers `flc_mean`.

    Args:
        scores: Of a labelled validation split.
        bins: Bins of the calibration error.
    """
    n = len(scores.answers)
    if scores.log_probs.shape[1] == 1:
        of_routers = {} if scores.flc is None else {"flc_mean": float(scores.flc.mean())}
        return {"nll": float(-scores.log_probs.mean())} | of_routers
    anonymous = Predictions(
        tuple(str(i) for i in range(n)),
        scores.answers,
        scores.log_probs,
        np.clip(scores.mass, 0.0, 1.0),
        (None,) * n,
        flc=without_rounding(scores.flc),
    )
    found = {name: metric_value(name, anonymous, bins) for name in TRACED}
    if FLC in anonymous.sources:
        found["flc_ece"] = metric_value("ece", anonymous, bins, FLC)
        found["flc_mean"] = metric_value("mean_confidence", anonymous, bins, FLC)
    return found


def without_rounding(flc: FloatArray | None) -> FloatArray | None:
    """Router confidence for `Predictions`.

    A saturated router's confidence may pass 1 by rounding; anything further off is left for the checks to find.
    """
    return None if flc is None else np.where((flc > 1) & (flc < 1 + _ROUNDING), 1.0, flc)
