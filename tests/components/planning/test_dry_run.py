"""What the dry run says of a loss, against figures that are known otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.errors import UsageError
from components.planning import dry_run as module
from components.planning.dry_run import DryRun, Rows

Tree = Callable[..., dict[str, Any]]
Make = Callable[..., DryRun]


def test_rows_hold_the_prompt_once_and_each_option_but_its_last_token() -> None:
    """148 tokens with 4 options of 8: 148 - 4 * 7 = 120 are the prompt's."""
    (question,) = Rows(148, 8, 4).questions(1)
    assert len(question.prompt) == 120
    assert question.packed_length == 148


def test_rows_without_room_for_a_prompt_are_refused() -> None:
    with pytest.raises(UsageError, match="does not hold a prompt"):
        Rows(28, 8, 4)


def test_a_forward_pass_takes_two_operations_a_weight_and_token(tree: Tree, dry_run: Make) -> None:
    """Head only at T = theta: every linear layer once. The frozen ones: 2 * weights * tokens, the output layer at the
    8 positions of each row's answer only; LoRA adds its own; attention adds 4 * rows * T^2 * width a layer.
    """
    of = dry_run(tree("calm"))
    rows, tokens = 2, 127  # prompt of 120 and 7 tokens of the right option
    flops = of.usage(rows, False).lower_forward.flops
    linear = of.sizes.frozen_count - 2 * 8192 * 256 + of.sizes.theta_count
    attention = 4 * 4 * rows * tokens**2 * 256
    output = 2 * rows * 8 * 8192 * 256
    assert flops == pytest.approx(2 * linear * rows * tokens + attention + output, rel=0.002)


def test_layers_are_extrapolated_exactly(tree: Tree, dry_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two and three layers tell what four take."""
    short = dry_run(tree("calm")).usage(2, False)
    monkeypatch.setattr(module, "layers_alike", lambda *_: False)
    whole = dry_run(tree("calm")).usage(2, False)
    assert short.upper == whole.upper
    assert short.lower_forward == whole.lower_forward


def test_recomputing_trades_memory_for_operations(tree: Tree, dry_run: Make) -> None:
    of = dry_run(tree("sft"))
    kept, again = of.usage(4, False).lower, of.usage(4, True).lower
    assert again.activations < 0.5 * kept.activations
    assert 1.2 * kept.flops < again.flops < 1.6 * kept.flops


def test_activations_grow_with_the_rows(tree: Tree, dry_run: Make) -> None:
    of = dry_run(tree("sft"))
    one, four = of.usage(1, False).lower, of.usage(4, False).lower
    assert four.temporary == pytest.approx(4 * one.temporary, rel=0.02)
    assert four.flops == pytest.approx(4 * one.flops, rel=1e-3)


def test_autocast_is_left_as_it_was(tree: Tree, dry_run: Make) -> None:
    before = torch.autocast
    dry_run(tree("uq4ct")).usage(1, False)
    assert torch.autocast is before


def test_rcft_scores_every_token_of_the_questions_too(tree: Tree, dry_run: Make) -> None:
    """Rows of 148 tokens with 4 options of 8: cft has logits at 1 + 4 * 7 positions, rcft at all the others as well,
    and the plan takes the whole row for the upper bound.
    """
    cft, rcft = (dry_run(tree(method)).usage(2, False).lower for method in ("cft", "rcft"))
    assert 3 < rcft.logits / cft.logits < 7
    assert cft.flops > dry_run(tree("sft")).usage(2, False).lower.flops


def test_ablations_are_laid_out_with_both_objectives(tree: Tree, dry_run: Make) -> None:
    calm = dry_run(tree("calm"))
    for method in ("regularization", "iterate"):
        of = dry_run(tree(method))
        assert of.usage(2, False).upper == calm.usage(2, False).upper
        assert of.sizes.alpha_count == calm.sizes.alpha_count
    assert dry_run(tree("learned_ts")).sizes.alpha_count == 1
