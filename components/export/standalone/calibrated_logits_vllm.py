"""The calibration head of this folder, for vLLM. `calibrated_logits.py` has to lie beside this file.

    PYTHONPATH=path/to/this/folder vllm serve path/to/this/folder \
        --logits-processors calibrated_logits_vllm:CalibratedLogits --logprobs-mode processed_logprobs

vLLM reports log-probabilities from before any logits processor unless it is told `processed_logprobs`. Those are taken
after temperature, top-k and top-p too, so ask for them at temperature 1 or 0 without top-k and top-p, and without
penalties, which come before the head. Log-probabilities of the prompt (`prompt_logprobs`, `echo`) go through no logits
processor: they are never calibrated.

vLLM has two interfaces, that of the V1 model runner and, since 0.32, that of the V2 model runner. The class here is of
both, whichever are installed, since all it does is the same for every row.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from calibrated_logits import Alpha
from torch import Tensor

INTERFACES = ("vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor.interface")


def _installed_bases() -> tuple[type, ...]:
    """The `LogitsProcessor` of each interface that this vLLM has."""
    found = []
    for name in INTERFACES:
        try:
            found.append(importlib.import_module(name).LogitsProcessor)
        except (ImportError, AttributeError):
            continue
    if not found:
        raise ImportError(f"this vLLM has neither interface for logits processors: {' nor '.join(INTERFACES)}")
    return tuple(found)


class CalibratedLogits(*_installed_bases()):  # type: ignore[misc]
    """Puts the calibrated distribution in the place of the model's own, in every row of vLLM's batch.

    Args:
        vllm_config: vLLM's configuration; not used, the head lies beside this file.
        state_or_device: The request state (V2) or the device (V1); not used, the head follows the logits.
        is_pin_memory: Given by V1 alone; not used.
    """

    def __init__(self, vllm_config: Any, state_or_device: Any, is_pin_memory: bool = False) -> None:
        self.alpha = Alpha(Path(__file__).parent)

    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        """Calibrated logits, float32 [R, V]; a token that vLLM has ruled out (-inf) stays so.

        Args:
            logits: float32 [R, V].
            context: The batch's layout, given by V2 alone; every row is treated alike.
        """
        return self.alpha.adjust(logits)

    def is_argmax_invariant(self) -> bool:
        """False: offsets and temperatures of single tokens change which one is the most probable (V1)."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept of any request (V1)."""
