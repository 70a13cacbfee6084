"""Adapter folders on the tiny model, moved away from their start at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from components.config import AdapterConfig, AdapterSpec, MixLoraConfig, ModelConfig

if TYPE_CHECKING:
    from components.models.calibration_head import CalibrationHead

LORA, MIXLORA = AdapterConfig(r=4, alpha=8), MixLoraConfig(r=2, alpha=4, num_experts=4)


@pytest.fixture
def make_adapter(tiny_model_folder: Path, write_adapter: Callable[..., Path], tmp_path: Path):
    """Writes an adapter folder, by default LoRA on the tiny model in `tmp_path / "calm" / "adapter"`."""

    def make(
        *,
        method: str = "calm",
        head: CalibrationHead | None = None,
        spec: AdapterSpec = LORA,
        model_folder: Path = tiny_model_folder,
    ) -> Path:
        config = ModelConfig(name=str(model_folder), adapter=LORA, mixlora=MIXLORA)
        return write_adapter(
            tmp_path / method / "adapter", config, spec, method, scale=0.1, head=None if head is None else lambda: head
        )

    return make
