"""The HTML report: one file with everything in it, no request to anywhere, and its figures beside it as PNG."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from components.data.schema import QuestionSet
from components.errors import CaltuneError
from components.evaluation import display
from components.evaluation.confident_errors import ConfidentError, confident_errors
from components.evaluation.expert_load import ExpertLoads, expert_load_figure
from components.evaluation.head_summary import HeadSummary
from components.evaluation.open_predictions import AnyPredictions, OpenPredictions
from components.evaluation.plot_style import DPI, save_png
from components.evaluation.plots import (
    Pair,
    confidence_histogram,
    reliability_diagram,
    reliability_grid,
    risk_coverage,
)
from components.evaluation.predictions import Predictions
from components.evaluation.ranking import coverage_at_risk
from components.evaluation.shift_plot import shift_plot
from components.evaluation.summary import rows_of_predictions, summarise
from components.evaluation.tables import low_mass_warnings
from components.evaluation.training_curves import Trace, training_curves
from components.files import replacing, write_json
from components.posthoc.flc_temperature import FlcTemperature
from components.posthoc.isotonic import IsotonicFit
from components.posthoc.temperature import FittedTemperature
from components.posthoc.vector_scaling import VectorScaling

RISKS = (0.05, 0.1, 0.2)
"""Error rates for which the report says how many questions can be answered."""
FLC_LEVELS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Router confidences for which the report gives the temperature."""
ISOTONIC_LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
"""Confidences for which the report gives what the step function makes of them."""


@dataclass(frozen=True)
class SplitFacts:
    """What the report says about one split."""

    name: str
    n: int
    source: str
    content_hash: str
    oddities: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, questions: QuestionSet) -> SplitFacts:
        """The facts of a question set."""
        return cls(questions.name, len(questions), questions.source, questions.content_hash, dict(questions.oddities))


@dataclass(frozen=True)
class TemperatureNote:
    """A fitted temperature and, in words, the data it was fitted on."""

    fitted: FittedTemperature
    data: str


@dataclass(frozen=True)
class VectorScalingNote:
    """Fitted scales and offsets and, in words, the data they were fitted on."""

    fitted: VectorScaling
    data: str


@dataclass(frozen=True)
class IsotonicNote:
    """A fitted step function and, in words, the data it was fitted on."""

    fitted: IsotonicFit
    data: str


@dataclass(frozen=True)
class FlcTemperatureNote:
    """Temperatures from router confidence: the reference data in words, and their mean on each test split."""

    fitted: FlcTemperature
    data: str
    means: Mapping[str, float]


@dataclass(frozen=True)
class ReportInputs:
    """Everything the report shows.

    Attributes:
        run: Name of the run.
        git_commit: Commit of the code, None outside a repository.
        config_hash: Hash of the resolved configuration.
        created: Date and time, as it should read.
        config_yaml: The resolved run file.
        predictions: By method, then split.
        metrics: Content of `metrics.json` by method, then split.
        comparisons: Rows of `summary.compare`.
        temperatures: By the name of the recalibrated method, e.g. `sft+temperature`.
        flc_temperatures: By the name of the recalibrated method, e.g. `uq4ct+flc_temperature`.
        vector_scalings: By the name of the recalibrated method, e.g. `sft+vector_scaling`.
        isotonic: By the name of the recalibrated method, e.g. `sft+isotonic`.
        chosen_sources: From `summary.choose_sources`.
        traces: Training trace by method.
        kept_steps: Step whose weights were kept, by method.
        expert_loads: By method, for methods with routers.
        experts_per_token: k of those routers.
        collapse_share: Part of a router's tokens above which one expert serves too many.
        splits: The data, test splits included.
        overlaps: Sentences on questions that stand in two splits.
        questions: Test questions by split, for the texts of those that are answered wrongly.
        heads: What each method's calibration head has learned.
    """

    run: str
    git_commit: str | None
    config_hash: str
    created: str
    config_yaml: str
    predictions: Mapping[str, Mapping[str, AnyPredictions]]
    metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]
    comparisons: Sequence[Mapping[str, Any]] = ()
    temperatures: Mapping[str, TemperatureNote] = field(default_factory=dict)
    flc_temperatures: Mapping[str, FlcTemperatureNote] = field(default_factory=dict)
    vector_scalings: Mapping[str, VectorScalingNote] = field(default_factory=dict)
    isotonic: Mapping[str, IsotonicNote] = field(default_factory=dict)
    chosen_sources: Mapping[str, str] = field(default_factory=dict)
    traces: Mapping[str, Trace] = field(default_factory=dict)
    kept_steps: Mapping[str, int] = field(default_factory=dict)
    expert_loads: Mapping[str, ExpertLoads] = field(default_factory=dict)
    experts_per_token: int = 2
    collapse_share: float = 0.9
    splits: Sequence[SplitFacts] = ()
    overlaps: Sequence[str] = ()
    questions: Mapping[str, QuestionSet] = field(default_factory=dict)
    heads: Mapping[str, HeadSummary] = field(default_factory=dict)


@dataclass(frozen=True)
class _Image:
    """A figure of the report: file name, what it shows in words, its bytes, and the split and method it belongs to."""

    name: str
    alt: str
    content: bytes
    split: str | None = None
    method: str | None = None

    @property
    def uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.content).decode()

    @property
    def width(self) -> int:
        """Width on the page in CSS pixels: the PNG's own (bytes 16 to 19 of its header) at the screen's 96 dpi."""
        return int.from_bytes(self.content[16:20], "big") * 96 // DPI


def write_report(inputs: ReportInputs, folder: Path) -> Path:
    """Writes `index.html`, its PNGs and `summary.json` into `folder`.

    Returns:
        Path of `index.html`.

    Raises:
        CaltuneError: There are no metrics or no predictions to report.
    """
    if not any(inputs.metrics.values()) or not any(inputs.predictions.values()):
        raise CaltuneError(f"run '{inputs.run}' has no evaluated method to report; evaluate one first")
    summary = summarise(inputs.run, inputs.metrics, inputs.comparisons, inputs.chosen_sources)
    images = _images(inputs)
    shift = shift_plot(display.rows_of(summary), display.splits_of(summary))
    images["shift"] = [] if shift is None else [_Image("shift.png", "In domain against out of domain", shift)]
    for group in images.values():
        for image in group:
            save_png(folder / image.name, image.content)
    # For slides and trackers; the page shows the same diagrams one by one, so that they fit a phone.
    save_png(folder / "reliability_grid.png", reliability_grid(_pairs(inputs), _bins(inputs)))
    write_json(folder / "summary.json", summary)
    index = folder / "index.html"
    with replacing(index) as temporary:
        temporary.write_text(_render(inputs, summary, images), encoding="utf-8")
    return index


def _render(inputs: ReportInputs, summary: Mapping[str, Any], images: Mapping[str, Sequence[_Image]]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["by_method"] = lambda images: [list(own) for _, own in groupby(images, key=lambda i: i.method)]
    source = files("components.evaluation").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        inputs=inputs,
        summary=summary,
        images=images,
        rows=display.rows_of(summary),
        splits=display.splits_of(summary),
        loads={
            method: loads.sentence(inputs.experts_per_token, inputs.collapse_share)
            for method, loads in inputs.expert_loads.items()
        },
        display=display,
        warnings=low_mass_warnings(summary),
        risks=RISKS,
        flc_levels=FLC_LEVELS,
        isotonic_levels=ISOTONIC_LEVELS,
        coverage=_coverage(inputs),
        errors=_errors(inputs),
        computed=_first_metrics(inputs)["computed"],
        bins_of={split: _bins(inputs, split) for split in display.splits_of(summary)},
        open_ended=_open_ended(inputs),
    )


def _images(inputs: ReportInputs) -> dict[str, list[_Image]]:
    """Figures by section of the page."""
    pairs = _pairs(inputs)
    splits = list(dict.fromkeys(split for by_split in pairs.values() for split in by_split))
    images: dict[str, list[_Image]] = {"training": [], "load": [], "risk": []}
    images["reliability"] = _of_each_row(inputs, "reliability", "Reliability diagram", reliability_diagram)
    images["confidence"] = _of_each_row(inputs, "confidence", "Confidence histogram", confidence_histogram)
    for split in splits:
        curve = risk_coverage({m: by_split[split] for m, by_split in pairs.items() if split in by_split}, split)
        name, alt = f"risk_coverage_{_slug(split)}.png", f"Risk-coverage curves on {split}"
        images["risk"].append(_Image(name, alt, curve, split))
    for method, trace in inputs.traces.items():
        curves = training_curves(trace, method, inputs.kept_steps.get(method))
        if curves is not None:
            images["training"].append(_Image(f"training_{_slug(method)}.png", f"Training curves of {method}", curves))
    for method, loads in inputs.expert_loads.items():
        figure = expert_load_figure(loads, method)
        images["load"].append(
            _Image(f"expert_load_{_slug(method)}.png", f"Expert load of {method}", figure, method=method)
        )
    return images


def _of_each_row(
    inputs: ReportInputs, section: str, words: str, draw: Callable[[ArrayLike, ArrayLike, int, str], bytes]
) -> list[_Image]:
    """A figure for each confidence source of each method on each split."""
    return [
        _Image(
            f"{section}_{_slug(row)}_{_slug(split)}.png",
            f"{words} of {row}, {split}",
            draw(found.confidence(source), found.correctness(source), _bins(inputs, split), f"{row}, {split}"),
            split,
            method,
        )
        for method, by_split in inputs.predictions.items()
        for split, found in by_split.items()
        for row, source in rows_of_predictions(method, found)
    ]


def _pairs(inputs: ReportInputs) -> dict[str, dict[str, Pair]]:
    """(confidence, correct) by row of the main table, then split."""
    pairs: dict[str, dict[str, Pair]] = {}
    for method, by_split in inputs.predictions.items():
        for split, found in by_split.items():
            for row, source in rows_of_predictions(method, found):
                pairs.setdefault(row, {})[split] = (found.confidence(source), found.correctness(source))
    return pairs


def _errors(inputs: ReportInputs) -> dict[str, list[ConfidentError]]:
    """The most over-confident errors of each split with options; recalibrated methods take part."""
    by_split: dict[str, dict[str, Predictions]] = {}
    for method, own in inputs.predictions.items():
        for split, found in own.items():
            if isinstance(found, Predictions):
                by_split.setdefault(split, {})[method] = found
    return {split: confident_errors(found, inputs.questions.get(split)) for split, found in by_split.items()}


def _coverage(inputs: ReportInputs) -> dict[str, dict[str, list[float]]]:
    """Share of questions that can be answered at each of `RISKS`, by row and split."""
    return {
        row: {split: [coverage_at_risk(*pair, risk) for risk in RISKS] for split, pair in by_split.items()}
        for row, by_split in _pairs(inputs).items()
    }


def _first_metrics(inputs: ReportInputs) -> Mapping[str, Any]:
    """One `metrics.json`: settings are the same throughout a run."""
    return next(content for by_split in inputs.metrics.values() for content in by_split.values())


def _open_ended(inputs: ReportInputs) -> list[str]:
    """Splits that were answered in the model's own words."""
    found = [s for own in inputs.predictions.values() for s, of in own.items() if isinstance(of, OpenPredictions)]
    return list(dict.fromkeys(found))


def _bins(inputs: ReportInputs, split: str | None = None) -> int:
    """Bins of a split, or of the first."""
    of_split = [by_split[split] for by_split in inputs.metrics.values() if split and split in by_split]
    return int((of_split or [_first_metrics(inputs)])[0]["computed"]["bins"])


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
