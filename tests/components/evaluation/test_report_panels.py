"""The report's panels on errors, on shift, and on calibration heads, against cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from components.config import EvaluationConfig
from components.data.schema import Question, QuestionSet
from components.evaluation.confident_errors import confident_errors
from components.evaluation.display import Row
from components.evaluation.head_summary import read_head_summary, summarise_head
from components.evaluation.metrics_file import evaluate_predictions
from components.evaluation.predictions import Predictions
from components.evaluation.report import ReportInputs, write_report
from components.evaluation.shift_plot import shift_plot
from components.models.calibration_head import CalibrationHead


def answered(*confidence_in_first: float) -> Predictions:
    """Questions a, b, c ... of two options; the second one is right, so a high number is a confident error."""
    p = np.array(confidence_in_first)
    n = len(p)
    log_p = np.log(np.stack([p, 1 - p], axis=1))
    return Predictions(tuple("abcdef"[:n]), np.ones(n, int), log_p, np.ones(n), ("g1", None, "g3")[:n])


def test_errors_that_methods_share_stand_first():
    """a: (.9 + 0) / 2 = .45, one is right; b: (.6 + .7) / 2 = .65; c: nobody is wrong, so it is not shown."""
    one, other = answered(0.9, 0.6, 0.2), answered(0.1, 0.7, 0.3)
    found = confident_errors({"sft": one, "calm": other})
    assert [error.id for error in found] == ["b", "a"]
    assert (found[1].group, found[1].gold) == ("g1", 1)
    given = found[1].answers
    assert (given["sft"].option, given["sft"].correct, given["calm"].option, given["calm"].correct) == (
        0,
        False,
        1,
        True,
    )
    assert given["calm"].confidence == pytest.approx(0.9)
    assert found[1].option(1) == "B"
    assert [error.id for error in confident_errors({"sft": one, "calm": other}, shown=1)] == ["b"]
    assert confident_errors({}) == []


def test_methods_that_answered_in_another_order_are_joined_by_id():
    one, other = answered(0.9, 0.6), answered(0.7, 0.8)
    turned = Predictions(("b", "a"), other.gold, other.option_log_probs[::-1], other.option_mass, other.groups[::-1])
    found = confident_errors({"sft": one, "calm": turned})
    assert [(error.id, error.answers["calm"].confidence) for error in found] == [
        ("a", pytest.approx(0.7)),
        ("b", pytest.approx(0.8)),
    ]


def test_a_heads_summary_names_the_tokens_that_moved_most():
    """Temperatures exp(rho + shared) with shared ln 2: 2, 4, 1; offsets 0.5, 0, -1."""
    head = CalibrationHead(3)
    with torch.no_grad():
        head.l.copy_(torch.tensor([0.5, 0.0, -1.0]))
        head.rho.copy_(torch.tensor([0.0, np.log(2.0), -np.log(2.0)]))
        head.shared.fill_(np.log(2.0))
    found = summarise_head(head, "xyz".__getitem__, tokens=1)
    assert (found.moved, found.vocabulary, found.scalar) == (2, 3, False)
    ends = [found.raised, found.lowered, found.flattest, found.sharpest]
    assert [[token.text for token in end] for end in ends] == [["x"], ["z"], ["y"], ["z"]]
    assert found.flattest[0].temperature == pytest.approx(4.0)
    assert found.lowered[0].offset == -1.0
    assert found.temperatures[1] == pytest.approx(2.0)


def test_a_scalar_head_has_one_temperature_and_a_folder_without_a_head_none(tmp_path):
    head = CalibrationHead(7, "scalar")
    with torch.no_grad():
        head.shared.fill_(np.log(3.0))
    found = summarise_head(head, str)
    assert (found.scalar, found.temperatures, found.raised) == (True, pytest.approx((3.0, 3.0, 3.0)), ())
    assert read_head_summary(tmp_path) is None


def test_a_head_is_read_with_its_folders_tokenizer(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path)
    head = CalibrationHead(330)  # wider than the tokenizer's 320
    with torch.no_grad():
        head.l[1], head.l[325] = 2.0, 1.0
    head.save(tmp_path)
    assert [token.text for token in read_head_summary(tmp_path).raised[:2]] == ["<s>", "None"]


def test_shift_needs_a_test_set_out_of_domain():
    block = {name: {"value": 0.2} for name in ("ece", "accuracy", "mean_confidence")}
    assert shift_plot([Row("sft", {"id": block})], ["id"]) is None
    assert shift_plot([Row("sft", {"id": block}), Row("calm", {"id": block, "law": block})], ["id", "law"])[:4] == (
        b"\x89PNG"
    )


def test_the_page_has_the_panels(tmp_path: Path):
    predictions = {"sft": {"id": answered(0.9, 0.6), "ood": answered(0.7, 0.8)}}
    config = EvaluationConfig(bootstrap=100)
    metrics = {
        "sft": {split: evaluate_predictions(found, config, 0) for split, found in predictions["sft"].items()},
    }
    questions = QuestionSet("id", (Question("a", "Who <wins>?", ("Ada", "Bo"), 1),), {}, "facts")
    head = summarise_head(CalibrationHead(3), "xyz".__getitem__)
    inputs = ReportInputs(
        "r", None, "h" * 64, "now", "", predictions, metrics, questions={"id": questions}, heads={"calm": head}
    )
    page = write_report(inputs, tmp_path).read_text()
    assert [f'id="{name}"' in page for name in ("shift", "errors", "heads")] == [True] * 3
    assert "Who &lt;wins&gt;?" in page
    assert "<td>Ada<small>0.90</small></td>" in page
    assert "0 of 3 tokens have an offset" in page
    assert (tmp_path / "shift.png").exists()
