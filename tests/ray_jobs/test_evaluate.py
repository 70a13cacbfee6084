"""Evaluation on actors gives what one process gives, row for row, whatever becomes of the actors."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from components.config import ModelConfig, ResourcesConfig
from components.data.prepare import load_prepared
from components.data.prompts import EncodedQuestion
from components.errors import CaltuneError, ModelError, UsageError
from components.evaluation.predictions import Predictions
from components.evaluation.scorer import ScorerSpec
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.base import load_model, load_tokenizer
from components.models.calibration_head import CalibrationHead
from components.models.ensemble import save_ensemble
from components.training.job import TrainingJob
from components.training.methods import METHODS
from ray_jobs.cluster import resources_per_actor
from ray_jobs.evaluate import EvaluationJob, evaluate
from ray_jobs.evaluation_actors import ScoringActor

SPLITS = ("train", "validation", "id")
QUESTIONS = 32 + 10 + 10

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def one_thread():
    """As many as each of two actors gets here: another number of threads sums in another order, to the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def adapters(make_job: Callable[..., TrainingJob], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """No adapter, LoRA with a calibration head, and experts with routers; all weights moved at random."""
    job = make_job("adapters")
    config, folder = job.config.model, tmp_path_factory.mktemp("adapters")
    return {
        "base": None,
        "calm": _saved(job, config, config.adapter, folder / "calm", CalibrationHead(320)),
        "uq4ct": _saved(job, config, config.mixlora, folder / "uq4ct", None),
        "mc_dropout": _saved(
            job, config, config.adapter.model_copy(update={"dropout": 0.3}), folder / "mc", None, "mc_dropout"
        ),
        "blob": _saved(job, config, METHODS["blob"].adapter_spec(job.config), folder / "blob", None, "blob"),
        "ensemble": save_ensemble(
            folder / "ensemble",
            [_saved(job, config, config.adapter, folder / f"member-{i}", None, seed=i) for i in range(2)],
            method="ensemble",
            resolved=job.resolved,
            details={},
        ),
    }


def _saved(
    job: TrainingJob,
    config: ModelConfig,
    spec,
    folder: Path,
    head: CalibrationHead | None,
    method: str = "calm",
    seed: int = 3,
) -> Path:
    torch.manual_seed(seed)
    model = attach_adapter(load_model(job.resolved, config), spec, seed=1)
    moved = [*trainable_parameters(model).values()] + ([head.l, head.rho] if head is not None else [])
    with torch.no_grad():
        for value in moved:
            value.add_(0.1 * torch.randn_like(value))
    return save_adapter(
        folder,
        model=model,
        state=adapter_state(model),
        head=head,
        tokenizer=load_tokenizer(job.resolved, config),
        config=config,
        adapter=spec,
        resolved=job.resolved,
        record=AdapterRecord(method, 1, job.config.data.prompt, balance_weight=0.01),
    )


@pytest.fixture
def evaluation(make_job: Callable[..., TrainingJob]) -> Callable[..., EvaluationJob]:
    """An evaluation in batches of about three questions."""

    def make(actors: int, adapter: Path | None = None, batch_tokens: int = 120, **resources) -> EvaluationJob:
        job = make_job(
            "evaluated",
            evaluation={"actors": actors, "batch_tokens": batch_tokens},
            resources={"cpus_per_worker": 1, **resources},
        )
        return EvaluationJob(job.config, load_prepared(job.data), job.resolved, adapter, SPLITS)

    return make


def assert_equal(found: dict[str, Predictions], expected: dict[str, Predictions]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for split, theirs in expected.items():
        ours = found[split]
        assert ours.ids == theirs.ids
        np.testing.assert_array_equal(ours.option_log_probs, theirs.option_log_probs)
        np.testing.assert_array_equal(ours.option_mass, theirs.option_mass)
        np.testing.assert_array_equal(ours.gold, theirs.gold)
        assert (ours.flc is None) == (theirs.flc is None)
        if ours.flc is not None:
            np.testing.assert_array_equal(ours.flc, theirs.flc)


def actor_pids() -> set[int]:
    """The scoring actors of this test's own Ray."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone by now
            if any("ScoringActor" in part for part in process.cmdline()):
                found.add(process.pid)
    return found


@pytest.mark.parametrize(
    "method",
    ["calm", "uq4ct", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mc_dropout", "ensemble", "blob"))],
)
def test_two_actors_give_what_one_process_gives(ray_here, evaluation, adapters, method):
    done: dict[int, list[int]] = {1: [], 2: []}
    one, two = (evaluate(evaluation(n, adapters[method]), done[n].append) for n in (1, 2))
    assert_equal(two, one)
    assert (one["id"].flc is not None) == (method == "uq4ct")
    assert sum(done[1]) == sum(done[2]) == QUESTIONS
    assert sorted(done[1]) == sorted(done[2])
    assert len(done[2]) > 10


def test_the_adapters_differ_from_the_base_model(evaluation, adapters):
    """Without this the comparisons above could hold with no adapter loaded at all."""
    base, *others = (evaluate(evaluation(1, adapter), lambda n: None)["id"] for adapter in adapters.values())
    assert all(np.abs(other.option_log_probs - base.option_log_probs).max() > 0.01 for other in others)


def test_lost_actors_are_replaced_and_nothing_is_missing(ray_here, evaluation):
    """Every actor is killed at the first result, so the rest can only come from actors started again."""
    done, killed, seen = [], set(), set()

    def on_progress(number: int) -> None:
        done.append(number)
        if not killed:
            killed.update(actor_pids())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        seen.update(actor_pids())

    found = evaluate(evaluation(2, batch_tokens=64), on_progress)
    assert killed
    assert done[0] < QUESTIONS
    assert seen - killed
    assert sum(done) == QUESTIONS
    assert_equal(found, evaluate(evaluation(1, batch_tokens=64), lambda n: None))


def test_what_an_actor_refuses_is_said_in_one_sentence(ray_here, evaluation, adapters, tmp_path):
    job = evaluation(2, tmp_path / "nothing")
    with pytest.raises(ModelError, match="nothing") as alone:
        evaluate(evaluation(1, tmp_path / "nothing"), lambda n: None)
    with pytest.raises(ModelError, match="nothing") as refused:
        evaluate(job, lambda n: None)
    assert str(refused.value) == str(alone.value)


def test_an_error_that_nobody_foresaw_keeps_its_words(evaluation):
    """The tiny model has 320 tokens; id 5000 is none of them."""
    job = evaluation(2)
    actor = ScoringActor(ScorerSpec.of_run(job.config, job.resolved, None, pad_id=0), threads=1, device="cpu")
    strange = EncodedQuestion("q", (5000,), ((3,), (4,)), 0)
    (row,) = actor(pa.table({"number": [7], "questions": [pickle.dumps([strange])]})).to_pylist()
    problem = pickle.loads(row["error"])
    assert row["number"] == 7
    assert isinstance(problem, CaltuneError)
    assert "the evaluation failed in an actor: IndexError: index out of range" in str(problem)


def test_more_actors_than_fit_are_refused_at_once(ray_here, evaluation):
    with pytest.raises(UsageError, match=r"5000 actors of 1 CPU cores do not fit, Ray has room for \d+; lower"):
        evaluate(evaluation(5000), lambda n: None)
    with pytest.raises(UsageError, match="2 actors of 5000 CPU cores do not fit, Ray has room for 0"):
        resources_per_actor(ResourcesConfig(cpus_per_worker=5000), 2)


def test_gpus_that_are_not_there_are_refused_at_once(ray_here, evaluation):
    import ray

    wanted = int(ray.cluster_resources().get("GPU", 0)) + 1
    with pytest.raises(UsageError, match=rf"{wanted} actors of 1 CPU cores and a GPU do not fit"):
        evaluate(evaluation(wanted, use_gpu=True), lambda n: None)


def test_cores_are_divided_evenly_unless_stated(ray_here):
    import ray

    cores = int(ray.cluster_resources()["CPU"])
    assert resources_per_actor(ResourcesConfig(), 1) == (cores, 0)
    assert resources_per_actor(ResourcesConfig(cpus_per_worker=1), 1) == (1, 0)
    assert resources_per_actor(ResourcesConfig(), cores) == (1, 0)
