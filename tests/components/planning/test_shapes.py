"""Sizes told from `config.json` alone, against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.config import ModelConfig, RunConfig
from components.errors import ModelError
from components.models.base import ResolvedModel, resolve_model
from components.planning.dry_run import DryRun
from components.planning.shapes import build, layers_alike
from components.training.methods import METHODS

LLAMA_8B = Path(__file__).parent / "llama-3.1-8b"


def test_llama_8b_has_the_published_number_of_weights(tree: Callable[..., dict[str, Any]]) -> None:
    """8,030,261,248 weights; rank 8 on all seven projections of 32 layers adds 20,971,520.

    A layer's adapters: r * (in + out) over q (4096 + 4096), k and v (4096 + 1024 each), o (4096 + 4096), gate and up
    (4096 + 14336 each), down (14336 + 4096) = 8 * 81,920 = 655,360; times 32.
    """
    content = tree("calm", dtype="bfloat16")
    content["model"] |= {"name": str(LLAMA_8B), "adapter": {"r": 8}}
    config = RunConfig.model_validate(content)
    sizes = build(resolve_model(config.model), config, METHODS["calm"]).sizes
    assert (sizes.frozen_count, sizes.theta_count) == (8_030_261_248, 20_971_520)
    assert sizes.frozen == 2 * sizes.frozen_count
    assert sizes.alpha_count == 2 * 128_256 + 1
    assert sizes.gathered_count == sizes.frozen_count + sizes.theta_count - 128_256 * 4096
    assert sizes.layers == 32


def test_an_adapter_of_experts_counts_its_routers(
    tree: Callable[..., dict[str, Any]], dry_run: Callable[..., DryRun]
) -> None:
    """Eight experts on a width of 256: 2048 weights in each of 4 routers."""
    sizes = dry_run(tree("uq4ct")).sizes
    assert sizes.router_count == 4 * 8 * 256
    assert sizes.alpha_count == 0


def test_with_every_weight_trained_none_is_frozen(
    tree: Callable[..., dict[str, Any]], dry_run: Callable[..., DryRun]
) -> None:
    sizes = dry_run(tree("sft", kind="full", dtype="bfloat16")).sizes
    assert sizes.frozen == sizes.frozen_count == 0
    assert sizes.theta == 4 * sizes.theta_count  # float32 whatever the run file says of frozen weights


def test_tied_weights_count_once(small_llama: Path, tmp_path: Path, tree: Callable[..., dict[str, Any]]) -> None:
    described = json.loads((small_llama / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = RunConfig.model_validate(tree("sft") | {"model": {"name": str(tmp_path), "adapter": {"r": 32}}})
    tied = build(resolve_model(config.model), config, METHODS["sft"]).sizes
    apart = RunConfig.model_validate(tree("sft"))
    both = build(resolve_model(apart.model), apart, METHODS["sft"]).sizes
    assert both.frozen_count - tied.frozen_count == 8192 * 256
    assert tied.gathered_count == tied.frozen_count + tied.theta_count  # the output layer needs the embedding


def test_layers_of_a_llama_are_alike(small_llama: Path) -> None:
    config = ModelConfig(name=str(small_llama))
    assert layers_alike(resolve_model(config), config)


def test_a_config_that_describes_no_model_is_refused(tmp_path: Path, tree: Callable[..., dict[str, Any]]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4})
    )
    config = RunConfig.model_validate(tree("sft") | {"model": {"name": str(tmp_path)}})
    with pytest.raises(ModelError, match="cannot be laid out"):
        build(ResolvedModel(str(tmp_path), None, "local folder", "x"), config, METHODS["sft"])
