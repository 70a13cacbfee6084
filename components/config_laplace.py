"""The run file's section `laplace`: Laplace-LoRA (Yang et al. 2024, arXiv 2308.13111)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.config_base import Positive, Strict


class LaplaceConfig(Strict):
    """Fine-tuning by cross-entropy with weight decay, then a Gaussian posterior of the LoRA weights around it."""

    weight_decay: Annotated[float, Field(ge=0)] = 1e-5
    """Of AdamW while `laplace` trains, in place of `training.weight_decay` (1e-5: found, for training to a mode of the
    posterior)."""
    rank: int = Field(10, ge=1)
    """Directions kept of a Kronecker factor on the model's side of a LoRA matrix (10: found)."""
    prior_variance: Positive | None = None
    """Of each weight. Null takes the one with the highest evidence (found)."""
    samples: int = Field(100_000, ge=100)
    """Draws of a question's option scores, the softmax averaged over them (100 000: found). A probability's standard
    error is at most 0.5 / sqrt(samples), 0.0016 at 100 000."""
