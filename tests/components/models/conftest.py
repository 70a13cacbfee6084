"""A base model to put adapters on, a stand-in for training, and adapter folders to damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from components.config import AdapterConfig, AdapterSpec, ModelConfig
from components.config_data import PromptConfig
from components.models.base import load_model, resolve_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from components.models.calibration_head import CalibrationHead


@pytest.fixture
def base_config(tiny_model_folder: Path) -> ModelConfig:
    """The tiny model with a small LoRA."""
    return ModelConfig(name=str(tiny_model_folder), adapter=AdapterConfig(r=4, alpha=8))


@pytest.fixture
def base(base_config: ModelConfig) -> Callable[[], LlamaForCausalLM]:
    """Loads the tiny model anew, since adapters change a model in place."""
    return lambda: load_model(resolve_model(base_config), base_config)


@pytest.fixture(scope="session")
def trained() -> Callable[..., nn.Module]:
    """Stands for training: moves every trained weight at random."""
    from components.models.adapter import trainable_parameters

    def move(model: nn.Module, scale: float = 0.1) -> nn.Module:
        with torch.no_grad():
            for value in trainable_parameters(model).values():
                value.add_(scale * torch.randn_like(value))
        return model

    return move


@pytest.fixture
def save(base_config: ModelConfig, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., Path]:
    """Saves a model's adapter, by default `base_config.adapter` with its own values, into `tmp_path / "adapter"`."""
    from components.models.adapter import adapter_state
    from components.models.adapter_files import AdapterRecord, save_adapter

    def run(
        model: nn.Module,
        *,
        adapter: AdapterSpec = base_config.adapter,
        state: dict[str, Tensor] | None = None,
        head: CalibrationHead | None = None,
        folder: Path = tmp_path / "adapter",
        steps: int = 3,
    ) -> Path:
        results = "| split | ECE |\n| --- | --- |\n| id | .05 |"
        return save_adapter(
            folder,
            model=model,
            state=adapter_state(model) if state is None else state,
            head=head,
            tokenizer=tiny_tokenizer,
            config=base_config,
            adapter=adapter,
            resolved=resolve_model(base_config),
            record=AdapterRecord("calm", steps, PromptConfig(), {"seed": 7}, results, balance_weight=0.01),
        )

    return run


@pytest.fixture(scope="session")
def rewrite() -> Callable[[Path, Callable[[dict[str, Tensor]], object]], None]:
    """Changes the tensors of an adapter folder and makes its checksums agree again."""
    from safetensors.torch import load_file, save_file

    from components.models.smollm2 import sha256_of

    def run(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})
        record = json.loads((folder / "caltune.json").read_text(encoding="utf-8"))
        record["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        (folder / "caltune.json").write_text(json.dumps(record), encoding="utf-8")

    return run
