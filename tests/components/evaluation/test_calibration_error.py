"""Calibration errors: hand-worked values, an independent package, and what must hold for any input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from netcal.metrics import ECE, MCE

from components.evaluation.binning import TiedGroups, equal_mass_bins, equal_width_bins
from components.evaluation.calibration_error import (
    adaptive_calibration_error,
    adaptive_ece_draws,
    classwise_calibration_error,
    classwise_ece_draws,
    ece_draws,
    expected_calibration_error,
    maximum_calibration_error,
    mce_draws,
    reliability_table,
)

# Confidences that fall on edges of common bin counts as often as not, and answers.
PAIRS = st.lists(
    st.tuples(st.one_of(st.floats(0, 1), st.integers(0, 60).map(lambda k: k / 60)), st.booleans()),
    min_size=1,
    max_size=80,
)
BINS = st.integers(1, 30)


@given(pairs=PAIRS, bins=BINS)
@example(pairs=[(1.0, True), (1.0, False), (0.0, False)], bins=10)
def test_ece_and_mce_agree_with_netcal(pairs: list[tuple[float, bool]], bins: int) -> None:
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    labels = correct.astype(int)
    assert expected_calibration_error(confidence, correct, bins) == pytest.approx(
        ECE(bins).measure(confidence, labels), abs=1e-8
    )
    assert maximum_calibration_error(confidence, correct, bins) == pytest.approx(
        MCE(bins).measure(confidence, labels), abs=1e-8
    )


def test_ece_agrees_with_torchmetrics_below_one() -> None:
    """torchmetrics 1.9 puts exactly 1.0 in a bin of its own, so that value is left out here."""
    import torch
    from torchmetrics.functional.classification import binary_calibration_error

    generator = np.random.default_rng(0)
    confidence = generator.random(500)
    correct = generator.random(500) < confidence**2
    theirs = binary_calibration_error(torch.tensor(confidence), torch.tensor(correct).long(), n_bins=15, norm="l1")
    assert expected_calibration_error(confidence, correct, 15) == pytest.approx(theirs.item(), abs=1e-8)


@pytest.mark.parametrize(
    ("confidence", "correct", "bins", "expected"),
    [
        pytest.param([0.0], [False], 10, 0.0, id="zero, wrong"),
        pytest.param([0.0], [True], 10, 1.0, id="zero, right"),
        pytest.param([1.0], [True], 10, 0.0, id="one, right"),
        pytest.param([1.0], [False], 10, 1.0, id="one, wrong"),
        pytest.param([0.7], [True], 10, 0.3, id="one sample"),
        # One bin: accuracy 2/4 against 0.8.
        pytest.param([0.8] * 4, [1, 1, 0, 0], 10, 0.3, id="all tied"),
        # Bins [0, .5) and [.5, 1]: .5 and .9 share the upper one, |1/2 - .7| = .2.
        pytest.param([0.5, 0.9], [1, 0], 2, 0.2, id="inner edge belongs to the bin above"),
        # Last bin [.9, 1]: 1.0 and .9 together, |1/2 - .95| = .45; an extra bin for 1.0 would give .55.
        pytest.param([1.0, 0.9], [1, 0], 10, 0.45, id="1.0 belongs to the last bin"),
        # Each sample alone in its bin: (.2 + .4) / 2.
        pytest.param([0.2, 0.6], [0, 1], 1000, 0.3, id="more bins than samples"),
        # [0, .5): .1 wrong, .3 right -> |1 - .4| = .6; [.5, 1]: .7 right, .9 right -> |2 - 1.6| = .4; over 4.
        pytest.param([0.1, 0.3, 0.7, 0.9], [0, 1, 1, 1], 2, 0.25, id="two bins"),
    ],
)
def test_ece_by_hand(confidence: list[float], correct: list[int], bins: int, expected: float) -> None:
    assert expected_calibration_error(confidence, correct, bins) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 20])
def test_every_edge_has_one_bin(bins: int) -> None:
    """Edge k / bins opens bin k; 1.0 alone stays in the last bin."""
    edges = np.linspace(0, 1, bins + 1)
    assert equal_width_bins(edges, bins).tolist() == [*range(bins), bins - 1]
    table = reliability_table(edges, np.zeros(bins + 1, bool), bins)
    assert table.count.tolist() == [1] * (bins - 1) + [2]


def test_torchmetrics_corner_case_gives_the_textbook_value() -> None:
    """Lightning-AI/torchmetrics 3510: with 1.0 in a bin of its own this sample gives 0.525; by hand it is 0.475.

    Bins of width .1: {.95, 1.0} with one right of two, |1 - 1.95| = .95; alone: |.95| / 2 = .475.
    """
    assert expected_calibration_error([0.95, 1.0], [False, True], 10) == pytest.approx(0.475, abs=1e-12)


def test_mce_by_hand() -> None:
    """Bins {.1, .3}: |1/2 - .2| = .3; {.9}: |0 - .9| = .9."""
    assert maximum_calibration_error([0.1, 0.3, 0.9], [0, 1, 0], 2) == pytest.approx(0.9)


def test_adaptive_bins_by_hand() -> None:
    """Six distinct values, three bins of two: |0+1 - .3| + |1+1 - .7| + |1+0 - 1.5| = .7 + 1.3 + .5, over 6."""
    confidence, correct = [0.1, 0.2, 0.3, 0.4, 0.7, 0.8], [0, 1, 1, 1, 1, 0]
    assert adaptive_calibration_error(confidence, correct, 3) == pytest.approx(2.5 / 6)


def test_adaptive_bins_keep_ties_together() -> None:
    """Four of five tie: middle rank of the ties 2, of the fifth 4.5; with 2 bins of 2.5 they part, whole.

    |2 - 4 * .5| = 0 for the ties, |1 - .9| = .1 for the fifth; over 5. Splitting the ties by position would give more.
    """
    confidence, correct = [0.5, 0.5, 0.5, 0.5, 0.9], [0, 0, 1, 1, 1]
    assert adaptive_calibration_error(confidence, correct, 2) == pytest.approx(0.02)
    assert reliability_table(confidence, correct, 2, "equal_mass").count.tolist() == [4, 1]


def test_adaptive_bins_place_ties_by_their_middle_rank() -> None:
    """Three ties after one other value: their middle rank 1 + 3/2 = 2.5 lies past half of 4, their first does not."""
    assert reliability_table([0.2, 0.5, 0.5, 0.5], [0, 1, 1, 1], 2, "equal_mass").count.tolist() == [1, 3]


@given(pairs=PAIRS, bins=BINS)
def test_tables_hold_every_question_and_give_the_metric(pairs: list[tuple[float, bool]], bins: int) -> None:
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    for strategy, metric in (
        ("equal_width", expected_calibration_error),
        ("equal_mass", adaptive_calibration_error),
    ):
        table = reliability_table(confidence, correct, bins, strategy)  # type: ignore[arg-type]
        assert table.count.sum() == len(pairs)
        assert table.calibration_error == pytest.approx(metric(confidence, correct, bins), abs=1e-12)


@given(pairs=PAIRS, bins=BINS, seed=st.integers(0, 2**32 - 1))
def test_order_of_questions_does_not_matter(pairs: list[tuple[float, bool]], bins: int, seed: int) -> None:
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    shuffled = np.random.default_rng(seed).permutation(len(pairs))
    for metric in (expected_calibration_error, adaptive_calibration_error, maximum_calibration_error):
        before, after = metric(confidence, correct, bins), metric(confidence[shuffled], correct[shuffled], bins)
        assert before == pytest.approx(after, abs=1e-12)
        assert 0 <= before <= 1


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=60, unique=True), bins=BINS)
def test_equal_mass_bins_differ_by_one_without_ties(values: list[float], bins: int) -> None:
    assigned = equal_mass_bins(np.ones(len(values)), bins)
    sizes = np.bincount(assigned, minlength=bins)
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(assigned) >= 0).all()


@given(pairs=PAIRS, bins=BINS, seed=st.integers(0, 2**32 - 1))
def test_draws_equal_the_metric_on_repeated_questions(pairs: list[tuple[float, bool]], bins: int, seed: int) -> None:
    confidence, correct = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    drawn = np.random.default_rng(seed).integers(0, len(pairs), size=(3, len(pairs)))
    counts = np.stack([np.bincount(row, minlength=len(pairs)) for row in drawn]).astype(float)
    for draws, metric in (
        (ece_draws, expected_calibration_error),
        (adaptive_ece_draws, adaptive_calibration_error),
        (mce_draws, maximum_calibration_error),
    ):
        expected = [metric(confidence[row], correct[row], bins) for row in drawn]
        np.testing.assert_allclose(draws(confidence, correct, counts, bins), expected, atol=1e-12)


def test_classwise_by_hand() -> None:
    """Two questions, two options, one bin: class 0 has p .8, .4 and gold once, |1 - 1.2| / 2 = .1; class 1 the same."""
    assert classwise_calibration_error([[0.8, 0.2], [0.4, 0.6]], [0, 1], 1) == pytest.approx(0.1)


def test_classwise_counts_only_questions_that_have_the_option() -> None:
    """Option 2 exists in the second question alone: |0 - .5| / 1 = .5. The others exist in both.

    Option 0: |1 - (1 + .25)| / 2 = .125. Option 1: |1 - (0 + .25)| / 2 = .375. The mean of .125, .375, .5 is 1/3.
    """
    probabilities = [[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]
    assert classwise_calibration_error(probabilities, [0, 1], 1, [2, 3]) == pytest.approx(1 / 3)


def test_classwise_agrees_with_netcal_class_by_class() -> None:
    generator = np.random.default_rng(1)
    probabilities = generator.dirichlet(np.ones(4), size=300)
    gold = generator.integers(0, 4, size=300)
    expected = np.mean([ECE(10).measure(probabilities[:, c], (gold == c).astype(int)) for c in range(4)])
    assert classwise_calibration_error(probabilities, gold, 10) == pytest.approx(expected, abs=1e-8)


def test_classwise_draw_without_an_option_leaves_it_out() -> None:
    probabilities = np.array([[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
    draws = classwise_ece_draws(probabilities, np.array([0, 1]), np.array([2, 3]), np.array([[2.0, 0.0]]), 1)
    assert draws == pytest.approx([0.0])


def test_tied_groups_share_nothing_between_values() -> None:
    groups = TiedGroups.of(np.array([0.3, 0.1, 0.3, 0.2]))
    assert groups.total(np.ones(4)).tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("confidence", "correct", "bins", "named"),
    [
        ([0.5, np.nan], [1, 0], 10, r"confidence\[1\] is nan"),
        ([1.2], [1], 10, r"confidence\[0\] is 1.2"),
        ([-0.1], [1], 10, r"confidence\[0\] is -0.1"),
        ([0.5], [1, 0], 10, "1 entries, but correct has 2"),
        ([0.5], [0.4], 10, "correct must hold only"),
        ([], [], 10, "confidence is empty"),
        ([[0.5]], [1], 10, "confidence must be a vector"),
        ([0.5], [1], 0, "bins is 0"),
    ],
)
def test_bad_input_is_named(confidence: list[float], correct: list[float], bins: int, named: str) -> None:
    for metric in (expected_calibration_error, adaptive_calibration_error, maximum_calibration_error):
        with pytest.raises(ValueError, match=named):
            metric(confidence, correct, bins)
    with pytest.raises(ValueError, match=named):
        reliability_table(confidence, correct, bins)


@pytest.mark.parametrize(
    ("probabilities", "gold", "named"),
    [
        ([[0.5, 0.4]], [0], r"probabilities\[0\] add up to 0.9"),
        ([[0.5, 0.5]], [2], r"gold\[0\] is 2"),
        ([[0.5, 0.5]], [0.0], "gold must hold integers"),
        ([[0.5, 0.5]], [0, 1], "gold must be a vector of 1"),
        ([[np.nan, 1.0]], [0], "is nan"),
        ([0.5, 0.5], [0], "must be a non-empty matrix"),
    ],
)
def test_bad_distributions_are_named(probabilities: list[list[float]], gold: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        classwise_calibration_error(probabilities, gold)


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="equal_mass"):
        reliability_table([0.5], [1], 10, "quantile")  # type: ignore[arg-type]
