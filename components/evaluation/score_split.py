"""From a model and a split to predictions: the bridge between scoring (models) and metrics (pure functions)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.data.schema import Question
from components.evaluation.metrics import metric_value
from components.evaluation.predictions import Predictions
from components.models.score_questions import SplitScores

TRACED = ("nll", "ece", "accuracy", "mean_confidence")
"""Metrics that stop rules read and traces hold."""


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
    )


def traced_metrics(scores: SplitScores, bins: int) -> dict[str, float]:
    """The few metrics that are followed during training.

    Args:
        scores: Of a labelled validation split.
        bins: Bins of the calibration error.
    """
    n = len(scores.answers)
    anonymous = Predictions(
        tuple(str(i) for i in range(n)), scores.answers, scores.log_probs, np.clip(scores.mass, 0.0, 1.0), (None,) * n
    )
    return {name: metric_value(name, anonymous, bins) for name in TRACED}
