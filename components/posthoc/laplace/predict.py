"""Laplace-LoRA's predictions: the model made linear in its LoRA weights around the trained ones.

With the posterior's covariance C and the Jacobian J of a question's option scores f (one backward pass an option, over
all tokens), the scores are normal, f ~ N(f, J C J^T + 1e-6 I), and the answer's distribution is the mean of their
softmax over draws (Yang et al. 2024, arXiv 2308.13111). The draws of the standard normal are the same for every
question and every posterior, so that differences between two are not those of their draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from components.data.batching import Batch, batches_by_length, collate
from components.data.prompts import EncodedQuestion
from components.models.score_questions import SplitScores
from components.models.scoring import ScoringModel, option_scores
from components.posthoc.laplace.layers import LoraLayer, capturing, lora_layers
from components.posthoc.laplace.posterior import Block, Posterior

JITTER = 1e-6
"""Added to the variances (found)."""
_SEED = 0  # of the draws that all questions share
_JACOBIAN_BYTES = 2**28


@dataclass(frozen=True)
class LinearScores:
    """A batch's option scores under the linear model.

    Attributes:
        mean: float64 [R, K]; -inf where there is no such option.
        variance: float64 [R, K, K]; 0 in rows and columns of absent options.
        mass: float64 [R]; probability that the options hold together at the trained weights.
    """

    mean: Tensor
    variance: Tensor
    mass: Tensor


def linear_scores(
    model: ScoringModel, layers: Sequence[LoraLayer], blocks: Mapping[str, Block], prior_variance: float, batch: Batch
) -> LinearScores:
    """Mean and variance of every question's option scores.

    Args:
        model: In evaluation mode.
        layers: Its LoRA matrices.
        blocks: Their curvature, by name, on the model's device.
        prior_variance: p.
        batch: All options of each question. Its Jacobian is held as a whole: R K times as large as the adapter.
    """
    with capturing(layers) as captured:
        scores = option_scores(model(batch), batch)
        options = scores.log_probs.shape[1]
        jacobian: list[list[Tensor]] = [[] for _ in layers]
        for k in range(options):
            total = scores.log_probs[:, k][batch.option_mask[:, k]].sum()
            slopes = captured.slopes(total, again=k + 1 < options)
            for number, (layer, inputs, slope) in enumerate(zip(layers, captured.inputs, slopes, strict=True)):
                jacobian[number].append(torch.einsum("rti,rtj->rij", *layer.sides(inputs, slope)))
    variance = torch.zeros((len(scores.mass), options, options), dtype=torch.float64, device=scores.mass.device)
    for layer, rows in zip(layers, jacobian, strict=True):
        variance += _variance(torch.stack(rows), blocks[layer.name], prior_variance)
    return LinearScores(scores.log_probs.detach().double(), variance, scores.mass.detach().double())


def _variance(jacobian: Tensor, block: Block, prior_variance: float) -> Tensor:
    """One matrix's part in the variance, float64 [R, K, K].

    Args:
        jacobian: [K, R, d, r].
        block: The matrix's curvature.
        prior_variance: p.
    """
    prior = torch.einsum("krij,lrij->rkl", jacobian, jacobian).double()
    wide, narrow = block.wide_vectors.to(jacobian.dtype), block.narrow_vectors.to(jacobian.dtype)
    seen = torch.einsum("krij,ia,jb->krab", jacobian, wide, narrow).double()
    known = prior_variance * block.curvature
    learnt = torch.einsum("krab,lrab,ab->rkl", seen, seen, known / (1 + known))
    return prior_variance * (prior - learnt)


def mean_softmax(mean: Tensor, variance: Tensor, samples: int) -> Tensor:
    """Log of the softmax's mean over draws of the scores.

    Args:
        mean: float64 [R, K]; -inf where there is no such option.
        variance: float64 [R, K, K].
        samples: Draws. A probability's standard error is at most 0.5 / sqrt(samples).

    Returns:
        float64 [R, K]; -inf where there is no such option.
    """
    generator = torch.Generator().manual_seed(_SEED)
    # Option by option, so that a question's draws do not depend on how many options its neighbours have.
    rows = [torch.randn(samples, dtype=torch.float64, generator=generator) for _ in range(mean.shape[1])]
    noise = torch.stack(rows).to(mean.device)
    # The symmetric root is the one that moves steadily with the variance; rounding may have left it just below zero.
    values, vectors = torch.linalg.eigh((variance + variance.mT) / 2)
    roots = vectors @ torch.diag_embed((values.clamp(min=0.0) + JITTER).sqrt()) @ vectors.mT
    draws = ((centre[:, None] + root @ noise).log_softmax(dim=0) for centre, root in zip(mean, roots, strict=True))
    return torch.stack([each.logsumexp(dim=1) - math.log(samples) for each in draws])


def score_with_posterior(
    model: ScoringModel,
    posterior: Posterior,
    questions: Sequence[EncodedQuestion],
    *,
    pad_id: int,
    token_budget: int,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> SplitScores:
    """Log-probabilities of every option of every question under the posterior; option mass is that without it.

    Args:
        model: With the adapter the posterior belongs to, in evaluation mode.
        posterior: From `PosteriorFit`, or read from the adapter folder.
        questions: At least one.
        pad_id: Token id that fills rows up.
        token_budget: Most tokens of a batch, padding included. Batches are divided further, so that a Jacobian takes
            256 MiB at most, if that of one question does not take more.
        device: Where the model is.
        on_progress: Called with the number of questions done since the last call.

    Raises:
        FloatingPointError: A score is NaN.
    """
    layers, blocks = lora_layers(model.model), posterior.to(device)
    numbers = sum(layer.wide * layer.narrow for layer in layers) * layers[0].module.weight.element_size()
    width = max(len(question.options) for question in questions)
    most = max(1, _JACOBIAN_BYTES // (numbers * width))
    log_probs, mass = np.full((len(questions), width), -np.inf), np.zeros(len(questions))
    for group in batches_by_length(questions, token_budget):
        for start in range(0, len(group), most):
            indices = group[start : start + most]
            batch = collate([questions[i] for i in indices], pad_id).to(device)
            found = linear_scores(model, layers, blocks, posterior.prior_variance, batch)
            averaged = mean_softmax(found.mean, found.variance, posterior.samples)
            log_probs[indices, : averaged.shape[1]] = averaged.cpu().numpy()
            mass[indices] = found.mass.cpu().numpy()
            if on_progress is not None:
                on_progress(len(indices))
    return SplitScores(log_probs, mass, np.array([question.answer for question in questions]))
