"""The formulas: what is divided among GPUs, what CALM holds on top, and which layout is the cheapest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.planning.dry_run import LossUsage
from components.planning.flops import gpu_hours, step_flops
from components.planning.layouts import GIB, Candidate, cheapest, gpu_counts
from components.planning.memory import BUCKET, PARTS, Layout, Phase, peak, phases
from components.planning.shapes import Sizes
from components.planning.tally import Usage
from components.training.methods import METHODS

SIZES = Sizes(
    frozen_count=4 * 10**9,
    frozen=8 * 10**9,
    theta_count=10**8,
    router_count=0,
    alpha_count=1000,
    head=4000,
    gathered=7 * 10**9,
    gathered_count=35 * 10**8,
    largest=10**9,
    largest_theta=10**6,
    output_and_layer=12 * 10**8,
    layers=30,
    vocabulary=500,
)
T = 4 * 10**8  # bytes of theta
A = 4000
LOSS = LossUsage(
    lower=Usage(activations=3e9, logits=1e8, before_logits=2e9, without_logits=2.5e9, flops=6e12),
    lower_forward=Usage(activations=1e8, logits=1e8, before_logits=1e8, without_logits=1e8, flops=2e12),
    upper=Usage(activations=4e9, logits=3e8, before_logits=3e9, without_logits=3.5e9, flops=8e12),
)


def named(method: str, layout: Layout, inner_steps: int = 5) -> dict[str, Phase]:
    return {p.name: p for p in phases(SIZES, LOSS, METHODS[method], inner_steps, layout)}


@pytest.mark.parametrize(
    ("stage", "weights", "adapter", "optimiser"),
    [
        (None, 8e9, T, 2 * T),
        (0, 8e9, T, 2 * T),
        (1, 8e9, T + T / 4, T / 2),
        (2, 8e9, T + T / 4, T / 2),
        (3, 2e9, T / 2, T / 2),
    ],
)
def test_what_stays_is_divided_as_the_stage_says(
    stage: int | None, weights: float, adapter: float, optimiser: float
) -> None:
    """On 4 GPUs: moments from stage 1, weights at stage 3; masters are a copy more from stage 1 on."""
    parts = named("sft", Layout(4, stage, False))["gradient of the loss"].parts
    assert parts["weights"] == weights
    assert parts["adapter"] == adapter
    assert parts["optimiser"] == optimiser


def test_calm_holds_its_vectors_beside_the_gradients() -> None:
    """Plain on one GPU. The head, its values and moments: 3 A. At the inner steps grad g (T + A), the snapshot (T) and
    the inner gradient before (T); while f is differentiated grad g (T + A), grad g at theta_T (A) and grad q's own
    block (A).
    """
    found = named("calm", Layout(1, None, False))
    assert found["inner step"].parts["bilevel"] == 3 * A + 3 * T + A
    assert found["gradient of f"].parts["bilevel"] == 3 * A + T + 3 * A
    assert found["direction"].parts["bilevel"] == 3 * A + (T + 3 * A) + 2 * (T + A)
    assert found["gradient of f"].parts["logits"] == 3e8


def test_one_inner_step_is_the_gradient_at_theta() -> None:
    assert "inner step" not in named("calm", Layout(1, None, False), inner_steps=1)
    two = named("calm", Layout(1, None, False), inner_steps=2)
    assert two["inner step"].parts["bilevel"] == 3 * A + 2 * T + A  # no inner gradient before the first


def test_stage_3_keeps_whole_weights_until_the_backward_pass_unless_recomputing() -> None:
    """Autograd holds 7 GB of gathered weights or, recomputing, output layer and one layer; DeepSpeed 10^9 of 3.5 * 10^9
    weights, which is 2 GB.
    """
    flat = 2**24 * (8e9 + T) / (4e9 + 1e8) + 1e9
    kept = named("sft", Layout(4, 3, False))["gradient of the loss"].parts["buffers"]
    again = named("sft", Layout(4, 3, True))["gradient of the loss"].parts["buffers"]
    assert kept == pytest.approx(BUCKET + 7e9 + 2e9 + flat)
    assert again == pytest.approx(BUCKET + 1.2e9 + 2e9 + flat)


def test_a_small_model_is_whole_before_there_are_logits() -> None:
    """3 MB of weights stay; the buffer of 4.4 MB that all of them came in goes."""
    small = replace(
        SIZES, frozen_count=10**6, frozen=4 * 10**6, theta_count=10**5, gathered=3 * 10**6, gathered_count=7 * 10**5,
        largest=10**6,
    )  # fmt: skip
    for checkpointing in (False, True):
        first, second = phases(small, LOSS, METHODS["sft"], 1, Layout(2, 3, checkpointing))[:2]
        assert first.parts["buffers"] == pytest.approx(BUCKET + 3e6 + 4.4e6)
        assert second.parts["buffers"] == pytest.approx(BUCKET + 3e6)
        assert first.parts["activations"] == 2e9


def test_gradients_go_through_the_bucket_at_stage_2() -> None:
    """400 MB of gradients on 4 GPUs: the direction, one bucket's worth laid end to end, a quarter of the rest."""
    parts = named("sft", Layout(4, 2, False))["gradients into ZeRO's buckets"].parts
    assert parts["gradients"] == T + BUCKET + (T - BUCKET) / 4
    assert parts["buffers"] == BUCKET


def test_the_peak_is_the_largest_phase_and_names_every_part() -> None:
    found = peak(SIZES, LOSS, METHODS["calm"], 5, Layout(2, 2, False))
    assert found.name == "gradient of f"
    assert tuple(found.parts) == PARTS
    assert found.total == sum(found.parts.values())


def test_calm_takes_t_gradients_one_of_f_and_a_forward_pass() -> None:
    assert step_flops(LOSS, METHODS["sft"], 5) == 6e12
    assert step_flops(LOSS, METHODS["calm"], 5) == 5 * 6e12 + 2e12 + 8e12


def test_the_ablations_take_a_gradient_of_each_objective() -> None:
    assert step_flops(LOSS, METHODS["regularization"], 5) == 6e12 + 8e12
    assert step_flops(LOSS, METHODS["iterate"], 5, calibration_steps=3) == 6e12 + 3 * 8e12
    assert step_flops(LOSS, METHODS["learned_ts"], 5) == step_flops(LOSS, METHODS["calm"], 5)


def test_the_ablations_hold_fewer_vectors_than_calm() -> None:
    """The weighted sum: grad g (T + A) while f is differentiated, then both and the direction. In turn: none is kept
    from one step to the next.
    """
    summed = named("regularization", Layout(1, None, False))
    assert summed["gradient of f"].parts["bilevel"] == 3 * A + T + A
    assert summed["direction"].parts["bilevel"] == 3 * A + 3 * (T + A)
    turns = phases(SIZES, LOSS, METHODS["iterate"], 5, Layout(1, None, False))
    assert {phase.parts["bilevel"] for phase in turns} == {3 * A}
    assert [phase.name for phase in turns].count("optimiser's step") == 2


def test_gpu_hours() -> None:
    """3.6e18 operations at 100 TFLOP/s: 36,000 seconds."""
    assert gpu_hours(3.6e18, 100) == pytest.approx(10)


def candidate(gpus: int, stage: int | None, gib: float) -> Candidate:
    return Candidate(Layout(gpus, stage, False), Phase("step", {"weights": gib * GIB, "logits": 0.0}), 72 * GIB)


def test_the_cheapest_has_the_fewest_gpus_then_the_lowest_stage() -> None:
    found = [candidate(4, None, 10), candidate(2, 3, 20), candidate(2, 2, 70), candidate(2, 0, 73), candidate(1, 3, 73)]
    assert cheapest(found).layout == Layout(2, 2, False)
    assert cheapest([candidate(2, 0, 5), candidate(2, None, 5)]).layout.stage is None
    assert cheapest([candidate(1, 3, 73)]) is None


def test_a_layout_that_does_not_fit_says_why() -> None:
    assert candidate(1, 3, 73).verdict == (
        "lacks 1.0 GiB in the phase 'step'; of its 73.0 GiB the part 'weights' takes 73.0"
    )
    assert candidate(1, 3, 70).verdict == "fits, 2.0 GiB to spare"


def test_a_batch_is_divided_evenly() -> None:
    assert gpu_counts(16, 64) == ([1, 2, 4, 8, 16], [32, 64])
    assert gpu_counts(6, 5) == ([1, 2], [4])
