"""Adapter folders on the tiny model, moved away from their start at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from components.config import AdapterConfig, AdapterSpec, MixLoraConfig, ModelConfig
from components.config_data import PromptConfig
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.base import load_model, resolve_model
from components.models.calibration_head import CalibrationHead

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROMPT = PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" ")
LORA, MIXLORA = AdapterConfig(r=4, alpha=8), MixLoraConfig(r=2, alpha=4, num_experts=4)


@pytest.fixture
def random_head() -> Callable[..., CalibrationHead]:
    """A head away from the identity."""

    def make(form: str = "vocabulary", size: int = 320) -> CalibrationHead:
        head = CalibrationHead(size, form)
        with torch.no_grad():
            head.shared.fill_(0.3)
            if form == "vocabulary":
                head.l.normal_(std=0.5)
                head.rho.normal_(std=0.3)
        return head

    return make


@pytest.fixture
def make_adapter(tiny_model_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    """Writes an adapter folder, by default LoRA on the tiny model in `tmp_path / "calm" / "adapter"`."""

    def make(
        *,
        method: str = "calm",
        head: CalibrationHead | None = None,
        spec: AdapterSpec = LORA,
        model_folder: Path = tiny_model_folder,
    ) -> Path:
        config = ModelConfig(name=str(model_folder), adapter=LORA, mixlora=MIXLORA)
        resolved = resolve_model(config)
        model = attach_adapter(load_model(resolved, config), spec, seed=0)
        with torch.no_grad():
            for value in trainable_parameters(model).values():
                value.add_(0.1 * torch.randn_like(value))
        return save_adapter(
            tmp_path / method / "adapter",
            model=model,
            state=adapter_state(model),
            head=head,
            tokenizer=tiny_tokenizer,
            config=config,
            adapter=spec,
            resolved=resolved,
            record=AdapterRecord(method, 3, PROMPT, balance_weight=0.01),
        )

    return make
