"""Training on the tiny model in this process, and CALM jobs on one or more ranks (`calm_on_ranks.py`)."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from components.config import AdapterConfig, MixLoraConfig, RunConfig
from components.config_methods import CalmConfig, Uq4ctConfig
from components.data.prompts import EncodedQuestion
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel
from components.training.baseline_losses import CftLoss
from components.training.build import make_head, make_lower, make_step
from components.training.feed import Feed
from components.training.methods import METHODS
from components.training.objectives.cft import BinAccuracy
from components.training.parameter_space import ParameterSpace, TorchSpace, block_groups
from components.training.steps import TrainingStep

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
TREE = {"run": "tiny", "data": {"source": {"kind": "facts", "domain": "geography"}}}
BINS = BinAccuracy((0, 0, 2, 1, 1, 1, 1, 1, 2, 4), (0, 0, 4, 3, 4, 3, 2, 2, 2, 4))
"""What an E-step on 24 questions may have found."""


@pytest.fixture(scope="session")
def calm_on_ranks() -> ModuleType:
    """The script as a module, for its plain runs and its `Job`."""
    return script("calm_on_ranks")


@pytest.fixture(scope="session")
def uq4ct_on_ranks(calm_on_ranks: ModuleType) -> ModuleType:
    """Its sibling, which imports it."""
    return script("uq4ct_on_ranks")


def script(name: str) -> ModuleType:
    """A script of this folder, importable by its name from then on."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def launch(
    tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[[Path, Sequence[str], int], None]
) -> Callable[[int, Sequence], Path]:
    """Runs jobs of a script one after another on a number of ranks; returns the folder with their outcomes."""

    def start(world: int, jobs: Sequence, name: str = "calm_on_ranks") -> Path:
        folder = tmp_path_factory.mktemp(f"ranks{world}")
        (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
        run_ranks(folder, [str(HERE / f"{name}.py"), str(folder)], world)
        return folder

    return start


@dataclass
class Training:
    """What `training` builds."""

    model: ScoringModel
    head: CalibrationHead | None
    space: ParameterSpace
    step: TrainingStep


@pytest.fixture(scope="session")
def encoded() -> list[EncodedQuestion]:
    """36 random questions of the tiny vocabulary: prompts of 4 to 7 tokens, four options of 1 or 2."""
    generator = torch.Generator().manual_seed(11)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 320, (count,), generator=generator).tolist())

    return [
        EncodedQuestion(str(i), tokens(4 + i % 4), tuple(tokens(1 + (i + k) % 2) for k in range(4)), i % 4)
        for i in range(36)
    ]


@pytest.fixture
def feed(encoded: list[EncodedQuestion]) -> Callable[..., Feed]:
    """Feeds of 6 questions a step."""

    def make(options: str, questions: Sequence[EncodedQuestion] = encoded[:24], **ranks: int) -> Feed:
        return Feed(questions, 6, options, seed=5, pad_id=0, **ranks)

    return make


@pytest.fixture
def training(tiny_model_original: Any, encoded: list[EncodedQuestion], feed: Callable[..., Feed]) -> Callable:
    """Builds a method on a fresh copy of the tiny model, in training mode."""

    def make(
        method: str,
        *,
        calm: CalmConfig | None = None,
        uq4ct: Uq4ctConfig | None = None,
        upper: Sequence[EncodedQuestion] = encoded[24:],
        dropout: float = 0.0,
        warm: bool = False,
        recorder: Callable = lambda space: space,
        sections: Mapping[str, Any] | None = None,
        bins: BinAccuracy = BINS,
        **ranks: int,
    ) -> Training:
        """`warm` moves LoRA's B away from zero, where dropout and A would have no effect."""
        calm, uq4ct = calm or CalmConfig(inner_steps=2), uq4ct or Uq4ctConfig()
        config = RunConfig.model_validate({**TREE, "calm": calm, "uq4ct": uq4ct, **(sections or {})})
        mixture = METHODS[method].adapter == "mixlora"
        adapter = MixLoraConfig(r=4, num_experts=4, dropout=dropout) if mixture else AdapterConfig(r=4, dropout=dropout)
        model = ScoringModel(attach_adapter(copy.deepcopy(tiny_model_original), adapter, seed=1)).train()
        theta = trainable_parameters(model)
        if warm:
            with torch.no_grad():
                for name, p in theta.items():
                    p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        head = make_head(METHODS[method], config, tiny_model_original)
        alpha = {n: p for n, p in head.named_parameters() if p.requires_grad} if head else {}
        space = recorder(TorchSpace(alpha, theta, torch.optim.AdamW(block_groups(alpha, theta), lr=1e-2)))

        def deal(split: str, options: str) -> Feed:
            return feed(options, **ranks) if split == "train" else feed(options, upper, **ranks)

        lower = make_lower(METHODS[method], config, model, head, deal)
        if isinstance(lower, CftLoss):
            lower.bins = bins
        step = make_step(METHODS[method], config, space, lower, model, head, deal)
        return Training(model, head, space, step)

    return make
