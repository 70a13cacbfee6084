"""The windows of a prediction log as curves: confidence beside accuracy, calibration, and what abstaining gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.evaluation.plot_style import line_look, new_figure, png, styled, unit_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from components.registry.monitoring import Window

CALIBRATION = "Calibration"
_COLUMNS = 3


def monitoring_plot(windows: Sequence[Window]) -> bytes:
    """Three panels over the rows of the log; a curve has a gap where a window lacks what it takes. Returns PNG bytes.

    Args:
        windows: At least one.
    """
    first = windows[0]
    confident: dict[str, list[float | None]] = {}
    calibrated: dict[str, list[float | None]] = {}
    for source in first.sources:
        own = [window.sources[source] for window in windows]
        confident[f"{source} confidence"] = [figures.mean_confidence for figures in own]
        calibrated[f"{source} ECE"] = [figures.ece for figures in own]
        calibrated[f"{source} Brier"] = [figures.brier for figures in own]
    confident["accuracy"] = [window.accuracy for window in windows]
    panels = {
        "Confidence and accuracy": confident,
        CALIBRATION: calibrated,
        "Abstaining": {
            "abstained": [window.abstained for window in windows],
            "risk among answers": [window.risk for window in windows],
        },
    }
    at = [window.last for window in windows]
    with styled():
        figure = new_figure(3.2 * _COLUMNS, 3.4)
        for axes, (title, curves) in zip(figure.subplots(1, _COLUMNS), panels.items(), strict=True):
            _panel(axes, title, at, curves)
        _risk_interval(figure.axes[-1], at, windows)
        return png(figure)


def _panel(axes: Axes, title: str, at: Sequence[int], curves: dict[str, list[float | None]]) -> None:
    for position, (label, values) in enumerate(curves.items()):
        if all(value is None for value in values):
            continue
        drawn = np.array([np.nan if value is None else value for value in values])
        axes.plot(at, drawn, marker="o", markersize=3, label=label, **line_look(position))
    unit_axis(axes, y=True)
    axes.set_title(title)
    axes.set_xlabel("Answers so far")
    if axes.lines:
        axes.legend()
    else:
        axes.text(
            0.5, 0.5, "no labels yet" if title == CALIBRATION else "no policy", ha="center", transform=axes.transAxes
        )


def _risk_interval(axes: Axes, at: Sequence[int], windows: Sequence[Window]) -> None:
    bounds = [
        [np.nan if bound is None else bound for bound in (window.risk_low, window.risk_high)] for window in windows
    ]
    low, high = np.array(bounds).T
    axes.fill_between(at, low, high, color=line_look(1)["color"], alpha=0.15, linewidth=0)
