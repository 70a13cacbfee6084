"""Predictions of free answers: each confidence with the correctness of the answer that it is about."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.config_generation import GenerationConfig
from components.data.schema import OpenQuestion
from components.errors import DataError
from components.evaluation.display import rows_of
from components.evaluation.judge_answers import clusterer_of, judge_answers, modal_answer
from components.evaluation.metrics_file import evaluate_predictions
from components.evaluation.open_predictions import OpenPredictions, read_any_predictions, write_any_predictions
from components.evaluation.summary import choose_sources, compare, summarise
from components.evaluation.tables import low_mass_warnings
from components.models.generate import Answer, Answers

QUESTIONS = (
    OpenQuestion("q0", "Capital of France?", ("Paris", "Lutetia"), "capital"),
    OpenQuestion("q1", "Capital of Peru?", ("Lima",), "capital"),
    OpenQuestion("q2", "Author of Emma?", ("Jane Austen", "Austen")),
)
CONFIG = EvaluationConfig(bootstrap=100, bins=10)


def answers(greedy: str, log_prob: float, tokens: int, *samples: str) -> Answers:
    return Answers(Answer(greedy, log_prob, tokens), tuple(Answer(text, -1.0, 2) for text in samples))


@pytest.fixture
def found() -> OpenPredictions:
    """q0: greedy wrong, most samples right. q1: greedy right, samples tie. q2: all right."""
    own = (
        answers("Rome", math.log(0.25), 2, "Paris", "Lutetia", "Rome", "paris."),
        answers("It is Lima.", math.log(0.5), 1, "Lima", "Cusco", "Lima", "Cusco"),
        answers("Jane Austen", 0.0, 3, "Austen", "Austen", "Jane Austen", "Austen"),
    )
    return judge_answers(QUESTIONS, own, GenerationConfig(), clusterer_of(GenerationConfig()))


def test_each_confidence_has_its_own_correctness(found: OpenPredictions) -> None:
    """Sem1: 3/4, 2/4 (the tie goes to Cusco, which comes first by alphabet, and is wrong), 4/4. Sequence: the root of
    1/4 over two tokens, 1/2, 1."""
    assert found.sources == ("semantic", "semantic_split", "sequence", "sequence_sum")
    np.testing.assert_allclose(found.confidence(), [0.75, 0.5, 1.0])
    np.testing.assert_allclose(found.confidence("sequence"), [0.5, 0.5, 1.0])
    np.testing.assert_allclose(found.confidence("sequence_sum"), [0.25, 0.5, 1.0])
    assert found.correctness().tolist() == found.correctness("semantic_split").tolist() == [True, False, True]
    assert found.correctness("sequence").tolist() == [False, True, True]
    np.testing.assert_allclose(found.entropies["semantic_entropy"][1:], [math.log(2), 0], atol=1e-12)
    with pytest.raises(ValueError, match="softmax"):
        found.confidence("softmax")


def test_what_is_right_is_chosen_by_the_run_file() -> None:
    own = [answers("It is Lima.", -1.0, 2, "Lima", "Lima")] * 1
    for correctness, expected in (("alias", True), ("exact_match", False), ("token_f1", True)):
        config = GenerationConfig(correctness=correctness)  # type: ignore[arg-type]
        judged = judge_answers(QUESTIONS[1:2], own, config, clusterer_of(config))
        assert judged.answer_right.tolist() == [expected]


def test_modal_wording_does_not_depend_on_order() -> None:
    samples, classes = ["b", "B", "a", "c", "c"], [0, 0, 0, 1, 1]
    assert modal_answer(samples, classes) == modal_answer(samples[::-1], classes[::-1]) == "B"


def test_metrics(found: OpenPredictions) -> None:
    """ECE of Sem1, 10 bins: (0.25 + 0.5 + 0) / 3. What is defined among options only is null."""
    metrics = evaluate_predictions(found, CONFIG, 0)
    blocks = metrics["sources"]
    assert list(blocks) == list(found.sources)
    assert blocks["semantic"]["ece"]["value"] == pytest.approx(0.25)
    assert blocks["semantic"]["accuracy"]["value"] == pytest.approx(2 / 3)
    assert blocks["sequence_sum"]["top_label_brier_score"]["value"] == pytest.approx((0.0625 + 0.25) / 3)
    for metric in ("nll", "brier_score", "cw_ece", "option_mass"):
        assert blocks["sequence"][metric]["value"] is None
    assert metrics["low_option_mass"] is False


def test_parquet_round_trip(found: OpenPredictions, tmp_path: Path) -> None:
    path = tmp_path / "predictions.parquet"
    for written in (found, replace(found, flc=np.array([0.3, 0.5, 1.0]))):
        write_any_predictions(path, written)
        read = read_any_predictions(path)
        assert isinstance(read, OpenPredictions)
        assert (read.samples, read.classes, read.groups) == (written.samples, written.classes, written.groups)
        assert read.sources == written.sources
        for source in written.sources:
            np.testing.assert_array_equal(read.confidence(source), written.confidence(source))
            np.testing.assert_array_equal(read.correctness(source), written.correctness(source))
    with pytest.raises(DataError, match="evaluate again"):
        read_any_predictions(tmp_path / "none.parquet")


def test_damage_is_noticed(found: OpenPredictions) -> None:
    with pytest.raises(ValueError, match=r"'q1'.*log-probability"):
        replace(found, log_probs=np.array([-1.0, 0.5, -1.0]))
    with pytest.raises(ValueError, match=r"'q0'.*two samples"):
        replace(found, classes=((0,), *found.classes[1:]))
    with pytest.raises(ValueError, match="entries in answers"):
        replace(found, answers=("a",))


def test_beside_a_split_with_options(found: OpenPredictions, simulate) -> None:
    """A run with options in domain and free answers out of domain: one row a method under its own name, the other
    sources in brackets; each pair is compared on both splits by what both have."""
    predictions = {name: {"id": simulate(20, seed=seed), "ood": found} for seed, name in enumerate(("base", "sft"))}
    metrics = {
        name: {split: evaluate_predictions(of, CONFIG, 0) for split, of in own.items()}
        for name, own in predictions.items()
    }
    same_questions = {"base": predictions["base"], "sft": {"id": simulate(20, sharpening=2.0), "ood": found}}
    rows = compare(same_questions, [("sft", "base")], CONFIG, 0)
    assert [(row["split"], row["metric"]) for row in rows if row["split"] == "ood"] == [
        ("ood", metric) for metric in ("ece", "top_label_brier_score", "auroc", "accuracy")
    ]
    assert {row["metric"] for row in rows if row["split"] == "id"} == {"ece", "accuracy", "nll"}
    summary = summarise("mixed", metrics, rows, choose_sources({"base": {"validation": metrics["base"]["ood"]}}))
    table = {row.name: row for row in rows_of(summary)}
    assert set(table["base"].blocks) == {"id", "ood"}
    assert table["base"].blocks["ood"] == metrics["base"]["ood"]["sources"]["semantic"]
    assert set(table["base (sequence)"].blocks) == {"ood"}
    assert summary["chosen_sources"]["base"] in found.sources
    assert low_mass_warnings(summary) == []
