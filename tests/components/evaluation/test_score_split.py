"""From scores to predictions and to what a trace holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from components.data.schema import Question
from components.evaluation.score_split import predictions_of, traced_metrics
from components.models.score_questions import SplitScores

QUESTIONS = [Question(i, "Q?", ("x", "y"), gold) for i, gold in (("a", 0), ("b", 1))]


@pytest.fixture
def scores() -> SplitScores:
    """Two questions answered with .8, the second wrongly; router confidence .9 and .6."""
    return SplitScores(np.log([[0.8, 0.2], [0.8, 0.2]]), np.ones(2), np.array([0, 1]), np.array([0.9, 0.6]))


def test_router_confidence_is_handed_on(scores: SplitScores) -> None:
    found = predictions_of(QUESTIONS, scores)
    assert found.ids == ("a", "b")
    np.testing.assert_array_equal(found.confidence("flc"), [0.9, 0.6])
    assert predictions_of(QUESTIONS, replace(scores, flc=None)).sources == ("softmax",)


def test_traced_metrics_follow_router_confidence_where_there_is_one(scores: SplitScores) -> None:
    """FLC: mean .75, ECE (|1 - .9| + |0 - .6|) / 2 = .35. Softmax: both in one bin, |1/2 - .8| = .3, mean .8."""
    found = traced_metrics(scores, bins=10)
    assert found == pytest.approx(
        {
            "nll": -(np.log(0.8) + np.log(0.2)) / 2,
            "ece": 0.3,
            "accuracy": 0.5,
            "mean_confidence": 0.8,
            "flc_ece": 0.35,
            "flc_mean": 0.75,
        }
    )
    assert not any(name.startswith("flc") for name in traced_metrics(replace(scores, flc=None), bins=10))


def test_rounding_past_one_is_forgiven_and_more_is_not(scores: SplitScores) -> None:
    saturated = replace(scores, flc=np.array([np.float32(1 + 2e-7), 1.0], dtype=np.float64))
    assert predictions_of(QUESTIONS, saturated).confidence("flc").tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"flc\[1\] is 1.01"):
        predictions_of(QUESTIONS, replace(scores, flc=np.array([1.0, 1.01])))
