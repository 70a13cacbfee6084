"""Expert load of a mixture of experts over its training, and its figure: did every expert get its part of tokens?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.errors import CaltuneError
from components.evaluation.checks import FloatArray, IntArray
from components.evaluation.plot_style import OVER_COLOUR, UNDER_COLOUR, line_look, new_figure, png, styled
from components.files import read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """What each of N experts of L routers received at S logged steps, in order.

    Attributes:
        steps: Optimiser steps taken, [S], S >= 1.
        share: Part of the router's (token, choice) pairs that went to the expert, [S, L, N]; adds up to 1 over experts,
            1 / N each when balanced.
        entropy: Mean entropy of the router's probabilities over tokens, [S, L], nats; ln N when indifferent.
    """

    steps: IntArray
    share: FloatArray
    entropy: FloatArray

    @classmethod
    def read(cls, path: Path) -> ExpertLoads:
        """Reads `expert_load.json`, which training wrote.

        Raises:
            CaltuneError: Missing, damaged, or its parts do not fit together.
        """
        content = read_json(path, remedy="train again")
        try:
            steps = np.asarray(content["steps"], dtype=np.int64)
            share = np.asarray(content["share"], dtype=np.float64)
            entropy = np.asarray(content["entropy"], dtype=np.float64)
        except (KeyError, ValueError, TypeError) as error:
            raise CaltuneError(f"{path} is no record of expert load: {error!r}; train again") from error
        if share.ndim != 3 or share.shape[:2] != entropy.shape or len(share) != steps.size or not share.size:
            raise CaltuneError(
                f"{path} is no record of expert load: {steps.size} steps, share of shape {share.shape}, entropy of "
                f"shape {entropy.shape}; train again"
            )
        return cls(steps, share, entropy)

    def served(self, top_k: int) -> FloatArray:
        """Part of a router's tokens that have the expert among their `top_k` at the last step, [L, N], in [0, 1].

        A token chooses an expert at most once, so no expert can have more than 1 / k of the choices.
        """
        return self.share[-1] * top_k

    def collapsed(self, top_k: int, limit: float) -> list[int]:
        """Routers, counted from 0, of which one expert serves more than the part `limit` of the tokens at the end."""
        return [int(router) for router in np.flatnonzero(self.served(top_k).max(axis=1) > limit)]

    def sentence(self, top_k: int, limit: float) -> str:
        """The state at the last step in words."""
        step, collapsed = int(self.steps[-1]), self.collapsed(top_k, limit)
        if not collapsed:
            busiest = 100 * float(self.served(top_k).max())
            return f"no router has collapsed at step {step}: the busiest expert serves {busiest:.0f} % of the tokens"
        one = len(collapsed) == 1
        return (
            f"router{'' if one else 's'} {', '.join(map(str, collapsed))} {'has' if one else 'have'} collapsed at step "
            f"{step}: one expert serves more than {100 * limit:g} % of the tokens"
        )


def expert_load_figure(loads: ExpertLoads, title: str = "") -> bytes:
    """PNG: each expert's share of the choices at the last step (routers by experts), and router entropy over the steps.

    White is an even share; the colour says how far above or below it an expert is.
    """
    _, routers, experts = loads.share.shape
    with styled():
        figure = new_figure(max(8.0, 4.6 + 0.36 * experts), max(3.2, 1.3 + 0.16 * routers))
        heat, line = figure.subplots(1, 2, width_ratios=[1.35, 1])
        _draw_shares(figure, heat, loads.share[-1])
        heat.set_title(f"Share of choices at step {loads.steps[-1]}")
        _draw_entropy(line, loads)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        return png(figure)


def _draw_shares(figure: Figure, axes: Axes, share: FloatArray) -> None:
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    routers, experts = share.shape
    even = 1 / experts
    colours = LinearSegmentedColormap.from_list("load", [UNDER_COLOUR, "#FFFFFF", OVER_COLOUR])
    # At least twice the even share, so that small differences do not fill the scale.
    norm = TwoSlopeNorm(even, vmin=0.0, vmax=max(2 * even, float(share.max())))
    image = axes.imshow(share, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xticks(np.arange(experts + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(routers + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#E4E8EE", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlim(-0.5, experts - 0.5)
    axes.set_ylim(routers - 0.5, -0.5)
    axes.set_xlabel("Expert")
    axes.set_ylabel("Router (first layer on top)")
    bar = figure.colorbar(image, ax=axes, ticks=[0.0, even, norm.vmax], shrink=0.9)
    bar.ax.set_yticklabels(["0", f"{even:.3g} (even)", f"{norm.vmax:.3g}"])
    bar.outline.set_visible(False)  # type: ignore[operator]


def _draw_entropy(axes: Axes, loads: ExpertLoads) -> None:
    from matplotlib.ticker import MaxNLocator

    marker = "o" if len(loads.steps) <= 20 else ""
    indifferent = math.log(loads.share.shape[2])
    for position, (label, values) in enumerate(
        (("mean of the routers", loads.entropy.mean(axis=1)), ("surest router", loads.entropy.min(axis=1)))
    ):
        axes.plot(loads.steps, values, marker=marker, markersize=3.5, label=label, **line_look(position))
    axes.axhline(indifferent, color="#596273", linewidth=1.0, linestyle=":", label="indifferent (ln N)")
    axes.set_ylim(0, max(1.08 * indifferent, 0.1))
    # However many routers make the heat map tall, this stays a small figure at its top.
    axes.set_box_aspect(0.7)
    axes.set_anchor("N")
    axes.set_title("Router entropy (nats)")
    axes.set_xlabel("Step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), handlelength=2.4, labelspacing=0.25)
