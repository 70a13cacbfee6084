"""Figures of a search: what each trial reached, with which parameters, and which of them mattered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.evaluation.plot_style import ACCURACY_COLOUR, COUNT_COLOUR, OVER_COLOUR, UNDER_COLOUR, new_figure, png
from components.evaluation.plot_style import styled as in_house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ECE, ACCURACY = "validation ECE", "validation accuracy"


@dataclass(frozen=True)
class SearchPoint:
    """A finished trial.

    Attributes:
        number: Its number.
        parameters: Value of each searched key.
        ece: On validation data, in [0, 1].
        accuracy: On validation data, in [0, 1].
        on_front: No trial beats it in one without losing in the other.
        is_best: The search's result.
    """

    number: int
    parameters: Mapping[str, bool | int | float | str]
    ece: float
    accuracy: float
    on_front: bool = False
    is_best: bool = False


def pareto_plot(points: Sequence[SearchPoint], floor: float | None = None) -> bytes:
    """PNG: ECE against accuracy, a dot for each trial, its number beside those of the front.

    Args:
        points: At least one.
        floor: Least accuracy that suffices, drawn as a line.
    """
    with in_house_style():
        figure = new_figure(5.2, 3.8)
        axes = figure.subplots()
        others = [p for p in points if not p.on_front]
        front = sorted((p for p in points if p.on_front), key=lambda p: p.ece)
        axes.scatter([p.ece for p in others], [p.accuracy for p in others], s=22, color=COUNT_COLOUR, label="trial")
        axes.plot(
            [p.ece for p in front],
            [p.accuracy for p in front],
            color=UNDER_COLOUR,
            marker="o",
            markersize=5,
            drawstyle="steps-post",
            linewidth=1.2,
            label="Pareto front",
        )
        for p in front:
            axes.annotate(str(p.number), (p.ece, p.accuracy), xytext=(4, 4), textcoords="offset points", fontsize=8)
        best = [p for p in points if p.is_best]
        axes.scatter(
            [p.ece for p in best],
            [p.accuracy for p in best],
            s=110,
            facecolors="none",
            edgecolors=OVER_COLOUR,
            linewidths=1.8,
            label="best",
        )
        if floor is not None:
            axes.axhline(floor, color=ACCURACY_COLOUR, linestyle="--", linewidth=1.2, label="accuracy required")
        axes.set_xlabel(ECE)
        axes.set_ylabel(ACCURACY)
        axes.set_title("Accuracy and calibration of the trials")
        axes.legend(loc="best")
        return png(figure)


def parallel_coordinates(points: Sequence[SearchPoint], log_keys: Sequence[str] = ()) -> bytes:
    """PNG: a line for each trial through the values of its parameters, its ECE and its accuracy.

    Args:
        points: At least one.
        log_keys: Parameters with a logarithmic axis.
    """
    keys = list(points[0].parameters)
    columns = [[p.parameters[key] for p in points] for key in keys]
    scaled = [_Scale.of(values, key in log_keys) for key, values in zip(keys, columns, strict=True)]
    scaled += [_Scale.of([p.ece for p in points], False), _Scale.of([p.accuracy for p in points], False)]
    with in_house_style():
        figure = new_figure(max(1.5 * len(scaled), 4.5), 3.8)
        axes = figure.subplots()
        axes.grid(False)
        for p in sorted(points, key=lambda p: (p.is_best, p.on_front)):
            values = [*(p.parameters[key] for key in keys), p.ece, p.accuracy]
            heights = [scale.height(value) for scale, value in zip(scaled, values, strict=True)]
            colour = OVER_COLOUR if p.is_best else UNDER_COLOUR if p.on_front else COUNT_COLOUR
            axes.plot(
                range(len(heights)),
                heights,
                color=colour,
                alpha=1.0 if p.is_best or p.on_front else 0.45,
                linewidth=2.2 if p.is_best else 1.2,
            )
        _axis_lines(axes, scaled)
        axes.set_xticks(range(len(scaled)), [*(key.replace(".", ".\n") for key in keys), "ECE", "accuracy"])
        axes.set_title("Trials: orange the best, blue the Pareto front")
        return png(figure)


def importance_plot(shares: Mapping[str, float]) -> bytes:
    """PNG: how much each parameter has to do with the ECE, as bars.

    Args:
        shares: By key; they sum to 1.
    """
    with in_house_style():
        figure = new_figure(5.2, 0.9 + 0.4 * len(shares))
        axes = figure.subplots()
        keys = sorted(shares, key=lambda key: shares[key])
        bars = axes.barh(keys, [shares[key] for key in keys], color=UNDER_COLOUR)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set_xlim(0, 1.08)
        axes.grid(False, axis="y")
        axes.set_xlabel("share of the variation in ECE")
        axes.set_title("Which parameter matters")
        return png(figure)


@dataclass(frozen=True)
class _Scale:
    """Puts the values of one axis into [0, 1]."""

    lowest: float
    highest: float
    log: bool
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[bool | int | float | str], log: bool) -> _Scale:
        if any(isinstance(value, (bool, str)) for value in values):
            names = tuple(sorted({str(value) for value in values}))
            return cls(0.0, float(len(names) - 1), False, names)
        numbers = [float(value) for value in values]
        return cls(min(numbers), max(numbers), log)

    def height(self, value: bool | int | float | str) -> float:
        at = float(self.names.index(str(value))) if self.names else float(value)
        low, high = self.lowest, self.highest
        if self.log:
            at, low, high = math.log(at), math.log(low), math.log(high)
        return (at - low) / (high - low) if high > low else 0.5

    def marks(self) -> list[tuple[float, str]]:
        if self.names:
            return [(self.height(name), name) for name in self.names]
        return [(self.height(end), f"{end:.3g}") for end in sorted({self.lowest, self.highest})]


def _axis_lines(axes: Axes, scales: Sequence[_Scale]) -> None:
    for position, scale in enumerate(scales):
        axes.axvline(position, color="#B8C0CC", linewidth=1, zorder=0)
        for height, text in scale.marks():
            axes.annotate(
                text,
                (position, height),
                xytext=(0, 5 if height >= 0.5 else -5),
                textcoords="offset points",
                ha="center",
                va="bottom" if height >= 0.5 else "top",
                fontsize=7,
            )
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
