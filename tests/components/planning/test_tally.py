"""The count of bytes and operations on the meta device, on code whose figures are plain."""

from __future__ import annotations

import torch

from components.planning.tally import Tally


def meta(*shape: int, **kind: object) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **kind)


def test_counts_what_is_alive_and_forgets_what_is_gone() -> None:
    """Two tensors of 400 bytes at once, then one of them and one of 800: 1200 at most."""
    with Tally([], vocabulary=7) as tally:
        a, b = meta(100), meta(100)
        del a
        c = torch.cat([b, b])
        del b, c
        meta(10)
    assert tally.usage().activations == 1200


def test_leaves_out_what_was_there_before_and_counts_views_once() -> None:
    weight = meta(8, 8)
    with Tally([weight], vocabulary=7) as tally:
        weight.t().add(1.0).t()[:3]
    assert tally.usage().activations == 8 * 8 * 4


def test_tells_logits_by_their_width() -> None:
    """At the peak: x of 5 * 3 floats and logits of 5 * 7; before the logits x alone."""
    with Tally([], vocabulary=7) as tally:
        x = meta(5, 3)
        logits = meta(5, 7)
        del x
    usage = tally.usage()
    assert (usage.activations, usage.logits) == (60, 140)
    assert usage.before_logits == usage.without_logits == 60
    del logits


def test_keeps_gradients_apart() -> None:
    weight = meta(4, 4).requires_grad_()
    x = meta(2, 4)
    with Tally([weight, x], vocabulary=7) as tally:
        weight.register_hook(lambda gradient: tally.mark_gradient(gradient))
        (gradient,) = torch.autograd.grad((x @ weight).sum(), [weight])
        meta(1000)
    assert tally.usage().gradients == gradient.numel() * 4


def test_counts_two_operations_for_a_multiplication_and_an_addition() -> None:
    with Tally([], vocabulary=7) as tally:
        meta(5, 3) @ meta(3, 2)
    assert tally.usage().flops == 2 * 5 * 3 * 2


def test_answers_questions_about_values() -> None:
    with Tally([], vocabulary=7):
        mask = meta(6, dtype=torch.bool)
        assert not bool(mask.all())
        assert float(meta(())) == 1.0
        assert meta(6, 2)[mask].shape == (6, 2)
        assert mask.nonzero().shape == (6, 1)
        assert torch.bincount(meta(6, dtype=torch.int64), minlength=9).shape == (9,)
