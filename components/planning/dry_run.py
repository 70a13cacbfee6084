"""A method's losses run forward and backward on the meta device: what one GPU's share of a batch takes.

The model, the head and the losses are those of training; only values are missing. Decoder layers being alike, two short
models tell what one layer adds, and the rest is a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from components.config import MixLoraConfig, RunConfig
from components.data.prompts import EncodedQuestion
from components.errors import UsageError
from components.models.adapter import trainable_parameters
from components.models.base import ResolvedModel
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel
from components.planning.shapes import MetaModel, build, layers_alike
from components.planning.tally import NOTHING, Tally, Usage
from components.training.baseline_losses import CftLoss
from components.training.build import make_lower
from components.training.feed import Feed
from components.training.lower_losses import LowerLoss
from components.training.methods import Method
from components.training.objectives.cft import BINS, BinAccuracy
from components.training.recompute import recompute_activations
from components.training.upper_loss import UpperLoss

SHORT, LONGER = 2, 3
"""Decoder layers of the two short models. The first layer is unlike the others: nothing before it is trained, so it
keeps less; from the second on each adds the same."""


@dataclass(frozen=True)
class Rows:
    """What the rows of a batch look like; the longest that the run file allows, where nothing else is said.

    Attributes:
        tokens: Of a row with all its options.
        answer_tokens: Of an option.
        options: Of a question.
    """

    tokens: int
    answer_tokens: int
    options: int

    def __post_init__(self) -> None:
        """Checks that a prompt is left."""
        if min(self.tokens, self.answer_tokens, self.options) < 1 or self.prompt_tokens < 1:
            raise UsageError(
                f"a row of {self.tokens} tokens does not hold a prompt and {self.options} options of "
                f"{self.answer_tokens} tokens each"
            )

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt, which the row holds once, followed by every option but its last token."""
        return self.tokens - self.options * (self.answer_tokens - 1)

    def questions(self, count: int) -> list[EncodedQuestion]:
        """Questions of this shape."""
        option = (0,) * self.answer_tokens
        return [EncodedQuestion(str(i), (0,) * self.prompt_tokens, (option,) * self.options, 0) for i in range(count)]


@dataclass(frozen=True)
class LossUsage:
    """What a rank's share of each loss takes.

    Attributes:
        lower: Value and gradient of what the weights minimise.
        lower_forward: Its value and its gradient by the head alone, which runs the model forward only (bilevel).
        upper: Value and gradient of the entropy that trains the head, if there is one.
    """

    lower: Usage
    lower_forward: Usage = NOTHING
    upper: Usage = NOTHING


class DryRun:
    """Runs a method's losses for any number of rows a GPU; each is run once.

    Args:
        resolved: From `resolve_model`.
        config: The run.
        method: One that trains.
        rows: Shape of the rows.
    """

    def __init__(self, resolved: ResolvedModel, config: RunConfig, method: Method, rows: Rows) -> None:
        self.config, self.method, self.rows = config, method, rows
        self.sizes = build(resolved, config, method).sizes
        alike = self.sizes.layers > LONGER and layers_alike(resolved, config.model)
        self._lengths = (SHORT, LONGER) if alike else (self.sizes.layers,)
        self._build: Callable[[int], MetaModel] = lambda layers: build(resolved, config, method, layers)
        self._models: dict[tuple[int, bool], MetaModel] = {}
        self._known: dict[tuple[int, bool], LossUsage] = {}

    def usage(self, rows: int, checkpointing: bool) -> LossUsage:
        """What the losses take on one GPU.

        Args:
            rows: Rows that this GPU sees.
            checkpointing: Whether layers compute their activations again in the backward pass.
        """
        key = rows, checkpointing
        if key not in self._known:
            runs = [self._run(layers, rows, checkpointing) for layers in self._lengths]
            self._known[key] = runs[0] if len(runs) == 1 else _extrapolate(runs[0], runs[1], self.sizes.layers)
        return self._known[key]

    def _run(self, layers: int, rows: int, checkpointing: bool) -> LossUsage:
        meta = self._model(layers, checkpointing)
        spec = self.method.adapter_spec(self.config)
        module = ScoringModel(meta.model, spec.flc_over if isinstance(spec, MixLoraConfig) else "prompt").train()
        lower = self._lower(module, meta, rows)
        with _without_autocast():
            both = self._gradient(module, meta, lower)
            if meta.head is None:
                return LossUsage(both)
            upper = self._gradient(module, meta, self._upper(module, meta.head, rows))
            forward = self._gradient(module, meta, lower, wrt=("alpha",)) if self.method.bilevel else NOTHING
            return LossUsage(both, forward, upper)

    def _model(self, layers: int, checkpointing: bool) -> MetaModel:
        key = layers, checkpointing
        if key not in self._models:
            meta = self._build(layers)
            if checkpointing:
                recompute_activations(meta.model)
            self._models[key] = meta
        return self._models[key]

    def _feed(self, rows: int, options: Literal["gold", "all"]) -> Feed:
        return Feed(self.rows.questions(rows), rows, options, self.config.seed, pad_id=0, device="meta")

    def _lower(self, module: ScoringModel, meta: MetaModel, rows: int) -> LowerLoss:
        loss = make_lower(self.method, self.config, module, meta.head, lambda split, options: self._feed(rows, options))
        if isinstance(loss, CftLoss):
            loss.bins = BinAccuracy((0,) * BINS, (1,) * BINS)
        loss.begin(0)
        return loss

    def _upper(self, module: ScoringModel, head: CalibrationHead, rows: int) -> UpperLoss:
        loss = UpperLoss(module, head, self._feed(rows, "all"), self.config.calm.entropy_over)
        loss.begin(0)
        return loss

    def _gradient(
        self,
        module: ScoringModel,
        meta: MetaModel,
        loss: Callable[[], Tensor],
        wrt: Collection[str] = ("alpha", "theta"),
    ) -> Usage:
        """As `ParameterSpace.gradient` takes it."""
        theta = list(trainable_parameters(module).values())
        alpha = [p for p in meta.head.parameters() if p.requires_grad] if meta.head is not None else []
        wanted = (alpha if "alpha" in wrt else []) + (theta if "theta" in wrt else [])
        existing = [*module.parameters(), *module.buffers(), *(meta.head.parameters() if meta.head else ())]
        frozen = [] if "theta" in wrt else theta
        for p in frozen:
            p.requires_grad_(False)
        tally = Tally(existing, meta.sizes.vocabulary)
        handles = [p.register_hook(lambda gradient: tally.mark_gradient(gradient)) for p in wanted]
        try:
            with tally:
                torch.autograd.grad(loss(), wanted, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            for p in frozen:
                p.requires_grad_(True)
        return tally.usage()


def _extrapolate(short: LossUsage, longer: LossUsage, layers: int) -> LossUsage:
    def whole(a: Usage, b: Usage) -> Usage:
        return b.plus(b.plus(a, -1.0), (layers - LONGER) / (LONGER - SHORT))

    return replace(
        longer,
        lower=whole(short.lower, longer.lower),
        lower_forward=whole(short.lower_forward, longer.lower_forward),
        upper=whole(short.upper, longer.upper),
    )


class _NoAutocast:
    """Stands in for `torch.autocast`, which does not know the meta device; the models only ever switch it off."""

    def __init__(self, *_: object, enabled: bool = False) -> None:
        if enabled:
            raise ValueError("autocast cannot be planned for")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def _without_autocast() -> Iterator[None]:
    original = torch.autocast
    torch.autocast = _NoAutocast  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = original  # type: ignore[misc]
