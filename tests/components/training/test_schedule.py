"""Learning-rate factor: known values and its range."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.config import RunConfig, TrainingConfig
from components.training.schedule import learning_rates, rate_factor


def factors(steps: int, **options) -> list[float]:
    config = TrainingConfig(steps=steps, **options)
    return [rate_factor(step, config) for step in range(steps)]


def test_constant_after_a_linear_warm_up():
    """ceil(.4 * 10) = 4 steps of warm-up: 1/4, 2/4, 3/4, 4/4, then 1."""
    assert factors(10, warmup_fraction=0.4, schedule="constant") == [0.25, 0.5, 0.75] + [1.0] * 7


def test_linear_falls_from_the_peak_in_equal_parts():
    """After one step of warm-up, 1 - i/4 for i = 0 .. 3."""
    assert factors(5, warmup_fraction=0.2, schedule="linear") == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_down_in_the_middle():
    """(1 + cos(pi i / 4)) / 2: 1, (1 + sqrt(1/2)) / 2, 1/2, (1 - sqrt(1/2)) / 2."""
    half = math.sqrt(0.5)
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert factors(4, warmup_fraction=0.0, schedule="cosine") == pytest.approx(expected)


def test_all_steps_may_be_warm_up():
    assert factors(4, warmup_fraction=1.0, schedule="cosine") == [0.25, 0.5, 0.75, 1.0]


@given(
    steps=st.integers(1, 200),
    warmup_fraction=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "cosine", "linear"]),
)
def test_every_step_moves_and_none_beyond_the_peak(steps, warmup_fraction, schedule):
    found = factors(steps, warmup_fraction=warmup_fraction, schedule=schedule)
    assert all(0.0 < factor <= 1.0 for factor in found)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


def run_config(**uq4ct) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": "rates",
            "data": {"source": {"kind": "facts", "domain": "geography"}},
            "training": {"steps": 10, "learning_rate": 1e-3, "warmup_fraction": 0.2, "schedule": "constant"},
            "calm": {"alpha_learning_rate": 1e-1},
            "uq4ct": uq4ct,
        }
    )


def test_each_rate_has_its_own_peak():
    """At the last of 10 steps, warm-up over, alpha's square course ends at its peak too."""
    rates = learning_rates(9, run_config(router_learning_rate=1e-2))
    assert rates == pytest.approx({"theta": 1e-3, "router": 1e-2, "alpha": 1e-1})


def test_routers_warm_up_with_the_rest_unless_told_otherwise():
    """Step 0: half the peak after a warm-up of 2 of 10 steps; a quarter where the routers' takes 4."""
    rates = learning_rates(0, run_config(router_learning_rate=1e-2))
    assert (rates["theta"], rates["router"]) == pytest.approx((5e-4, 5e-3))
    rates = learning_rates(0, run_config(router_learning_rate=1e-2, router_warmup_fraction=0.4))
    assert (rates["theta"], rates["router"]) == pytest.approx((5e-4, 2.5e-3))
    rates = learning_rates(0, run_config(router_learning_rate=1e-2, router_warmup_fraction=0.0))
    assert rates["router"] == pytest.approx(1e-2)
