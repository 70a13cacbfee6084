"""Training curves from a trace: one small panel for each quantity that the method logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.evaluation.plot_style import line_look, new_figure, png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Trace = Sequence[Mapping[str, Any]]
"""Rows with `step` and whatever was measured at it; a row need not have every key."""

_COLUMNS = 3


@dataclass(frozen=True)
class _Panel:
    """Quantities drawn together: those of training steps, and those of evaluations (`<split>/<metric>` in a trace)."""

    title: str
    steps: tuple[str, ...] = ()
    evaluations: tuple[str, ...] = ()

    def takes(self, key: str) -> bool:
        split, _, metric = key.rpartition("/")
        return metric in (self.evaluations if split else self.steps)


_PANELS = (
    _Panel("Training loss", ("loss",)),
    _Panel("Upper level f (negative entropy)", ("f",)),
    _Panel("Lower level g", ("g",)),
    _Panel("Cross-entropy", ("cross_entropy",)),
    _Panel("Cross-entropy of the questions", ("question_cross_entropy",)),
    _Panel("Cross-entropy against uniform", ("uniform_cross_entropy",)),
    _Panel("Calibration loss", ("calibration_loss",)),
    _Panel("Balance loss", ("balance_loss",)),
    _Panel("Router z-loss", ("z_loss",)),
    _Panel("Router confidence (FLC)", ("flc_mean", "correct_share"), ("flc_mean",)),
    _Panel("Spread of FLC over questions", ("flc_std",)),
    _Panel("Router entropy", ("router_entropy",)),
    _Panel("Largest share of first choices", ("max_expert_share",)),
    _Panel("Residual q", ("residual",)),
    _Panel("Multiplier lambda", ("lambda",)),
    _Panel("Mean temperature", ("mean_tau",)),
    _Panel("Offset norm", ("offset_norm",)),
    _Panel("Confidence and accuracy", ("mean_confidence", "accuracy"), ("mean_confidence", "accuracy")),
    _Panel("ECE", ("ece",), ("ece", "flc_ece")),
    _Panel("NLL", ("nll",), ("nll",)),
)


def training_curves(trace: Trace, title: str = "", kept_step: int | None = None) -> bytes | None:
    """PNG with a panel for each known quantity in the trace; None when it has none.

    Args:
        trace: Rows in order of `step`.
        title: Heading of the figure.
        kept_step: Step whose weights the method kept, marked by a vertical line.
    """
    panels = [(panel, _series(trace, panel)) for panel in _PANELS]
    panels = [(panel, series) for panel, series in panels if series]
    if not panels:
        return None
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    with styled():
        figure = new_figure(3.3 * columns, 2.7 * rows + 0.3)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (panel, series) in zip(grid, panels, strict=False):
            _draw(axes, panel.title, series, kept_step)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        heading = title if kept_step is None else f"{title} (dotted: step {kept_step}, kept)"
        figure.suptitle(heading, x=0.01, ha="left", fontweight="bold")
        return png(figure)


def _series(trace: Trace, panel: _Panel) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each key of the panel; values that are missing or not finite leave a gap."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in trace:
        for key, value in row.items():
            if panel.takes(key) and isinstance(value, int | float) and math.isfinite(value):
                steps, values = found.setdefault(key, ([], []))
                steps.append(int(row["step"]))
                values.append(float(value))
    return found


def _label(key: str) -> str:
    words = key.replace("/", " ").replace("_", " ").split()
    return " ".join(word.upper() if word in ("ece", "nll", "flc") else word for word in words)


def _draw(axes: Axes, title: str, series: dict[str, tuple[list[int], list[float]]], kept_step: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    for position, (key, (steps, values)) in enumerate(series.items()):
        # A few evaluations among many steps are points worth seeing; a line through hundreds needs no markers.
        marker = "o" if len(steps) <= 20 else ""
        axes.plot(steps, values, marker=marker, markersize=3.5, label=_label(key), **line_look(position))
    if kept_step is not None:
        axes.axvline(kept_step, color="#596273", linewidth=1.0, linestyle=":")
    axes.set_title(title)
    axes.set_xlabel("Step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), handlelength=2.4, labelspacing=0.25)
