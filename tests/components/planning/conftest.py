"""Small Llamas that have a `config.json` only, run files on it, and real steps of them that say what they allocate."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from components.config import RunConfig
from components.models.base import resolve_model
from components.planning.dry_run import DryRun, Rows
from components.training.methods import METHODS

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
ROWS = Rows(tokens=148, answer_tokens=8, options=4)


def write_llama(folder: Path, *, hidden: int, layers: int, vocabulary: int) -> Path:
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7.3 million weights, which ZeRO-3 gathers all at once."""
    return write_llama(tmp_path_factory.mktemp("small-llama"), hidden=256, layers=4, vocabulary=8192)


@pytest.fixture(scope="session")
def larger_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """55 million weights, more than ZeRO-3 gathers at once."""
    return write_llama(tmp_path_factory.mktemp("larger-llama"), hidden=512, layers=12, vocabulary=16384)


@pytest.fixture(scope="session")
def tree(small_llama: Path, larger_llama: Path) -> Callable[..., dict[str, Any]]:
    """Content of a run file on one of the two."""

    def build(
        method: str,
        stage: int | None = None,
        *,
        inner_steps: int = 1,
        checkpointing: bool = False,
        dtype: str = "float32",
        kind: str = "lora",
        workers: int = 2,
        larger: bool = False,
    ) -> dict[str, Any]:
        return {
            "run": "small",
            "methods": [method],
            "model": {
                "name": str(larger_llama if larger else small_llama),
                "dtype": dtype,
                "adapter": {"kind": kind, "r": 32},
            },
            "data": {"source": {"kind": "facts", "domain": "geography"}, "max_length": ROWS.tokens},
            "training": {"batch_size": 8, "gradient_checkpointing": checkpointing},
            "calm": {"inner_steps": inner_steps},
            "resources": {"workers": workers, "deepspeed": None if stage is None else {"stage": stage}},
        }

    return build


@pytest.fixture(scope="session")
def dry_run() -> Callable[[dict[str, Any]], DryRun]:
    """The dry run of the one method of a run file."""

    def make(content: dict[str, Any], rows: Rows = ROWS) -> DryRun:
        config = RunConfig.model_validate(content)
        return DryRun(resolve_model(config.model), config, METHODS[config.methods[0]], rows)

    return make


@pytest.fixture(scope="session")
def script() -> ModuleType:
    """`step_on_ranks.py` as a module, for its `Job`."""
    spec = importlib.util.spec_from_file_location("step_on_ranks", HERE / "step_on_ranks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def allocated(
    tmp_path_factory: pytest.TempPathFactory, script: ModuleType, run_ranks: Callable[[Path, Sequence[str], int], None]
) -> Callable[..., dict[str, int]]:
    """Bytes that real steps of named run files allocate at most, one process for each of a number of ranks."""

    def measure(contents: dict[str, dict[str, Any]], world: int, **limits: int) -> dict[str, int]:
        folder = tmp_path_factory.mktemp("steps")
        shape = dataclasses.asdict(ROWS)
        jobs = [
            script.Job(name, content, content["methods"][0], **shape, limits=limits)
            for name, content in contents.items()
        ]
        (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
        run_ranks(folder, [str(HERE / "step_on_ranks.py"), str(folder)], world)
        return json.loads((folder / "peaks.json").read_text())

    return measure
