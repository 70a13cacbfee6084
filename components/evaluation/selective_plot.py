"""Risk-coverage curves of one method with the target and the thresholds marked, a panel for each split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from components.evaluation.plot_style import (
    ACCURACY_COLOUR,
    OVER_COLOUR,
    UNDER_COLOUR,
    new_figure,
    png,
    styled,
    unit_axis,
)
from components.evaluation.plots import Pair
from components.evaluation.ranking import risk_coverage_curve
from components.evaluation.selective import Achieved, achieved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GUARANTEED: dict[str, Any] = {"color": UNDER_COLOUR, "marker": "o", "label": "chosen threshold"}
_NAIVE: dict[str, Any] = {"color": OVER_COLOUR, "marker": "D", "label": "naive threshold"}
_TARGET: dict[str, Any] = {"color": "#2B3240", "linestyle": (0, (4, 3)), "linewidth": 1.0, "label": "target"}


def risk_coverage_with_thresholds(
    pairs: Mapping[str, Pair],
    threshold: float | None,
    naive: float | None,
    risk: float | None = None,
    coverage: float | None = None,
) -> bytes:
    """Draws the panels; the bars are 95 % Clopper-Pearson intervals of the risk. Returns PNG bytes.

    Args:
        pairs: (confidence, correct) by split.
        threshold: The policy's; None marks nothing, for nothing is answered.
        naive: The naive one; likewise.
        risk: Target, as a horizontal line.
        coverage: Target, as a vertical line.

    Raises:
        ValueError: No splits, or as for `risk_coverage_curve`.
    """
    if not pairs:
        raise ValueError("pairs is empty: there is nothing to draw")
    with styled():
        figure = new_figure(max(3.1 * len(pairs), 4.6), 3.6)
        panels = figure.subplots(1, len(pairs), sharey=True, squeeze=False)[0]
        for axes, (split, pair) in zip(panels, pairs.items(), strict=True):
            _curve(axes, pair)
            for at, look in ((naive, _NAIVE), (threshold, _GUARANTEED)):
                _mark(axes, achieved(*pair, at), look)
            if risk is not None:
                axes.axhline(risk, **_TARGET)
            if coverage is not None:
                axes.axvline(coverage, **_TARGET)
            unit_axis(axes, x=True)
            axes.set_title(split)
            axes.set_xlabel("Coverage (share answered)")
        panels[0].set_ylim(bottom=0)  # for all of them; set before the last one is drawn, it would hold the top too
        panels[0].set_ylabel("Risk (error rate among answers)")
        shown = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4)
        return png(figure)


def _curve(axes: Axes, pair: Pair) -> None:
    _, coverage, risk = risk_coverage_curve(*pair)
    shown = coverage >= 0.05  # the error rate of the first few answers jumps between 0 and 1
    axes.plot(coverage[shown], risk[shown], color=ACCURACY_COLOUR, label="every threshold")


def _mark(axes: Axes, found: Achieved, look: dict[str, Any]) -> None:
    """A point with its interval; a threshold that answers nothing stands in the legend alone."""
    if found.risk is None or found.risk_low is None or found.risk_high is None:
        axes.plot([], [], linestyle="", markersize=5, **look)
        return
    # Rounding can put a bound past the share it encloses; a bar has no negative length.
    bars = np.maximum([[found.risk - found.risk_low], [found.risk_high - found.risk]], 0.0)
    axes.errorbar([found.coverage], [found.risk], bars, fmt="", linestyle="", markersize=5, capsize=2, **look)
