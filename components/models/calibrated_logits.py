"""CALM's alpha at every generated token: a transformers `LogitsProcessor` for greedy, sampled and beam decoding.

Alpha acts on logits, and it matters that it does: with a temperature per token, z_y / tau_y + l_y of logits that were
normalised first is another distribution, since the constant taken off is divided by another tau in each column. Greedy
decoding and sampling hand logits to a processor, but beam search hands it log-probabilities. So the processor takes the
logits from the model itself, by a hook, and gives back what the caller works with: logits, or log-probabilities that
add up to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from components.errors import ModelError
from components.models.calibration_head import CalibrationHead
from components.models.scoring import apply_head


class CalibratedLogits(LogitsProcessor):
    """Puts the calibrated distribution in the place of the model's own.

    Args:
        head: The calibration head; None leaves the model's distribution as it is.

    Attributes:
        raw: The model's logits for the next token of each row, float32 [R, V], kept by `calibrated_logits`.
    """

    def __init__(self, head: CalibrationHead | None) -> None:
        self.head = head
        self.raw: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Adjusted scores of the next token.

        Args:
            input_ids: int64 [R, T], what was generated so far.
            scores: float32 [R, V], logits or log-probabilities of the model's last forward pass.

        Returns:
            float32 [R, V]: adjusted logits z / tau + l, or their log-softmax where `scores` are log-probabilities.

        Raises:
            ModelError: The scores are not those of the model, because another processor came before or decoding is of
                a kind that looks at several positions at once.
        """
        if self.head is None:
            return scores
        raw = self.raw
        if raw is not None and raw.shape == scores.shape:
            if torch.equal(scores, raw):
                return apply_head(self.head, raw)
            if torch.equal(scores, raw.log_softmax(dim=-1)):
                return apply_head(self.head, raw).log_softmax(dim=-1)
        raise ModelError(
            "the calibration head needs the model's own scores for the next token, but something has changed them "
            "before: take repetition_penalty, min_length and the like out of the generation settings (the model's "
            "generation_config.json may set them), and use greedy decoding, sampling or beam search"
        )


@contextmanager
def calibrated_logits(model: nn.Module, head: CalibrationHead | None) -> Iterator[LogitsProcessorList]:
    """Generation under the calibrated distribution.

        with calibrated_logits(model, head) as processors:
            model.generate(**inputs, logits_processor=processors)

    A temperature, top-k or top-p of sampling acts on the calibrated distribution.

    Args:
        model: A `transformers` causal language model, with or without an adapter.
        head: Its calibration head, on the model's device; None for generation as it is.

    Yields:
        The processors to generate with, until the end of the block.
    """
    processor = CalibratedLogits(head)
    causal_lm: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def keep(_module: nn.Module, _arguments: Any, output: Any) -> None:
        processor.raw = output.logits[:, -1].float()

    handle = causal_lm.register_forward_hook(keep)
    try:
        yield LogitsProcessorList([processor])
    finally:
        handle.remove()
        processor.raw = None
