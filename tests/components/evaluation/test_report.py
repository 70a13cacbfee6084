"""Report, terminal tables and figures, on simulated runs."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from components.config import EvaluationConfig
from components.data.schema import Question, QuestionSet
from components.errors import CaltuneError
from components.evaluation import display, plots
from components.evaluation.metrics_file import evaluate_predictions
from components.evaluation.predictions import Predictions
from components.evaluation.report import ReportInputs, SplitFacts, TemperatureNote, write_report
from components.evaluation.summary import compare, summarise
from components.evaluation.tables import low_mass_warnings, print_summary
from components.evaluation.training_curves import training_curves
from components.posthoc.temperature import FittedTemperature

Simulate = Callable[..., Predictions]
CONFIG = EvaluationConfig(bootstrap=100, bins=10)


def _run(simulate: Simulate, **more: Any) -> ReportInputs:
    predictions = {
        "sft": {"id": simulate(80, sharpening=3.0), "ood": simulate(80, sharpening=4.0, seed=1, mass=0.001)},
        "calm": {"id": simulate(80), "ood": simulate(80, sharpening=1.5, seed=1)},
    }
    metrics = {
        method: {split: evaluate_predictions(found, CONFIG, 0) for split, found in by_split.items()}
        for method, by_split in predictions.items()
    }
    settings: dict[str, Any] = {
        "run": "quick",
        "git_commit": "c0ffee" * 6,
        "config_hash": "ab" * 32,
        "created": "2026-01-02 03:04 UTC",
        "config_yaml": "run: quick  # <script>alert(1)</script>\n",
        "predictions": predictions,
        "metrics": metrics,
        "comparisons": compare(predictions, [("calm", "sft")], CONFIG, 0),
    }
    return ReportInputs(**{**settings, **more})


class _Page(HTMLParser):
    """Collects the addresses and the text of a page, and sees that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "action"}]
        if tag not in {"meta", "img", "link", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_report_is_self_contained(simulate: Simulate, tmp_path: Path) -> None:
    inputs = _run(
        simulate,
        temperatures={"sft+temperature": TemperatureNote(FittedTemperature(1.9, 0.8, 0.6, 200, 6, True), "validation")},
        traces={"calm": [{"step": 1, "f": -1.0, "g": 0.5, "lambda": 0.1}, {"step": 2, "f": -1.1, "g": 0.4}]},
        kept_steps={"calm": 2},
        splits=[SplitFacts("id", 80, "built-in facts", "ef" * 32, {"duplicate choices": 3})],
        overlaps=["2 questions stand in train and id"],
    )
    index = write_report(inputs, tmp_path / "report")
    text = index.read_text()
    page = _Page(text)
    assert page.open == []
    assert page.addresses
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|https?://", text)
    words = " ".join(page.words)
    for expected in ("quick", "c0ffeec0ffee", "duplicate choices: 3", "2 questions stand", "1.900", "calm better"):
        assert expected in words
    assert "sft on ood: the options hold 0.001" in words
    pngs = {path.name for path in index.parent.glob("*.png")}
    assert {"reliability_sft_id.png", "reliability_grid.png", "risk_coverage_ood.png", "training_calm.png"} <= pngs
    assert json.loads((index.parent / "summary.json").read_text())["methods"]["calm"]["id"]["ece"]["value"] >= 0


def test_report_shows_the_summarys_figures(simulate: Simulate, tmp_path: Path) -> None:
    inputs = _run(simulate)
    words = _Page(write_report(inputs, tmp_path).read_text()).words
    for by_split in inputs.metrics.values():
        for content in by_split.values():
            for column in display.COLUMNS:
                figure = content["sources"]["softmax"][column.metric]
                assert display.number(figure["value"]) in words
                assert display.interval(figure) in words


def test_report_needs_something_to_report(simulate: Simulate, tmp_path: Path) -> None:
    with pytest.raises(CaltuneError, match="'quick' has no evaluated method"):
        write_report(_run(simulate, metrics={}, predictions={}), tmp_path)


def test_split_facts_of_a_question_set() -> None:
    questions = QuestionSet("id", (Question("a", "Q?", ("x", "y"), 0),), {"3 choices": 1}, "facts")
    facts = SplitFacts.of(questions)
    assert (facts.name, facts.n, facts.source, facts.oddities) == ("id", 1, "facts", {"3 choices": 1})
    assert facts.content_hash == questions.content_hash


@pytest.mark.parametrize(("width", "tables"), [(200, 1), (80, 2)])
def test_terminal_table_fits_the_console(simulate: Simulate, width: int, tables: int) -> None:
    inputs = _run(simulate)
    summary = summarise("quick", inputs.metrics, inputs.comparisons)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_summary(summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("Confidence") == len(display.splits_of(summary))
    assert len(re.findall(r"^ *method ", text, re.MULTILINE)) == tables
    assert max(map(len, text.splitlines())) <= width
    for by_split in summary["methods"].values():
        for block in by_split.values():
            for column in display.COLUMNS:
                assert display.number(block[column.metric]["value"]) in text
    assert re.search(r"calm - \S+ +ECE.* better", text)
    assert "options hold" in text


def test_best_is_lowest_ece_and_highest_accuracy() -> None:
    def block(accuracy: float, ece: float | None) -> dict[str, Any]:
        return {
            name: {"value": value} for name, value in (("accuracy", accuracy), ("ece", ece), ("mean_confidence", 1))
        }

    summary = {"methods": {"a": {"id": block(0.8, 0.1)}, "b": {"id": block(0.7, 0.05)}, "c": {"id": block(0.8, None)}}}
    accuracy, confidence, ece, _ = display.COLUMNS
    assert [display.is_best(summary, m, "id", accuracy) for m in "abc"] == [True, False, True]
    assert [display.is_best(summary, m, "id", ece) for m in "abc"] == [False, True, False]
    assert not any(display.is_best(summary, m, "id", confidence) for m in "abc")


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        ("ece", -0.2, -0.1, "a better"),
        ("ece", 0.1, 0.2, "b better"),
        ("accuracy", 0.1, 0.2, "a better"),
        ("nll", 0.1, 0.2, "b better"),
        ("ece", -0.1, 0.1, "no clear difference"),
        ("ece", 0.0, 0.1, "no clear difference"),
        ("ece", None, None, "no clear difference"),
    ],
)
def test_verdict(metric: str, low: float | None, high: float | None, expected: str) -> None:
    assert display.verdict({"metric": metric, "a": "a", "b": "b", "ci_low": low, "ci_high": high}) == expected


def test_undefined_figures_have_a_word() -> None:
    undefined = {"value": None, "ci_low": None, "ci_high": None}
    assert {display.number(None), display.signed(None), display.interval(undefined)} == {"n/a"}
    assert display.short_interval(undefined) == "n/a"


def test_no_warning_where_options_hold_mass(simulate: Simulate) -> None:
    metrics = {"a": {"id": evaluate_predictions(simulate(10), CONFIG, 0)}}
    assert low_mass_warnings(summarise("r", metrics, [])) == []


@pytest.mark.parametrize(("confidence", "correct"), [([1.0], [True]), ([0.0], [False]), ([0.5] * 3, [1, 0, 0])])
def test_figures_of_degenerate_samples(confidence: list[float], correct: list[int]) -> None:
    for image in (
        plots.reliability_diagram(confidence, correct, 10, "title"),
        plots.reliability_diagram(confidence, correct),
        plots.confidence_histogram(confidence, correct),
        plots.risk_coverage({"a": (confidence, correct)}),
        plots.reliability_grid({"a": {"id": (confidence, correct)}, "b": {"ood": (confidence, correct)}}),
    ):
        assert Image.open(io.BytesIO(image)).format == "PNG"


def test_figures_are_deterministic(simulate: Simulate) -> None:
    found = simulate(50)
    pair = found.confidence(), found.correct
    assert plots.reliability_diagram(*pair) == plots.reliability_diagram(*pair)


def test_figures_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.risk_coverage({})
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.reliability_grid({})


def test_wilson_interval_agrees_with_scipy() -> None:
    from scipy.stats import binomtest

    low, high = plots.wilson_interval(np.array([0, 3, 10, 0]), np.array([5, 10, 10, 0]), z=1.959963984540054)
    for i, (right, count) in enumerate([(0, 5), (3, 10), (10, 10)]):
        expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
        assert (low[i], high[i]) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert np.isnan(low[3])


def test_training_curves_take_what_there_is() -> None:
    trace = [
        {"step": 1, "loss": 0.7, "validation_ece": 0.2, "note": "text", "f": float("nan")},
        {"step": 2, "loss": 0.6},
        {"step": 3, "loss": 0.5, "validation_ece": 0.1, "validation_shift_ece": 0.3},
    ]
    image = training_curves(trace, "sft", kept_step=3)
    assert image is not None
    assert Image.open(io.BytesIO(image)).format == "PNG"
    assert training_curves([{"step": 1, "seconds": 3.0}]) is None
    assert training_curves([]) is None
