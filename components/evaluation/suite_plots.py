"""Figures of a suite: accuracy against ECE with the Pareto front, and the methods' ranks over data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from components.evaluation.display import Column
from components.evaluation.multiple_tests import critical_difference, mean_ranks
from components.evaluation.plot_style import ACCURACY_COLOUR, COUNT_COLOUR, OVER_COLOUR, UNDER_COLOUR, new_figure, png
from components.evaluation.plot_style import styled as in_house_style
from components.evaluation.suite_tables import SuiteTable, is_baseline

RANKED = ("ece", "top_label_brier_score")
"""Columns that ranks are drawn of; ECE alone rewards a constant."""


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names that nothing beats in one figure without losing in the other, by ascending ECE.

    Args:
        points: (ECE, accuracy) by name. Equal points are on the front together.
    """
    front = [
        name
        for name, (ece, accuracy) in points.items()
        if not any(
            other_ece <= ece and other_accuracy >= accuracy and (other_ece < ece or other_accuracy > accuracy)
            for other_ece, other_accuracy in points.values()
        )
    ]
    return sorted(front, key=lambda name: points[name])


def accuracy_ece_plot(table: SuiteTable) -> bytes:
    """PNG: mean ECE against mean accuracy of every row, whiskers of one standard deviation, the Pareto front drawn."""
    points = {row: (cells["ece"].mean, cells["accuracy"].mean) for row, cells in table.cells.items()}
    points = {row: point for row, point in points.items() if not any(math.isnan(value) for value in point)}
    front = pareto_front(points)
    with in_house_style():
        figure = new_figure(6.4, 4.6)
        axes = figure.subplots()
        axes.plot(
            [points[row][0] for row in front],
            [points[row][1] for row in front],
            color=ACCURACY_COLOUR,
            drawstyle="steps-post",
            linewidth=1.4,
            label="Pareto front",
            zorder=1,
        )
        for baseline, colour, label in ((True, COUNT_COLOUR, "baselines"), (False, OVER_COLOUR, "CALM, UQ4CT")):
            rows = [row for row in points if is_baseline(row) == baseline]
            if rows:
                axes.errorbar(
                    [points[row][0] for row in rows],
                    [points[row][1] for row in rows],
                    xerr=[np.nan_to_num(table.cells[row]["ece"].spread) for row in rows],
                    yerr=[np.nan_to_num(table.cells[row]["accuracy"].spread) for row in rows],
                    fmt="o",
                    markersize=5,
                    color=colour,
                    elinewidth=0.7,
                    label=label,
                )
        for row, (ece, accuracy) in points.items():
            weight = "bold" if row in front else "normal"
            axes.annotate(
                row, (ece, accuracy), xytext=(5, 4), textcoords="offset points", fontsize=7, fontweight=weight
            )
        axes.set_xlabel("ECE, mean over seeds (lower is better)")
        axes.set_ylabel("accuracy, mean over seeds")
        axes.set_title(table.title)
        axes.legend(loc="best")
        return png(figure)


def rank_plot(tables: Sequence[SuiteTable], column: Column) -> bytes | None:
    """PNG: rank of every method on every data set and its mean, with Nemenyi's critical difference as a bar.

    A rank is that of the mean over seeds. Methods that lack the figure on any table are left out.

    Args:
        tables: At least one; each split of each data set counts as a data set.
        column: Whose figures are ranked.

    Returns:
        None where fewer than two methods have the figure everywhere.
    """
    rows = [
        row
        for row in tables[0].cells
        if all(row in t.cells and not math.isnan(t.cells[row][column.metric].mean) for t in tables)
    ]
    if len(rows) < 2:
        return None
    sign = -1 if column.better == "higher" else 1
    ranks, means = mean_ranks(np.array([[sign * t.cells[row][column.metric].mean for row in rows] for t in tables]))
    order = np.argsort(-means, kind="stable")  # the best on top
    with in_house_style():
        figure = new_figure(6.4, 1.4 + 0.26 * len(rows))
        axes = figure.subplots()
        for height, index in enumerate(order):
            colour = UNDER_COLOUR if is_baseline(rows[index]) else OVER_COLOUR
            axes.scatter(ranks[:, index], [height] * len(tables), s=16, color=COUNT_COLOUR, alpha=0.6, linewidths=0)
            axes.scatter([means[index]], [height], s=48, color=colour, zorder=3)
        axes.set_yticks(range(len(rows)), [f"{rows[i]}  {means[i]:.2f}" for i in order])
        axes.set_xlabel(f"rank by {column.title} over {len(tables)} data sets (1 is best); large: mean, small: each")
        title = f"Ranks by {column.title}"
        if len(tables) > 1:
            width = critical_difference(len(rows), len(tables))
            best = float(means.min())
            axes.plot([best, best + width], [len(rows) - 0.3] * 2, color="#000000", linewidth=2.4)
            title += f"; bar: critical difference {width:.2f} (Nemenyi, 5 %)"
        axes.set_title(title)
        axes.set_ylim(-0.7, len(rows) + 0.2)
        return png(figure)
