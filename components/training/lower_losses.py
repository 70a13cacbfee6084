"""What the weights minimise: the answer's cross-entropy, or UQ4CT's loss with routers among the weights."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from components.config_methods import Uq4ctConfig
from components.models.calibration_head import CalibrationHead
from components.models.mixlora.routing import Routing
from components.models.score_questions import LogitsAt
from components.models.scoring import ScoringModel, apply_head
from components.training.expert_load import ExpertLoad
from components.training.feed import Feed, seed_dropout
from components.training.objectives.balance import balance_share, expert_counts, token_count, z_loss_share
from components.training.objectives.calibration import calibration_loss_sum
from components.training.objectives.correctness import correctness
from components.training.objectives.cross_entropy import cross_entropy_sum, gold_cross_entropy_sum
from components.training.parameter_space import sum_tensors_over_ranks


class LowerLoss(Protocol):
    """A loss on S_T at the space's present point; the same batch and dropout masks until `begin` is called again."""

    feed: Feed
    """S_T."""

    def begin(self, step: int) -> None:
        """Takes up the batch of step number `step`, counted from 0."""
        ...

    def __call__(self) -> Tensor:
        """This rank's share of the loss, see `components.training.parameter_space.Loss`."""
        ...

    def seen(self) -> dict[str, float]:
        """For the trace, what the first evaluation since `begin` saw; equal on every rank (collective)."""
        ...


class AnswerLoss:
    """Mean cross-entropy of the answers' tokens.

    Args:
        logits_at: The model.
        feed: S_T, options `gold`.
        head: Calibration head on top of the model, or None.
    """

    def __init__(self, logits_at: LogitsAt, feed: Feed, head: CalibrationHead | None = None) -> None:
        self.logits_at, self.feed, self.head = logits_at, feed, head

    def begin(self, step: int) -> None:
        """See `LowerLoss`."""
        self._step, self._batch, self._tokens = step, self.feed.share(step), self.feed.global_answer_tokens(step)

    def __call__(self) -> Tensor:
        """See `LowerLoss`."""
        # The same dropout masks at theta and on the way to theta_T: the residual compares weights, not noise.
        seed_dropout(self.feed.seed, self._step, self.feed.rank)
        logits = apply_head(self.head, self.logits_at(self._batch))
        return cross_entropy_sum(logits, self._batch) / self._tokens

    def seen(self) -> dict[str, float]:
        """See `LowerLoss`; the loss itself is all there is."""
        return {}


class Uq4ctLoss:
    """UQ4CT (arXiv 2410.06431): cross-entropy + a * balance + b * (correct - FLC)^2, and the router z-loss if wanted.

    All parts come from one forward pass. Each rank's share of the balance loss needs the experts' counts over all
    ranks, which takes one collective an evaluation.

    Args:
        model: Has routers.
        feed: S_T, with `options_needed`.
        config: The run file's `uq4ct` section.
        head: Calibration head on top of the model, or None. What counts as the model's answer is read under it.

    Raises:
        ValueError: The feed deals out other options than correctness is told from.
    """

    def __init__(
        self, model: ScoringModel, feed: Feed, config: Uq4ctConfig, head: CalibrationHead | None = None
    ) -> None:
        if feed.options != options_needed(config):
            raise ValueError(f"correctness '{config.correctness}' needs options '{options_needed(config)}' in the feed")
        self.model, self.feed, self.config, self.head = model, feed, config, head
        self.load: ExpertLoad | None = None
        self._weights = {"balance_loss": config.balance_weight, "calibration_loss": config.calibration_weight}
        if config.z_loss_weight > 0:
            self._weights["z_loss"] = config.z_loss_weight

    def begin(self, step: int) -> None:
        """See `LowerLoss`."""
        self._step, self._batch, self._tokens = step, self.feed.share(step), self.feed.global_answer_tokens(step)
        self._sight: _Sight | None = None

    def __call__(self) -> Tensor:
        """See `LowerLoss`.

        Raises:
            ValueError: The model has no routers.
        """
        seed_dropout(self.feed.seed, self._step, self.feed.rank)
        batch = self._batch
        logits = apply_head(self.head, self.model(batch))
        routing, flc = self.model.routing, self.model.flc(batch)
        if routing is None or flc is None:
            raise ValueError("UQ4CT's loss needs a model with routers")
        counts = expert_counts(routing)
        sum_tensors_over_ranks([counts])
        correct = correctness(logits, batch, self.config.correctness)
        parts = {
            "cross_entropy": gold_cross_entropy_sum(logits, batch) / self._tokens,
            "balance_loss": balance_share(routing, counts, self.config.balance_over),
            "calibration_loss": calibration_loss_sum(flc, correct) / self.feed.batch_size,
        }
        if "z_loss" in self._weights:
            parts["z_loss"] = z_loss_share(routing, counts)
        if self._sight is None:
            self._sight = _Sight(parts, flc, correct, routing, counts)
        loss = parts["cross_entropy"]
        for name, weight in self._weights.items():
            loss = loss + weight * parts[name]
        return loss

    def seen(self) -> dict[str, float]:
        """See `LowerLoss`. `load` then holds what the experts received."""
        assert self._sight is not None
        values, self.load = self._sight.over_ranks(self.feed.batch_size)
        return values


def options_needed(config: Uq4ctConfig) -> Literal["gold", "all"]:
    """The options that a feed must deal out for the kind of correctness that the run asks for."""
    return "all" if config.correctness == "options" else "gold"


class _Sight:
    """One evaluation as this rank saw it; without a graph.

    Args:
        parts: This rank's shares of the parts of the loss.
        flc: [R].
        correct: [R].
        routing: This rank's tokens.
        counts: Over all ranks, [L, k, N].
    """

    @torch.no_grad()
    def __init__(
        self, parts: dict[str, Tensor], flc: Tensor, correct: Tensor, routing: Routing, counts: Tensor
    ) -> None:
        flc, correct = flc.detach().double(), correct.double()
        sums = parts | {"flc": flc.sum(), "flc_squared": flc.square().sum(), "correct": correct.sum()}
        entropy = [-(r.probs * r.logits.log_softmax(dim=-1)).sum() for r in routing.records]
        self.names, self.parts, self.counts = tuple(sums), tuple(parts), counts
        self.sums = torch.stack([value.detach().double() for value in (*sums.values(), *entropy)])

    def over_ranks(self, rows: int) -> tuple[dict[str, float], ExpertLoad]:
        """Trace values and expert load of the global batch of `rows` rows."""
        sums = self.sums.clone()
        sum_tensors_over_ranks([sums])
        of = dict(zip(self.names, sums.tolist(), strict=False))
        tokens = token_count(self.counts)
        load = ExpertLoad(
            share=(self.counts.sum(dim=1) / self.counts.sum(dim=(1, 2))[:, None]).tolist(),
            first_share=(self.counts[:, 0].max(dim=-1).values / tokens).tolist(),
            entropy=(sums[len(self.names) :] / tokens).tolist(),
        )
        mean = of["flc"] / rows
        values = {name: of[name] for name in self.parts} | {
            "flc_mean": mean,
            "flc_std": max(of["flc_squared"] / rows - mean**2, 0.0) ** 0.5,
            "correct_share": of["correct"] / rows,
            "router_entropy": sum(load.entropy) / len(load.entropy),
            "max_expert_share": max(load.first_share),
        }
        return values, load
