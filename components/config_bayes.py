"""The run file's sections of the methods that answer by several passes: `mc_dropout`, `ensemble`, `blob`.

Validation during training looks at one plain pass (dropout off, the posterior's mean, one member), so traces show that
pass; what is reported of a method on any split is its mean over the passes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.config_base import Fraction, Positive, Strict


class McDropoutConfig(Strict):
    """MC dropout (Gal and Ghahramani 2016) on LoRA's inputs."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """p, in training and in every pass of the evaluation, instead of `model.adapter.dropout` (0.1: found)."""
    samples: int = Field(10, ge=1)
    """Passes with dropout on, whose option probabilities are averaged (10: found). The noise is a function of `seed`,
    the pass and the batch, and with that of `evaluation.batch_tokens`."""


class EnsembleConfig(Strict):
    """Deep ensemble (Lakshminarayanan et al. 2017) of adapters on one base model.

    Members have their own initial weights and their own optimiser and see the same batches; the first is `sft`.
    """

    members: int = Field(8, ge=2)
    """M (8: found, what UQ4CT compares with; the public code of BLoB's authors takes 3)."""
    combine: Literal["probabilities", "logits"] = "probabilities"
    """Mean of the members' option probabilities, the usual definition, or softmax of their mean logits, as the public
    code does (both found; the default is ours)."""


class BlobConfig(Strict):
    """BLoB (Wang et al. 2024): LoRA whose A is Gaussian, A = M + G^2 * noise, trained by variational inference."""

    prior_std: Positive = 0.2
    """Standard deviation of the prior of every entry of A, with mean 0 (0.2: found)."""
    init_scale: Positive = 0.05
    """eps0; G starts uniform in [eps0 / sqrt 2, eps0] (0.05: found)."""
    kl_learning_rate: Positive = 0.01
    """Peak rate of the plain gradient steps on the KL divergence; it rises and falls as the adapter's does (0.01:
    found)."""
    kl_gamma: Positive | None = 8.0
    """The KL's weights are dealt out over cycles of M = int(100 n^(pi / gamma) / batch_size) steps, n the questions to
    train on; null takes the steps of an epoch (8 and pi: found)."""
    samples: int = Field(10, ge=0)
    """Draws of A in evaluation, whose option probabilities are averaged (10: found); 0 takes the posterior's mean. The
    draws are functions of `seed`, the pass and the batch, and with that of `evaluation.batch_tokens`."""


class BlobAdapterConfig(Strict):
    """What `blob` trains, put together from `model.adapter` and `blob`; not a section of the run file."""

    kind: Literal["blob"] = "blob"
    """Tells this adapter from the others in saved files."""
    r: int = Field(ge=1)
    """Rank."""
    alpha: Positive
    """LoRA scale numerator; the update is multiplied by alpha / r."""
    dropout: Fraction
    """Dropout on the adapter's input during training."""
    target_modules: str | list[str]
    """Module names that receive an adapter, a regular expression for whole names, or `all-linear`."""
    init_scale: Positive
    """As in `blob`."""
    prior_std: Positive
    """As in `blob`."""
