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
from components.evaluation.expert_load import ExpertLoads
from components.evaluation.metrics_file import evaluate_predictions
from components.evaluation.predictions import Predictions
from components.evaluation.report import (
    FlcTemperatureNote,
    IsotonicNote,
    ReportInputs,
    SplitFacts,
    TemperatureNote,
    VectorScalingNote,
    write_report,
)
from components.evaluation.summary import compare, summarise
from components.evaluation.tables import low_mass_warnings, print_summary
from components.evaluation.training_curves import training_curves
from components.posthoc.flc_temperature import FlcTemperature
from components.posthoc.isotonic import IsotonicFit
from components.posthoc.temperature import FittedTemperature
from components.posthoc.vector_scaling import VectorScaling

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
    def row(name: str, accuracy: float, ece: float | None) -> display.Row:
        figures = (("accuracy", accuracy), ("ece", ece), ("mean_confidence", 1))
        return display.Row(name, {"id": {name: {"value": value} for name, value in figures}})

    rows = [row("a", 0.8, 0.1), row("b", 0.7, 0.05), row("c", 0.8, None)]
    accuracy, confidence, ece, _ = display.COLUMNS
    assert [display.is_best(rows, r, "id", accuracy) for r in rows] == [True, False, True]
    assert [display.is_best(rows, r, "id", ece) for r in rows] == [False, True, False]
    assert not any(display.is_best(rows, r, "id", confidence) for r in rows)


def _routed_run(simulate: Simulate, **more: Any) -> ReportInputs:
    """`sft`, and `uq4ct` with router confidence, of which `flc` was chosen, and tempered by it."""
    flc = np.random.default_rng(0).uniform(0.5, 0.9, 80)
    uq4ct = {"id": simulate(80, sharpening=2.5, flc=flc), "ood": simulate(80, sharpening=3.5, seed=1, flc=flc)}
    predictions = {
        "sft": {"id": simulate(80, sharpening=3.0), "ood": simulate(80, sharpening=4.0, seed=1)},
        "uq4ct": uq4ct,
        "uq4ct+flc_temperature": {split: found.tempered(1 / flc) for split, found in uq4ct.items()},
    }
    metrics = {
        method: {split: evaluate_predictions(found, CONFIG, 0) for split, found in by_split.items()}
        for method, by_split in predictions.items()
    }
    pairs = [("uq4ct (flc)", "sft"), ("uq4ct+flc_temperature", "uq4ct")]
    settings: dict[str, Any] = {"predictions": predictions, "metrics": metrics, "chosen_sources": {"uq4ct": "flc"}}
    return _run(simulate, **{**settings, "comparisons": compare(predictions, pairs, CONFIG, 0), **more})


def test_report_shows_every_source(simulate: Simulate, tmp_path: Path) -> None:
    even = np.full((2, 3, 4), 0.25)
    inputs = _routed_run(
        simulate,
        expert_loads={"uq4ct": ExpertLoads(np.array([0, 40]), even, np.full((2, 3), 1.3))},
    )
    index = write_report(inputs, tmp_path)
    page = _Page(index.read_text())
    assert page.open == []
    words = " ".join(page.words)
    assert re.search(r"uq4ct \(flc\) +chosen", words)
    assert index.read_text().count('<span class="chosen">') == 2, "in the main table and in the sources' table"
    for expected in (
        "Where confidence comes from",
        "uq4ct: no router has collapsed at step 40: the busiest expert serves 50 % of the tokens",
    ):
        assert expected in words
    for block in inputs.metrics["uq4ct"]["ood"]["sources"].values():
        for column in display.SOURCE_COLUMNS:
            assert display.number(block[column.metric]["value"]) in page.words
    pngs = {path.name for path in tmp_path.glob("*.png")}
    assert {"reliability_uq4ct-flc_id.png", "confidence_uq4ct-flc_ood.png", "expert_load_uq4ct.png"} <= pngs
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["chosen_sources"] == {"uq4ct": "flc"}
    assert summary["sources"]["uq4ct"]["flc"]["id"] == inputs.metrics["uq4ct"]["id"]["sources"]["flc"]


def test_report_shows_temperatures_from_router_confidence(simulate: Simulate, tmp_path: Path) -> None:
    """T falls from 4 at FLC .4 to 1 at .7 and beyond, evenly in log T: 2.52 = 4^(2/3) at .5, 1.59 = 4^(1/3) at .6."""
    fitted = FlcTemperature([0.0, float(np.log(4))], [0.7, 0.4], 137)
    note = FlcTemperatureNote(fitted, "calibration", {"id": 1.25, "ood": 2.75})
    inputs = _routed_run(simulate, flc_temperatures={"uq4ct+flc_temperature": note})
    page = _Page(write_report(inputs, tmp_path).read_text())
    assert page.open == []
    words = [word for word in page.words if word]
    at = words.index("Temperatures from router confidence")
    assert "no label takes part" in " ".join(words[at + 1].split())
    row = at + words[at:].index("uq4ct+flc_temperature")
    figures = ["4.00", "2.52", "1.59", "1.00", "1.00", "1.00", "1.25", "2.75"]
    assert words[row + 1 : row + 11] == ["calibration", "137", *figures]


def test_report_shows_scales_offsets_and_steps(simulate: Simulate, tmp_path: Path) -> None:
    """At 1 / T = .5 two positions; of steps that go from .2 at .5 to .8 at .9, .35 at .6 and .8 from .9 on."""
    scaling = VectorScaling([0.75, 0.25], [0.5, -0.5], 2.0, 0.9, 0.8, 0.7, 120, 9, True)
    steps = IsotonicFit([0.5, 0.9], [0.2, 0.8], 121)
    inputs = _run(
        simulate,
        vector_scalings={"sft+vector_scaling": VectorScalingNote(scaling, "validation")},
        isotonic={"sft+isotonic": IsotonicNote(steps, "validation and validation_shift")},
    )
    page = _Page(write_report(inputs, tmp_path).read_text())
    assert page.open == []
    words = [word for word in page.words if word]
    row = words.index("sft+vector_scaling")
    numbers = ["validation", "120", "0.50", "0.75 0.25", "+0.50 -0.50", "0.900", "0.800", "0.700"]
    assert words[row + 1 : row + 9] == numbers
    row = words.index("sft+isotonic")
    numbers = ["validation and validation_shift", "121", "0.20", "0.20", "0.20", "0.35", "0.50", "0.65", "0.80", "0.80"]
    assert words[row + 1 : row + 11] == numbers


def test_both_sources_of_a_method_stand_side_by_side(simulate: Simulate, tmp_path: Path) -> None:
    """In each of two sections and two splits one pair, softmax first."""
    text = write_report(_routed_run(simulate), tmp_path).read_text()
    pairs = re.findall(r'<div class="pair">(.*?)</div>', text, re.DOTALL)
    found = [re.findall(r'alt="([^"]*)"', pair) for pair in pairs]
    assert found == [
        [f"{words} of uq4ct, {split}", f"{words} of uq4ct (flc), {split}"]
        for words in ("Reliability diagram", "Confidence histogram")
        for split in ("id", "ood")
    ]


def test_a_run_without_routers_says_nothing_of_them(simulate: Simulate, tmp_path: Path) -> None:
    body = write_report(_run(simulate), tmp_path).read_text().split("</style>")[1]
    assert not re.search(r"router|flc|chosen|Expert load", body)


def test_a_collapsed_router_is_a_warning(simulate: Simulate, tmp_path: Path) -> None:
    share = np.array([[[0.25] * 4, [0.5, 0.5, 0, 0]]])
    loads = ExpertLoads(np.array([9]), share, np.ones((1, 2)))
    text = write_report(_routed_run(simulate, expert_loads={"uq4ct": loads}), tmp_path).read_text()
    assert '<p class="warning">uq4ct: router 1 has collapsed at step 9' in text
    calm = write_report(_routed_run(simulate, expert_loads={"uq4ct": loads}, experts_per_token=1), tmp_path).read_text()
    assert "has collapsed at step 9:" in calm
    assert '<p class="warning">uq4ct' not in calm


def test_terminal_table_has_a_row_for_each_source_and_marks_the_chosen(simulate: Simulate) -> None:
    inputs = _routed_run(simulate)
    summary = summarise("quick", inputs.metrics, inputs.comparisons, {"uq4ct": "flc"})
    assert [(row.name, row.chosen) for row in display.rows_of(summary)] == [
        ("sft", False),
        ("uq4ct", False),
        ("uq4ct (flc)", True),
        ("uq4ct+flc_temperature", False),
    ]
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    print_summary(summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    row = next(line for line in text.splitlines() if "uq4ct (flc) *" in line)
    flc = inputs.metrics["uq4ct"]["id"]["sources"]["flc"]
    assert row.split()[3:] == [display.number(flc[c.metric]["value"]) for c in display.COLUMNS]
    assert row.split()[-1] == "n/a"
    assert "* the method's confidence with the lowest Brier score on validation data" in text
    assert re.search(r"uq4ct \(flc\) - sft +ECE", text)


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        ("ece", -0.2, -0.1, "a better"),
        ("ece", 0.1, 0.2, "b better"),
        ("accuracy", 0.1, 0.2, "a better"),
        ("nll", 0.1, 0.2, "b better"),
        ("ece", -0.1, 0.1, "no clear difference"),
        ("top_label_brier_score", 0.1, 0.2, "b better"),
        ("auroc", 0.1, 0.2, "a better"),
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
        {"step": 1, "loss": 0.7, "validation/ece": 0.2, "note": "text", "f": float("nan")},
        {"step": 2, "loss": 0.6},
        {"step": 3, "loss": 0.5, "validation/ece": 0.1, "validation_shift/ece": 0.3},
    ]
    image = training_curves(trace, "sft", kept_step=3)
    assert image is not None
    assert Image.open(io.BytesIO(image)).format == "PNG"
    assert training_curves([{"step": 1, "seconds": 3.0}]) is None
    assert training_curves([]) is None


@pytest.mark.parametrize(
    "key",
    [
        *("loss", "cross_entropy", "balance_loss", "calibration_loss", "z_loss", "flc_mean", "flc_std"),
        *("correct_share", "router_entropy", "max_expert_share", "f", "g", "lambda", "mean_tau"),
        *("validation/ece", "validation/nll", "validation/accuracy", "validation/mean_confidence"),
        *("validation/flc_ece", "validation_shift/flc_mean"),
    ],
)
def test_every_traced_quantity_has_a_panel(key: str) -> None:
    assert training_curves([{"step": 1, key: 0.5}, {"step": 2, key: 0.4}]) is not None


def test_a_metric_of_an_evaluation_is_not_one_of_a_step() -> None:
    assert training_curves([{"step": 1, "validation/loss": 0.5}]) is None
    assert training_curves([{"step": 1, "flc_ece": 0.5}]) is None
