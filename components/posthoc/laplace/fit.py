"""Laplace-LoRA's fit: the curvature at the trained weights, and the prior variance of highest evidence.

Yang et al. 2024 (arXiv 2308.13111). A question's outputs are the scores of its options, and its likelihood is their
softmax, so the same holds whether options are scored by letter or by the log-probability of their text. The weights it
is fitted around come from cross-entropy over the whole vocabulary, as for plain fine-tuning: they are near the mode of
this likelihood, not at it.

As in the paper's code the factors see the tokens whose logits are scored (by letter, the last one of the prompt), and
slopes are those of a label drawn from the model itself. Here the draw belongs to the question, by its id, so neither
order nor batches have a say in the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from components.config_laplace import LaplaceConfig
from components.data.batching import batches_by_length, collate
from components.data.prompts import EncodedQuestion
from components.models.scoring import ScoringModel, option_scores
from components.posthoc.laplace.factors import Factors, probe_count, probe_vectors
from components.posthoc.laplace.layers import capturing, lora_layers
from components.posthoc.laplace.posterior import Posterior, best_prior_variance, curvature_of


class PosteriorFit:
    """Gathers the curvature over questions.

    Args:
        model: With the trained adapter; put it in evaluation mode first.
        config: The run file's `laplace` section.
        seed: Of the labels drawn from the model.

    Raises:
        ModelError: The model has no LoRA matrices, or has some that are not of linear layers.
    """

    def __init__(self, model: ScoringModel, config: LaplaceConfig, seed: int) -> None:
        self.model, self.config, self.seed = model, config, seed
        self.layers = lora_layers(model.model)
        device = self.layers[0].module.weight.device
        counts = {layer.wide: probe_count(layer.wide, config.rank) for layer in self.layers}
        probes = {wide: probe_vectors(wide, count).to(device) for wide, count in counts.items()}
        self.factors = [Factors(layer.wide, layer.narrow, probes[layer.wide]) for layer in self.layers]
        self.n = self.tokens = 0
        self.log_likelihood = 0.0

    def over(self, questions: Sequence[EncodedQuestion], *, pad_id: int, token_budget: int) -> Iterator[int]:
        """Adds questions, in batches of similar length: one forward and one backward pass each.

        Args:
            questions: At least one.
            pad_id: Token id that fills rows up.
            token_budget: Most tokens of a batch, padding included.

        Yields:
            Questions done since the last time.

        Raises:
            FloatingPointError: A score is NaN.
        """
        device = self.layers[0].module.weight.device
        for group in batches_by_length(questions, token_budget):
            chosen = [questions[i] for i in group]
            batch = collate(chosen, pad_id).to(device)
            with capturing(self.layers) as captured:
                log_probs = option_scores(self.model(batch), batch).log_probs.log_softmax(dim=1)
                if bool(log_probs.isnan().any()):
                    raise FloatingPointError("the model scored a question of the training split as NaN")
                rows = torch.arange(len(chosen), device=device)
                labels = self._labels(log_probs.detach(), [question.id for question in chosen])
                slopes = captured.slopes(log_probs[rows, labels].sum(), again=False)
            for layer, factors, inputs, slope in zip(self.layers, self.factors, captured.inputs, slopes, strict=True):
                scored = (side.flatten(0, 1)[batch.positions] for side in layer.sides(inputs, slope))
                factors.add(*scored)
            self.log_likelihood += float(log_probs.detach()[rows, batch.answers].double().sum())
            self.n += len(chosen)
            self.tokens += len(batch.positions)
            yield len(chosen)

    def posterior(self) -> Posterior:
        """The posterior of what was added.

        Raises:
            ModelError: The evidence has no maximum.
        """
        blocks = {
            layer.name: factors.block(self.config.rank, self.tokens)
            for layer, factors in zip(self.layers, self.factors, strict=True)
        }
        norm = sum(float(layer.module.weight.detach().double().square().sum()) for layer in self.layers)
        variance = self.config.prior_variance or best_prior_variance(curvature_of(blocks), norm)
        return Posterior(blocks, variance, self.config.samples, self.n, self.log_likelihood, norm)

    def _labels(self, log_probs: Tensor, ids: Sequence[str]) -> Tensor:
        """An option of each question, drawn from the model's distribution, int64 [R]."""
        drawn = torch.tensor([uniform(self.seed, name) for name in ids], dtype=torch.float64, device=log_probs.device)
        below = log_probs.double().exp().cumsum(dim=1) <= drawn[:, None]
        last = (~log_probs.isneginf()).sum(dim=1) - 1
        return torch.minimum(below.sum(dim=1), last)  # rounding may leave the last sum just under the draw


def uniform(seed: int, name: str) -> float:
    """A number in [0, 1) that belongs to a seed and a question."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
