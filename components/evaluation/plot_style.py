"""Look of every figure: one palette that colour-blind readers can tell apart, no global matplotlib state."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, without its yellow, which is too faint for lines on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")
ACCURACY_COLOUR, UNDER_COLOUR, OVER_COLOUR, COUNT_COLOUR = "#56B4E9", "#0072B2", "#D55E00", "#7A869A"

DPI = 144
"""Pixels an inch; one and a half of a plain screen's, so that text stays sharp on finer ones."""

_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#596273",
    "axes.labelcolor": "#2B3240",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E8EE",
    "grid.linewidth": 0.8,
    "xtick.color": "#596273",
    "ytick.color": "#596273",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.6,
}


@contextmanager
def styled() -> Iterator[None]:
    """Applies the house settings to figures made and filled inside the block."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, drawn by Agg whatever the display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save_png(path: Path, image: bytes) -> None:
    """Writes the image, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(image)


def line_look(position: int) -> dict[str, Any]:
    """Colour and dash of the line at this position; dashes change with every colour, so grey prints stay readable."""
    return {"color": PALETTE[position % len(PALETTE)], "linestyle": LINE_STYLES[position % len(LINE_STYLES)]}


def unit_axis(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Fixes an axis to [0, 1] with ticks at the fifths."""
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    if x:
        axes.set_xlim(0, 1)
        axes.set_xticks(ticks)
    if y:
        axes.set_ylim(0, 1)
        axes.set_yticks(ticks)
