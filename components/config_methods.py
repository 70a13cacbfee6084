"""The run file's sections of the methods: `calm` with its stop rule, and `uq4ct`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.config_base import Fraction, Positive, Strict


class StopConfig(Strict):
    """When CALM ends and which step is kept.

    The paper's rule is unknown; going on too long overshoots into under-confidence.
    """

    rule: Literal["budget", "match", "keep_best"] = "keep_best"
    """`budget`: all steps, last one kept. `match`: end at the evaluation where mean confidence on labelled validation
    data first meets accuracy. `keep_best`: all steps, the one with the best `metric` kept."""
    metric: Literal["nll", "ece"] = "nll"
    """For `keep_best`."""
    split: Literal["validation", "validation_shift", "both"] = "validation"
    """Labelled data that decides; `validation_shift` needs `data.heldout_groups`."""


class CalmConfig(Strict):
    """CALM: bilevel training of weights (lower level) and calibration head (upper level).

    Its ablations `regularization`, `iterate` and `learned_ts` read the same keys, as far as they have a use for them.
    """

    inner_steps: int = Field(5, ge=1)
    """T, gradient steps towards the lower level's surrogate solution (5: inferred from the reported cost)."""
    eta: Positive = 0.5
    """Strength of the descent condition on the residual (0.5: found, BOME's own default)."""
    phi: Literal["grad_norm", "residual"] = "grad_norm"
    """phi = eta * ||grad q||^2 or eta * q (both found in BOME's code)."""
    inner_learning_rate: Positive = 5e-3
    """Step size of the plain-gradient inner steps (unknown; ten times the adapter's rate)."""
    alpha_learning_rate: Positive = 3e-3
    """AdamW rate of the calibration head (unknown)."""
    entropy_over: Literal["options", "vocabulary"] = "options"
    """Support of the upper level's entropy. Over the vocabulary it rises through tokens that never compete."""
    head: Literal["vocabulary", "scalar"] = "vocabulary"
    """One offset and temperature per token, or one of each for all (the paper's scalar ablation, which `learned_ts`
    always takes)."""
    max_temperature: Annotated[float, Field(gt=1)] = 8.0
    """tau is clamped to [1 / max, max] (ours)."""
    stop: StopConfig = StopConfig()


class Uq4ctConfig(Strict):
    """UQ4CT: cross-entropy + balance + calibration loss on a mixture of LoRA experts (arXiv 2410.06431)."""

    balance_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the load-balance loss (0.01: MixLoRA's example)."""
    balance_over: Literal["layer", "pooled"] = "layer"
    """Balance each router by itself, or all routers' tokens in one pool as MoE-PEFT does: there the imbalances of
    different layers cancel."""
    z_loss_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the router z-loss, mean of logsumexp(logits)^2 (0: top-k MixLoRA has none)."""
    calibration_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of (correct - FLC)^2 (unknown)."""
    correctness: Literal["options", "exact_match", "token_f1"] = "options"
    """What counts as correct in training: `options`, the right option scores highest, as in evaluation; by letter this
    costs nothing, by text the other options ride along in each row. `exact_match`, `token_f1`: the answer's tokens
    decoded greedily under teacher forcing, compared with the right answer's."""
    router_learning_rate: Positive = 1e-2
    """Peak rate of the routers (ours: at the adapter's rate their confidence hardly leaves k / N in short runs)."""
    router_warmup_fraction: Fraction | None = None
    """Warm-up of the routers' rate; null takes `training.warmup_fraction`."""
    collapse_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Alarm when one expert is the first choice of more than this share of a router's tokens."""
