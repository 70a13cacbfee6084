"""A method's training as one process lives it: from prepared data to an adapter folder that is the state kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.config import ModelConfig, RunConfig
from components.data.prepare import prepare
from components.errors import CheckpointError
from components.models.adapter_files import load_adapter, verify_adapter
from components.models.base import load_model, resolve_model
from components.training.job import Process, TrainingJob
from components.training.loop import LoopResult
from components.training.methods import METHODS
from components.training.objectives.cft import BinAccuracy
from components.training.session import Session, validation_splits

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
            "model": {
                "name": str(tiny_model_folder),
                "adapter": {"r": 4, "dropout": 0.3},
                "mixlora": {"r": 4, "num_experts": 4, "dropout": 0.3, "jitter": 0.1},
            },
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


@pytest.mark.parametrize(
    "method",
    ["sft", "calm", "uq4ct", "calm_uq4ct", "label_smoothing", "cft", "regularization", "iterate", "blob", "ensemble"],
)
def test_a_resumed_session_is_the_uninterrupted_one(job, method):
    """A resumed session must train with dropout from its first step on, though it begins with no evaluation.

    Killed after 5 steps, resumed from the checkpoint at 4, so the load logged at 3 is taken over and 6, 8 are added.
    """
    whole, broken = job("whole", method), job("broken", method)
    if method == "ensemble":
        whole, broken = (replace(task, member=1) for task in (whole, broken))
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
    if "uq4ct" in method:
        loads = [(task.folder / "expert_load.json").read_bytes() for task in (whole, broken)]
        assert loads[0] == loads[1]


def test_cft_measures_the_base_model_once(job):
    """All 24 training questions count; a session that goes on takes the figures of its checkpoint, and keeps them."""
    task = job("measured", "cft")
    with pytest.raises(Killed):
        train(task, stop_at=5)
    manifest = task.folder / "checkpoints" / "step-00000004" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    assert sum(content["written"]["estimates"]["count"]) == 24
    content["written"]["estimates"] = {"correct": [1] * 10, "count": [2] * 10}
    manifest.write_text(json.dumps(content))
    session, _ = train(task, resume=True)
    assert session.lower.bins == BinAccuracy((1,) * 10, (2,) * 10)
    last = sorted((task.folder / "checkpoints").glob("step-*"))[-1]
    assert json.loads((last / "checkpoint.json").read_text())["written"]["estimates"] == content["written"]["estimates"]


@pytest.mark.parametrize("method", ["sft", "cft", "regularization", "iterate", "learned_ts"])
def test_methods_with_a_head_stop_by_calms_rule(job, method):
    task = job("stop", method)
    session = Session(task, Process(), lambda scores: {}, lambda taken, values: None)
    own = method in ("regularization", "iterate", "learned_ts")
    assert session.loop.stop.config.rule == ("keep_best" if own else "budget")
    assert (session.head is not None) == own


def test_members_differ_in_their_initial_weights_alone(job):
    """The first is plain fine-tuning, bit for bit; the second begins at the same loss (B = 0) on the same questions."""
    plain, ensemble = job("members", "sft"), job("members", "ensemble")
    first, second = (replace(ensemble, folder=ensemble.folder / str(i), member=i) for i in range(2))
    rows = [train(task)[1] for task in (plain, first, second)]
    assert rows[1] == rows[0]
    assert rows[2][1] == rows[0][1]
    assert rows[2][8] != rows[0][8]
    tensors = [load_file(t.folder / "adapter" / "adapter_model.safetensors") for t in (plain, first, second)]
    assert all(torch.equal(value, tensors[1][key]) for key, value in tensors[0].items())
    assert not any(torch.equal(value, tensors[2][key]) for key, value in tensors[0].items())
    assert [verify_adapter(t.folder / "adapter")["method"] for t in (first, second)] == [
        "ensemble-member-0", "ensemble-member-1",
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="other settings"):
        train(replace(first, member=1), resume=True)


def test_mc_dropout_at_zero_is_plain_fine_tuning(job):
    """And above zero it trains with its own dropout, not with the .3 of `model.adapter`."""
    model = {**job("p", "sft").config.model.model_dump(), "adapter": {"r": 4, "dropout": 0.0}}
    tasks = [
        job("plain", "sft", model=model),
        job("zero", "mc_dropout", mc_dropout={"dropout": 0.0}),
        job("some", "mc_dropout", mc_dropout={"dropout": 0.2}),
    ]
    rows = [train(task)[1] for task in tasks]
    assert rows[1] == rows[0]
    assert rows[2] != rows[0]
    tensors = [load_file(task.folder / "adapter" / "adapter_model.safetensors") for task in tasks]
    assert all(torch.equal(value, tensors[1][key]) for key, value in tensors[0].items())
    written = [json.loads((task.folder / "adapter" / "adapter_config.json").read_text()) for task in tasks]
    assert [each["lora_dropout"] for each in written] == [0.0, 0.0, 0.2]


def test_what_the_experts_received_is_kept_at_every_evaluation(job):
    """2 layers of 4 experts; shares of a router add up to 1, its entropy is at most ln 4."""
    task = job("load", "uq4ct")
    train(task)
    content = json.loads((task.folder / "expert_load.json").read_text())
    assert content["steps"] == [3, 6, 8]
    share, entropy = torch.tensor(content["share"]), torch.tensor(content["entropy"])
    assert share.shape == (3, 2, 4)
    torch.testing.assert_close(share.sum(dim=-1), torch.ones(3, 2))
    assert entropy.shape == (3, 2)
    assert 0 < float(entropy.min()) < float(entropy.max()) <= math.log(4) + 1e-6


@pytest.mark.parametrize("method", ["uq4ct", "calm_uq4ct"])
def test_a_mixture_of_experts_is_saved_with_what_rebuilds_it(job, method):
    task = job("mixture", method)
    _, rows = train(task)
    metadata = verify_adapter(task.folder / "adapter")
    assert metadata["adapter"] == task.config.model.mixlora.model_dump(mode="json")
    assert (metadata["head"] is not None) == (method == "calm_uq4ct")
    assert json.loads((task.folder / "adapter" / "adapter_config.json").read_text())["router_aux_loss_coef"] == 0.01
    assert all(0.5 <= values["flc_mean"] <= 1.0 for step, values in rows.items() if step > 0)


def test_validation_scores_carry_the_routers_confidence(job):
    seen = {}

    def judge(scores) -> dict[str, float]:
        seen.setdefault(len(scores.answers), scores.flc)
        return {"nll": 1.0, "ece": 0.1, "accuracy": 0.5, "mean_confidence": 0.9}

    Session(job("flc", "uq4ct"), Process(), judge, lambda taken, values: None).loop.evaluate()
    assert all(((flc >= 0.5) & (flc <= 1.0)).all() for flc in seen.values())
    seen.clear()
    Session(job("flc", "sft"), Process(), judge, lambda taken, values: None).loop.evaluate()
    assert list(seen.values()) == [None] * len(seen)


def test_routers_move_at_their_own_rate(job):
    """A rate of next to nothing leaves them where they were, whatever the experts do."""
    task = job("still", "uq4ct", uq4ct={"router_learning_rate": 1e-12})
    fresh = Session(task, Process(), lambda scores: {}, lambda taken, values: None).space.state_dict()
    train(task)
    final = final_state(task)
    for key, value in fresh.items():
        if key.startswith("value/") and "lora_A" not in key:
            assert (float((final[key] - value).abs().max()) < 1e-9) == (".router." in key), key


@pytest.mark.parametrize("method", ["sft", "calm_uq4ct", "blob"])
def test_recomputed_activations_change_nothing(job, method):
    """Dropout and jitter are drawn again and routers choose again in the backward pass: all must be as before."""
    whole = job("stored", method)
    training = {**whole.config.training.model_dump(), "gradient_checkpointing": True}
    again = job("recomputed", method, training=training)
    (_, expected), (session, found) = train(whole), train(again)
    assert any(getattr(module, "gradient_checkpointing", False) for module in session.model.modules())
    session.model.train().requires_grad_(False)
    assert not session.module(session.lower.feed.share(0)).requires_grad, "nothing to train, yet there is a graph"
    assert found == expected
    states = final_state(whole), final_state(again)
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []


def test_a_model_with_dropout_of_its_own_is_resumed_in_training_mode(job):
    task = job("mode", "sft")
    session = Session(task, Process(), lambda scores: {}, lambda taken, values: None)
    seen = []
    run = session.loop.run

    def watched() -> LoopResult:
        seen.append({module.training for module in session.module.modules()})
        return run()

    session.loop.run = watched
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
        assert method.trains_adapter == (method.lower != "none")
        assert (method.adapter == "mixlora") == (method.lower == "uq4ct"), "only UQ4CT's loss trains routers"
