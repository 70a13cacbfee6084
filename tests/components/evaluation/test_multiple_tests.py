"""Holm's correction and ranks, against numbers worked out by hand and against closed testing."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.evaluation.multiple_tests import critical_difference, holm, mean_ranks


def test_holm_by_hand():
    """Sorted .01 .02 .03 .04 times 4 3 2 1 is .04 .06 .06 .04, made to rise: .04 .06 .06 .06."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])


def test_holm_leaves_out_what_is_undefined():
    """Two defined ones: .02 * 2 and .5 * 1; three would make it .06."""
    found = holm([0.5, math.nan, 0.02])
    assert math.isnan(found[1])
    assert [found[0], found[2]] == pytest.approx([0.5, 0.04])
    assert holm([]) == []


def test_holm_refuses_what_is_no_p_value():
    with pytest.raises(ValueError, match="not in"):
        holm([1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_closed_testing_with_bonferroni(p):
    """A hypothesis' adjusted p is the largest Bonferroni p of any set of hypotheses that it is in."""
    sets = [set(c) for size in range(1, len(p) + 1) for c in combinations(range(len(p)), size)]
    expected = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(len(p))]
    assert holm(p) == pytest.approx(expected)


def test_equal_scores_share_the_mean_of_their_ranks():
    """First row: 0.1 first, the two 0.2 share ranks 2 and 3. Second: all alike share 1 to 3."""
    ranks, means = mean_ranks(np.array([[0.2, 0.1, 0.2], [0.3, 0.3, 0.3]]))
    assert ranks.tolist() == [[2.5, 1.0, 2.5], [2.0, 2.0, 2.0]]
    assert means.tolist() == [2.25, 1.5, 2.25]


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (4, 2.569), (10, 3.164)])
def test_critical_difference_has_the_published_quantiles(methods, q):
    """Demsar's table 5 (a), level 0.05."""
    scale = math.sqrt(methods * (methods + 1) / (6 * 14))
    assert critical_difference(methods, 14) / scale == pytest.approx(q, abs=1e-3)


def test_one_data_set_has_no_critical_difference():
    with pytest.raises(ValueError, match="two data sets"):
        critical_difference(3, 1)
