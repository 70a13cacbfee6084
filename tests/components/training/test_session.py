"""A method's training as one process lives it: from prepared data to an adapter folder that is the state kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.config import ModelConfig, RunConfig
from components.data.prepare import prepare
from components.errors import CheckpointError
from components.models.adapter_files import load_adapter, verify_adapter
from components.models.base import load_model, resolve_model
from components.training.methods import METHODS
from components.training.session import Process, Session, TrainingJob, validation_splits

WORDS = ["iron", "tin", "zinc", "gold", "lead", "neon", "argon", "xenon", "lima", "oslo", "rome", "cairo"]


class Killed(BaseException):
    """Stands for the process's end."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Callable[..., TrainingJob]:
    """Jobs on 60 made-up questions of which 16 belong to a group that is held out."""
    folder = tmp_path_factory.mktemp("session")
    rows = [
        {
            "id": str(i),
            "question": f"What is number {i}?",
            "choices": [WORDS[(i + k) % 12] for k in range(4)],
            "answer": i % 4,
            "group": "odd" if i % 4 == 1 else "even",
        }
        for i in range(64)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name: str, method: str, **sections) -> TrainingJob:
        tree = {
            "run": "small",
            "methods": [method],
            "model": {"name": str(tiny_model_folder), "adapter": {"r": 4, "dropout": 0.3}},
            "data": {
                "source": {"kind": "file", "path": str(folder / "rows.jsonl")},
                "splits": {"train": 24, "calibration": 8, "validation": 8, "test": 8},
                "heldout_groups": ["odd"],
                "prompt": {"style": "plain", "delimiter": " "},
            },
            "training": {"steps": 8, "batch_size": 4, "evaluate_every": 3, "checkpoint_every": 2},
            "calm": {"inner_steps": 2, "stop": {"rule": "keep_best", "split": "both"}},
        }
        config = RunConfig.model_validate(tree | sections)
        data = folder / "data"
        if not data.exists():
            prepare(config, data, folder)
        return TrainingJob(config, method, data, folder / name / method, resolve_model(config.model), {"seed": 0})

    return make


def train(
    job: TrainingJob, nll: Mapping[int, float] | None = None, resume: bool = False, stop_at: int | None = None
) -> tuple[Session, dict[int, dict]]:
    """Trains in this process. `nll` gives validation values by evaluation, else the mean confidence stands for them."""
    rows: dict[int, dict] = {}
    evaluations = iter(nll.values()) if nll else None
    splits = 2

    def judge(scores) -> dict[str, float]:
        nonlocal splits
        value = float(-scores.log_probs[range(len(scores.answers)), scores.answers].mean())
        if evaluations is not None:
            splits = (splits + 1) % 2
            value = judge.value = next(evaluations) if splits == 1 else judge.value
        return {"nll": value, "ece": 0.1, "accuracy": 0.5, "mean_confidence": 0.9}

    def on_step(taken: int, values: Mapping[str, float]) -> None:
        rows[taken] = dict(values)
        if taken == stop_at:
            raise Killed

    session = Session(job, Process(), judge, on_step)
    if resume:
        session.resume()
    session.train()
    return session, rows


def final_state(job: TrainingJob) -> dict[str, torch.Tensor]:
    return load_file(sorted((job.folder / "checkpoints").glob("step-*"))[-1] / "state.safetensors")


def test_the_adapter_folder_holds_the_kept_state_and_the_head(job):
    """Validation values 1, .5, .7, .6 at steps 0, 3, 6, 8: the state after 3 steps is the one to keep."""
    task = job("kept", "calm")
    session, _ = train(task, {0: 1.0, 3: 0.5, 6: 0.7, 8: 0.6})
    metadata = verify_adapter(task.folder / "adapter")
    assert (metadata["steps"], metadata["details"]["last_step"], metadata["details"]["seed"]) == (3, 8, 0)

    short = job("short", "calm", training={**task.config.training.model_dump(), "steps": 8, "checkpoint_every": 3})
    with pytest.raises(Killed):
        train(short, {0: 1.0, 3: 0.5}, stop_at=4)
    expected = final_state(short)
    model, head = load_adapter(task.folder / "adapter", load_model(task.resolved, ModelConfig()))
    assert torch.equal(head.l.detach(), expected["value/alpha.l"])
    assert torch.equal(head.rho.detach(), expected["value/alpha.rho"])
    assert head.rho.detach().any()
    found = {f"value/theta.{name}": p for name, p in model.named_parameters() if "lora" in name}
    assert found.keys() == {key for key in expected if key.startswith("value/theta.")}
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    live = {key: value for key, value in session.space.state_dict().items() if key in found}
    assert any(not torch.equal(value, live[key]) for key, value in found.items()), "the last state is another one"


def test_a_method_without_a_head_saves_none(job):
    task = job("sft", "sft")
    train(task)
    assert verify_adapter(task.folder / "adapter")["head"] is None
    assert not (task.folder / "adapter" / "calibration_head.safetensors").exists()


@pytest.mark.parametrize("method", ["sft", "calm"])
def test_a_resumed_session_is_the_uninterrupted_one(job, method):
    """A resumed session must train with dropout from its first step on, though it begins with no evaluation."""
    whole, broken = job("whole", method), job("broken", method)
    _, expected = train(whole)
    with pytest.raises(Killed):
        train(broken, stop_at=5)
    session, found = train(broken, resume=True)
    assert session.loop.taken == 8
    assert found == {step: values for step, values in expected.items() if step > 4}
    states = final_state(whole), final_state(broken)
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []
    tensors = [load_file(task.folder / "adapter" / "adapter_model.safetensors") for task in (whole, broken)]
    assert all(torch.equal(value, tensors[1][key]) for key, value in tensors[0].items())


def test_a_model_with_dropout_of_its_own_is_resumed_in_training_mode(job):
    task = job("mode", "sft")
    session = Session(task, Process(), lambda scores: {}, lambda taken, values: None)
    seen = []
    session.loop.run = lambda: seen.append({module.training for module in session.module.modules()})
    session._save = lambda result: None
    session.train()
    assert seen == [{True}]


def test_other_settings_are_not_resumed(job):
    task = job("other", "sft")
    train(task)
    changed = job("other", "sft", seed=1)
    with pytest.raises(CheckpointError, match="other settings"):
        train(changed, resume=True)


def test_validation_data_is_read_in_order(job):
    task = job("splits", "calm")
    session = Session(task, Process(), lambda scores: {"n": float(len(scores.answers))}, lambda taken, values: None)
    assert validation_splits(session.data) == ("validation", "validation_shift")
    assert list(session.loop.evaluate()) == ["validation", "validation_shift"]


def test_every_method_is_described():
    assert {name: method.name for name, method in METHODS.items()} == {name: name for name in METHODS}
    for method in METHODS.values():
        assert method.trains_adapter == (method.objective != "none")
        assert method.head == (method.objective == "calm")
