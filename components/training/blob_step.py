"""BLoB's training step (Wang et al. 2024): AdamW on the likelihood under a draw of A, then SGD on the weighted KL."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from components.config import RunConfig
from components.models.blob import blob_layers, kl_divergence
from components.training.lower_losses import LowerLoss
from components.training.parameter_space import ParameterSpace
from components.training.schedule import rate_factor


class BlobStep:
    """Two steps in one: theta follows the loss under one draw of A, then M and G follow pi * KL by plain gradient.

    The draw is a function of (seed, step, rank), as dropout is. The KL has a closed form that every rank computes
    alike, so its step needs no word from the others.

    Args:
        space: Plain PyTorch; theta holds M, G and B.
        lower: The loss, whose mean over draws is the expected negative log-likelihood.
        model: With BLoB's layers; its parameters are theta's.
        config: The run.
    """

    def __init__(self, space: ParameterSpace, lower: LowerLoss, model: nn.Module, config: RunConfig) -> None:
        self.space, self.lower, self.model, self.config = space, lower, model, config
        self.cycle = kl_cycle(len(lower.feed.questions), lower.feed.batch_size, config.blob.kl_gamma)

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`."""
        self.lower.begin(step)
        loss, gradient = self.space.gradient(self.lower, wrt=("theta",))
        self.space.apply(gradient)
        weight = kl_weight(step, self.cycle)
        kl = self._descend(weight * self.config.blob.kl_learning_rate * rate_factor(step, self.config.training))
        return {"loss": loss, "kl": kl, "kl_weight": weight, "mean_std": self._mean_std(), **self.lower.seen()}

    def _descend(self, rate: float) -> float:
        """Moves M and G against the KL's gradient; returns the KL before."""
        moved: list[Tensor] = [p for layer in blob_layers(self.model) for p in (layer.lora_A, layer.lora_G)]
        kl = kl_divergence(self.model, self.config.blob.prior_std)
        gradients = torch.autograd.grad(kl, moved)
        with torch.no_grad():
            torch._foreach_add_(moved, list(gradients), alpha=-rate)
        return float(kl.detach())

    @torch.no_grad()
    def _mean_std(self) -> float:
        """Mean standard deviation of the entries of A."""
        stds = [layer.lora_G.square() for layer in blob_layers(self.model)]
        return float(sum(float(std.sum()) for std in stds)) / sum(std.numel() for std in stds)


def kl_cycle(questions: int, batch_size: int, gamma: float | None) -> int:
    """M, steps over which the KL's weights are dealt out (found in the public code).

    Args:
        questions: n, to train on.
        batch_size: Questions a step.
        gamma: M = int(100 n^(pi / gamma) / batch_size), at least 1; None takes an epoch's steps, ceil(n / batch_size).
    """
    if gamma is None:
        return math.ceil(questions / batch_size)
    return max(int(100 * questions ** (math.pi / gamma) / batch_size), 1)


def kl_weight(step: int, cycle: int) -> float:
    """pi_i = 2^i / (2^(M + 1) - 1) with i = 1 ... M running through the cycle; over a cycle they add up to almost 1.

    Written as 2^(i - M - 1) / (1 - 2^-(M + 1)): 2^i itself overflows in long cycles. A weight too small for a float
    is 0.

    Args:
        step: Counted from 0.
        cycle: M.
    """
    position = step % cycle + 1
    return math.ldexp(1.0, position - cycle - 1) / (1.0 - math.ldexp(1.0, -cycle - 1))
