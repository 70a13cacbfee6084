"""The calibration head of this folder, for transformers. This file needs torch, safetensors and transformers alone.

    from calibrated_logits import CalibratedLogits

    model.generate(**inputs, logits_processor=[CalibratedLogits.from_pretrained("path/to/this/folder")])

The calibrated logits of token y are z_y / tau_y + l_y, with z the model's own. Decode greedily or by sampling; for
probabilities of given text, `CalibratedLogits.adjust` takes logits of any shape [..., vocabulary].
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LogitsProcessor

HEAD_FILE = "calibration_head.safetensors"
LOG_PROBABILITIES = 1e-3
"""Scores whose logsumexp is within this of 0 in every row are log-probabilities; logits are not so by chance."""


class Alpha:
    """Offsets and temperatures, one for each token or one for all.

    Args:
        folder: Holds `calibration_head.safetensors`.

    Attributes:
        offset: l, float32 [V] or [1].
        inverse_temperature: 1 / tau, float32 [V] or [1].
    """

    def __init__(self, folder: str | Path) -> None:
        tensors = load_file(str(Path(folder) / HEAD_FILE))
        self.offset = tensors["l"]
        self.inverse_temperature = torch.exp(-(tensors["rho"] + tensors["shared"]))

    def adjust(self, logits: Tensor) -> Tensor:
        """Calibrated logits.

        Args:
            logits: [..., V], the model's own, on any device.

        Returns:
            float32 [..., V].

        Raises:
            ValueError: They are of another width than the head.
        """
        width = self.offset.numel()
        if width > 1 and logits.shape[-1] != width:
            raise ValueError(f"the logits have {logits.shape[-1]} columns, the calibration head {width}")
        if self.offset.device != logits.device:
            self.offset = self.offset.to(logits.device)
            self.inverse_temperature = self.inverse_temperature.to(logits.device)
        return torch.addcmul(self.offset, logits.float(), self.inverse_temperature)


class CalibratedLogits(LogitsProcessor):
    """Puts the calibrated distribution in the place of the model's own, at every generated token.

    A temperature, top-k or top-p of sampling acts on the calibrated distribution. What changes logits before (a
    repetition penalty) makes them another's than those the head was trained on: leave such settings out.

    Args:
        alpha: Offsets and temperatures.
    """

    def __init__(self, alpha: Alpha) -> None:
        self.alpha = alpha

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> CalibratedLogits:
        """Reads the head of a folder on this machine."""
        return cls(Alpha(folder))

    def adjust(self, logits: Tensor) -> Tensor:
        """Calibrated logits, float32 [..., V], of the model's own [..., V]."""
        return self.alpha.adjust(logits)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Calibrated scores of the next token.

        Args:
            input_ids: int64 [R, T], what was generated so far.
            scores: [R, V], the model's logits.

        Raises:
            ValueError: The scores are log-probabilities, as beam search hands over. With a temperature for each token,
                the constant that normalised them would be divided by another number in each column.
        """
        if (scores.float().logsumexp(dim=-1).abs() < LOG_PROBABILITIES).all():
            raise ValueError(
                "the calibration head needs the model's logits but was given log-probabilities, as beam search does; "
                "use greedy decoding or sampling"
            )
        return self.adjust(scores)
