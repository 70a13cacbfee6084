"""Scoring a whole split: order, progress, NaN, and several processes against one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from components.data.prompts import EncodedQuestion
from components.models.calibration_head import CalibrationHead
from components.models.score_questions import SplitScores, score_questions
from components.models.scoring import ScoringModel

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = [
    EncodedQuestion(
        str(i),
        tuple(range(3 + i, 5 + i + i % 6)),
        tuple(tuple(range(20 + 3 * k, 21 + 3 * k + (i + k) % 3)) for k in range(3 + i % 3)),
        i % 3,
    )
    for i in range(11)
]
# Every rank scores the same split, then also reports its progress; 11 questions in 40 tokens a batch give an
# odd number of batches, so that the last round has a rank without one of its own.
RANK = """
import datetime, json, sys
import torch.distributed as dist
from transformers import LlamaForCausalLM
from components.data.batching import batches_by_length
from components.data.prompts import EncodedQuestion
from components.models.score_questions import score_questions
from components.models.scoring import ScoringModel
rank, store, model, out = int(sys.argv[1]), *sys.argv[2:5]
questions = [EncodedQuestion(q["id"], tuple(q["prompt"]), tuple(map(tuple, q["options"])), q["answer"])
             for q in json.load(open(sys.argv[5]))]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
logits_at, calls, progress = ScoringModel(LlamaForCausalLM.from_pretrained(model).eval()), [], []
def counted(batch):
    calls.append(1)
    return logits_at(batch)
def flc_of(batch):
    return (batch.segments == 0).sum(1) / 20
scores = score_questions(
    counted, None, questions, pad_id=0, token_budget=40, flc_of=flc_of, on_progress=progress.append)
json.dump({"log_probs": scores.log_probs.tolist(), "mass": scores.mass.tolist(), "answers": scores.answers.tolist(),
           "flc": scores.flc.tolist(),
           "calls": len(calls), "progress": progress, "batches": len(list(batches_by_length(questions, 40)))},
          open(f"{out}.{rank}", "w"))
dist.destroy_process_group()
"""


@pytest.fixture
def score(tiny_model):
    """Score `QUESTIONS` with the tiny model; options by keyword."""

    def scored(head=None, token_budget=40, questions=QUESTIONS, logits_at=None, **options) -> SplitScores:
        return score_questions(
            logits_at or ScoringModel(tiny_model), head, questions, pad_id=0, token_budget=token_budget, **options
        )

    return scored


def assert_same(found: SplitScores, expected: SplitScores) -> None:
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.mass, expected.mass, atol=1e-6, rtol=0)
    np.testing.assert_array_equal(found.answers, expected.answers)


def test_results_stand_in_the_order_of_the_questions(score):
    """Question by question, each in a split of its own, must give the same rows."""
    whole = score()
    assert whole.log_probs.shape == (11, 5)
    assert whole.answers.tolist() == [q.answer for q in QUESTIONS]
    for i, question in enumerate(QUESTIONS):
        alone = score(questions=[question])
        np.testing.assert_allclose(whole.log_probs[i, : len(question.options)], alone.log_probs[0], atol=1e-5, rtol=0)
        assert np.isneginf(whole.log_probs[i, len(question.options) :]).all()
        assert whole.mass[i] == pytest.approx(alone.mass[0], abs=1e-6)
    assert len(np.unique(whole.log_probs[:, 0].round(4))) == 11, "no two questions score alike, so a mix-up would show"


@pytest.mark.parametrize("token_budget", [1, 17, 10_000])
def test_token_budget_does_not_change_the_scores(score, token_budget):
    assert_same(score(token_budget=token_budget), score())


def test_head_is_applied(score):
    head = CalibrationHead(320, "scalar")
    same = score(head)
    assert_same(same, score())
    with torch.no_grad():
        head.rho.fill_(1.0)
    assert np.abs(score(head).log_probs[:, 0] - same.log_probs[:, 0]).min() > 1e-3


def test_progress_adds_up_to_all_questions(score):
    seen: list[int] = []
    score(on_progress=seen.append)
    assert len(seen) > 2
    assert sum(seen) == len(QUESTIONS)


def test_nothing_is_kept_for_gradients(score, tiny_model):
    seen = []

    def watched(batch):
        seen.append(ScoringModel(tiny_model)(batch))
        return seen[-1]

    score(logits_at=watched)
    assert not any(logits.requires_grad for logits in seen)


def test_nan_is_an_error_with_its_count(score, tiny_model):
    """A model whose logits are NaN wherever the prompt is the longest one of the split."""

    def broken(batch):
        logits = ScoringModel(tiny_model)(batch)
        longest = (batch.segments == 0).sum(1) == max(len(q.prompt) for q in QUESTIONS)
        rows = torch.div(batch.positions, batch.input_ids.shape[1], rounding_mode="floor")
        return logits.masked_fill(longest[rows][:, None], torch.nan)

    count = sum(len(q.prompt) == max(len(q.prompt) for q in QUESTIONS) for q in QUESTIONS)
    assert count == 1
    with pytest.raises(FloatingPointError, match="scored 1 of 11 questions as NaN"):
        score(logits_at=broken)


def prompt_length(batch):
    """A router's confidence that tells questions apart: tokens of the prompt, of twenty."""
    return (batch.segments == 0).sum(1) / 20


@pytest.mark.parametrize("token_budget", [1, 40, 10_000])
def test_router_confidence_stands_in_the_order_of_the_questions(score, token_budget):
    found = score(token_budget=token_budget, flc_of=prompt_length)
    assert found.flc.dtype == np.float64
    np.testing.assert_allclose(found.flc, [len(q.prompt) / 20 for q in QUESTIONS], atol=1e-6, rtol=0)
    assert_same(found, score())


def test_router_confidence_is_asked_for_right_after_its_forward_pass(score, tiny_model):
    calls = []

    def logits_at(batch):
        calls.append(("logits", id(batch)))
        return ScoringModel(tiny_model)(batch)

    def flc_of(batch):
        calls.append(("flc", id(batch)))
        return prompt_length(batch)

    score(logits_at=logits_at, flc_of=flc_of)
    assert len(calls) > 4
    assert all(a == ("logits", i) for a, (b, i) in zip(calls[::2], calls[1::2], strict=True) if b == "flc")
    assert [name for name, _ in calls] == ["logits", "flc"] * (len(calls) // 2)


def test_without_routers_there_is_no_router_confidence(score):
    assert score().flc is None
    assert score(flc_of=lambda batch: None).flc is None


def test_router_confidence_that_is_nan_is_an_error(score):
    with pytest.raises(FloatingPointError, match="scored 1 of 11 questions as NaN"):
        score(flc_of=lambda batch: prompt_length(batch).masked_fill(prompt_length(batch) > 0.32, torch.nan))


def test_absent_options_are_not_nan():
    log_probs = np.array([[-1.0, -2.0, -np.inf]])
    assert SplitScores(log_probs, np.array([0.5]), np.array([0])).log_probs is log_probs


def test_mass_is_that_of_the_options(score):
    scores = score()
    np.testing.assert_allclose(scores.mass, np.exp(scores.log_probs).sum(1), rtol=1e-5)


@pytest.mark.distributed
def test_two_processes_give_what_one_gives(score, tiny_model_folder, tmp_path):
    """And every rank has the whole result, after equally many forward passes."""
    (tmp_path / "questions.json").write_text(
        json.dumps([{"id": q.id, "prompt": q.prompt, "options": q.options, "answer": q.answer} for q in QUESTIONS])
    )
    arguments = [
        str(tmp_path / "store"),
        str(tiny_model_folder),
        str(tmp_path / "out"),
        str(tmp_path / "questions.json"),
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    results = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
    batches = results[0]["batches"]
    assert batches % 2 == 1
    assert [r["calls"] for r in results] == [(batches + 1) // 2] * 2
    assert [sum(r["progress"]) for r in results] == [len(QUESTIONS)] * 2
    for result in results:
        found = SplitScores(*(np.array(result[key]) for key in ("log_probs", "mass", "answers", "flc")))
        assert_same(found, score())
        np.testing.assert_allclose(found.flc, [len(q.prompt) / 20 for q in QUESTIONS], atol=1e-6, rtol=0)
