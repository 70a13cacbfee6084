"""Figures of (confidence, correct) pairs: reliability diagrams, confidence histograms, risk-coverage curves.

Each function returns PNG bytes. matplotlib is imported when a figure is drawn, never before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from components.evaluation.calibration_error import ReliabilityTable, reliability_table
from components.evaluation.checks import FloatArray, IntArray, outcomes
from components.evaluation.plot_style import (
    ACCURACY_COLOUR,
    COUNT_COLOUR,
    OVER_COLOUR,
    UNDER_COLOUR,
    line_look,
    new_figure,
    png,
    styled,
    unit_axis,
)
from components.evaluation.ranking import aurc, risk_coverage_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Pair = tuple[ArrayLike, ArrayLike]
"""(confidence [n], correct [n])."""


def reliability_diagram(confidence: ArrayLike, correct: ArrayLike, bins: int = 15, title: str = "") -> bytes:
    """Accuracy per confidence bin against the diagonal, its gap to mean confidence hatched, the counts below.

    Solid is what accuracy and confidence share. The whiskers are 95 % Wilson intervals of each bin's accuracy; the ECE
    stands in the title.

    Raises:
        ValueError: As for `reliability_table`.
    """
    with styled():
        figure = new_figure(3.0, 4.0)
        _reliability(figure, confidence, correct, bins, title)
        _legend(figure, columns=2)
        return png(figure, dpi=160)


def reliability_grid(pairs: Mapping[str, Mapping[str, Pair]], bins: int = 15) -> bytes:
    """Reliability diagrams of every method (columns) on every split (rows).

    Args:
        pairs: (confidence, correct) by method, then split.
        bins: Bins of equal width.

    Raises:
        ValueError: No methods, or as for `reliability_table`.
    """
    if not pairs:
        raise ValueError("pairs is empty: there is nothing to draw")
    splits = list(dict.fromkeys(split for by_split in pairs.values() for split in by_split))
    with styled():
        figure = new_figure(max(3.0 * len(pairs), 5.5), 3.6 * len(splits) + 0.4)
        cells = figure.subfigures(len(splits), len(pairs), squeeze=False)
        for column, (method, by_split) in enumerate(pairs.items()):
            for row, split in enumerate(splits):
                if split in by_split:
                    _reliability(cells[row][column], *by_split[split], bins, f"{method}, {split}")
        _legend(figure, columns=5)
        return png(figure, dpi=110)


def confidence_histogram(confidence: ArrayLike, correct: ArrayLike, bins: int = 15, title: str = "") -> bytes:
    """How often each confidence was stated, right and wrong answers stacked.

    Raises:
        ValueError: As for `reliability_table`.
    """
    confidence_n, correct_n = outcomes(confidence, correct)
    edges = np.linspace(0, 1, bins + 1)
    with styled():
        figure = new_figure(3.6, 2.6)
        axes = figure.subplots()
        axes.hist(
            [confidence_n[correct_n == 1], confidence_n[correct_n == 0]],
            bins=edges.tolist(),
            stacked=True,
            color=[ACCURACY_COLOUR, OVER_COLOUR],
            edgecolor="white",
            linewidth=0.6,
            label=["right", "wrong"],
        )
        unit_axis(axes, x=True)
        axes.set_xlabel("Confidence")
        axes.set_ylabel("Questions")
        axes.set_title(title)
        axes.legend(loc="upper left")
        return png(figure)


def risk_coverage(pairs: Mapping[str, Pair], title: str = "") -> bytes:
    """Error rate among the most confident answers, over the share answered; one line a method, AURC in the legend.

    Raises:
        ValueError: No methods, or as for `risk_coverage_curve`.
    """
    if not pairs:
        raise ValueError("pairs is empty: there is nothing to draw")
    with styled():
        figure = new_figure(4.6, 3.8)
        axes = figure.subplots()
        highest = 0.0
        for position, (method, (confidence, correct)) in enumerate(pairs.items()):
            _, coverage, risk = risk_coverage_curve(confidence, correct)
            axes.plot(coverage, risk, label=f"{method} ({aurc(confidence, correct):.3f})", **line_look(position))
            highest = max(highest, float(np.max(risk[coverage >= 0.05], initial=risk[-1])))
        unit_axis(axes, x=True)
        # The first few answers make the error rate jump between 0 and 1; they may leave the frame.
        axes.set_ylim(0, min(1.0, 1.15 * highest + 0.02))
        axes.set_xlabel("Coverage (share of questions answered)")
        axes.set_ylabel("Risk (error rate among them)")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=2, title="method (AURC)", title_fontsize=8)
        return png(figure)


def wilson_interval(right: IntArray | FloatArray, count: IntArray, z: float = 1.96) -> tuple[FloatArray, FloatArray]:
    """Wilson's (1927) score interval of a share, within [0, 1]; NaN where `count` is 0.

    Args:
        right: Successes, [b].
        count: Trials, [b].
        z: Normal quantile; 1.96 for 95 %.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        share = right / count
        scale = 1 + z**2 / count
        centre = (share + z**2 / (2 * count)) / scale
        half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / scale
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def _reliability(figure: Figure | SubFigure, confidence: ArrayLike, correct: ArrayLike, bins: int, title: str) -> None:
    table = reliability_table(confidence, correct, bins)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    _draw_gaps(upper, table)
    upper.set_ylabel("Accuracy")
    unit_axis(upper, x=True, y=True)
    heading = f"ECE {table.calibration_error:.3f}"
    upper.set_title(f"{title}\n{heading}" if title else heading)
    _draw_counts(lower, table)
    lower.set_xlabel("Confidence")


def _draw_gaps(axes: Axes, table: ReliabilityTable) -> None:
    filled = table.count > 0
    left, width = table.lower[filled], (table.upper - table.lower)[filled]
    accuracy, confidence = table.accuracy[filled], table.confidence[filled]
    agreed = np.minimum(accuracy, confidence)
    axes.bar(left, agreed, width, align="edge", color=ACCURACY_COLOUR, edgecolor="white", lw=0.6)
    for gap, colour in ((confidence - accuracy, OVER_COLOUR), (accuracy - confidence, UNDER_COLOUR)):
        shown = gap > 0
        look = _gap_look(colour)
        axes.bar(left[shown], gap[shown], width[shown], bottom=agreed[shown], align="edge", **look)
    low, high = wilson_interval(accuracy * table.count[filled], table.count[filled])
    # Rounding can put a bound past the accuracy it encloses by one ulp; a whisker has no negative length.
    whiskers = np.maximum([accuracy - low, high - accuracy], 0.0)
    axes.errorbar(left + width / 2, accuracy, whiskers, **_DOT_LOOK, elinewidth=0.9, capsize=1.5)
    axes.plot([0, 1], [0, 1], color="#2B3240", linestyle=(0, (4, 3)), linewidth=1.0)


def _draw_counts(axes: Axes, table: ReliabilityTable) -> None:
    axes.bar(
        table.lower, table.count, table.upper - table.lower, align="edge", color=COUNT_COLOUR, edgecolor="white", lw=0.6
    )
    n = int(table.count.sum())
    filled = table.count > 0
    share = table.count[filled] / n
    axes.axvline(float(share @ table.accuracy[filled]), **_ACCURACY_LINE)
    axes.axvline(float(share @ table.confidence[filled]), **_CONFIDENCE_LINE)
    axes.set_ylabel(f"n = {n}")


_DOT_LOOK: dict[str, Any] = {"fmt": "o", "markersize": 2.5, "color": "#1C2230"}
_ACCURACY_LINE: dict[str, Any] = {"color": UNDER_COLOUR, "linewidth": 1.6, "linestyle": "-"}
_CONFIDENCE_LINE: dict[str, Any] = {"color": OVER_COLOUR, "linewidth": 1.6, "linestyle": "--"}


def _gap_look(colour: str) -> dict[str, Any]:
    from matplotlib.colors import to_rgb

    return {"facecolor": (*to_rgb(colour), 0.15), "edgecolor": colour, "hatch": "////", "linewidth": 0.6}


def _legend(figure: Figure, columns: int) -> None:
    """One key below everything; made by hand, so that a gap that a diagram lacks is explained all the same."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(label="over-confident", **_gap_look(OVER_COLOUR)),
        Patch(label="under-confident", **_gap_look(UNDER_COLOUR)),
        Line2D([], [], label="overall accuracy", **_ACCURACY_LINE),
        Line2D([], [], label="overall confidence", **_CONFIDENCE_LINE),
        Line2D([], [], label="accuracy in bin", marker="o", markersize=2.5, color="#1C2230", linewidth=0.9),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=7, columnspacing=1.2)
