"""In domain against out of domain: what becomes of each method's calibration and accuracy when the questions change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.evaluation.display import Row
from components.evaluation.plot_style import PALETTE, UNDER_COLOUR, new_figure, png
from components.evaluation.plot_style import styled as in_house_style

IN_DOMAIN = "id"
_MARKERS = ("o", "s", "D", "^", "v", "P")
_SHOWN = (("ece", "ECE"), ("accuracy", "accuracy"), ("mean_confidence", "mean confidence"))


def shift_plot(rows: Sequence[Row], splits: Sequence[str]) -> bytes | None:
    """PNG: a line for each row from its figure in domain to those out of domain; ECE, accuracy, mean confidence.

    Args:
        rows: Of the main table.
        splits: Test splits.

    Returns:
        None without a split besides `id`, or without rows that have it.
    """
    others = [split for split in splits if split != IN_DOMAIN]
    shown = [row for row in rows if IN_DOMAIN in row.blocks and any(split in row.blocks for split in others)]
    if not shown:
        return None
    with in_house_style():
        figure = new_figure(9.6, 1.3 + 0.3 * len(shown))
        panels = figure.subplots(1, len(_SHOWN), sharey=True)
        for axes, (metric, title) in zip(panels, _SHOWN, strict=True):
            for height, row in enumerate(reversed(shown)):
                values = _values(row.blocks, metric)
                axes.plot(list(values.values()), [height] * len(values), color="#B8C0CC", zorder=1)
                for split, value in values.items():
                    at = -1 if split == IN_DOMAIN else others.index(split)
                    colour = UNDER_COLOUR if at < 0 else PALETTE[1 + at % (len(PALETTE) - 1)]
                    marker = _MARKERS[(at + 1) % len(_MARKERS)]
                    label = split if height == 0 else None
                    axes.scatter([value], [height], s=26, color=colour, marker=marker, label=label, zorder=2)
            axes.set_title(title)
        panels[0].set_yticks(range(len(shown)), [row.name for row in reversed(shown)])
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return png(figure)


def _values(blocks: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, float]:
    return {split: block[metric]["value"] for split, block in blocks.items() if block[metric]["value"] is not None}
