"""The papers' tables: methods on one data set, mean and spread over seeds, and what differs from the best baseline.

One table for each split of each data set. In every column the baseline with the best mean over seeds is the reference,
and every other row is compared with it by `SeedBootstrap`; Holm's correction is over all comparisons of the table. The
reference is picked on the very figures it is then compared by, which favours the baselines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from components.evaluation.display import Column
from components.evaluation.intervals import PairedDifference
from components.evaluation.multiple_tests import holm
from components.evaluation.seed_bootstrap import SeedBootstrap, Side, mean_and_spread

OURS = ("calm", "uq4ct", "calm_uq4ct")
"""Methods that are compared with the baselines; everything else is one, a temperature on top of anything else too."""

COLUMNS = (
    Column("accuracy", "Accuracy", "higher"),
    Column("ece", "ECE", "lower"),
    Column("cw_ece", "cw-ECE", "lower"),
    Column("top_label_brier_score", "Brier", "lower"),
    Column("nll", "NLL", "lower"),
    Column("auroc", "AUROC", "higher"),
)
"""Of every table. Brier is that of (confidence, correct), which every confidence source has."""

DRAWS = 10_000
"""Bootstrap draws: enough that Holm's correction over a hundred comparisons can still find a difference."""


@dataclass(frozen=True)
class TableCell:
    """One figure of a table.

    Attributes:
        mean: Over seeds; NaN where undefined.
        spread: Sample standard deviation over seeds; NaN for a single seed.
        best: No row has a better mean; equals are best together.
        reference: The best baseline of this column, which the others are compared with.
        difference: To the reference, this row minus it; None for the reference and where undefined.
        adjusted_p: After Holm's correction over the table; None as for `difference`.
    """

    mean: float
    spread: float
    best: bool = False
    reference: bool = False
    difference: PairedDifference | None = None
    adjusted_p: float | None = None


@dataclass(frozen=True)
class SuiteTable:
    """Methods on one split of one data set.

    Attributes:
        data: Name of the data set.
        split: `id`, or an out-of-domain set.
        columns: Figures, in order.
        seeds: Seeds of each row, by its name.
        cells: By row name, then metric.
        level: Adjusted p-values below 1 - level count as a difference.
        comparisons: How many Holm's correction is over.
        draws: Bootstrap draws.
    """

    data: str
    split: str
    columns: tuple[Column, ...]
    seeds: Mapping[str, tuple[int, ...]]
    cells: Mapping[str, Mapping[str, TableCell]]
    level: float
    comparisons: int
    draws: int

    @property
    def title(self) -> str:
        """`<data>, <split>`."""
        return f"{self.data}, {self.split}"

    def verdict(self, row: str, column: Column) -> str:
        """`better` or `worse` than the best baseline after the correction, else nothing."""
        cell = self.cells[row][column.metric]
        if cell.difference is None or cell.adjusted_p is None or not cell.adjusted_p < 1 - self.level:
            return ""
        return "better" if (cell.difference.difference > 0) == (column.better == "higher") else "worse"

    def notes(self) -> list[str]:
        """How the figures were made, in sentences."""
        sentences = [
            "Mean over seeds and sample standard deviation; best in bold. The best baseline of each column is "
            "underlined. † better, ‡ worse than it: paired bootstrap over questions, each drawn together with all its "
            f"seeds and methods ({self.draws} draws), two-sided p below {1 - self.level:.2g} after Holm's correction "
            f"over the {self.comparisons} comparisons of this table. The seeds are taken as given."
        ]
        if self.comparisons * 2 / (self.draws + 1) >= 1 - self.level:
            sentences.append("With so few draws no difference can stand the correction; use more.")
        counts = {row: seeds for row, seeds in self.seeds.items() if len(seeds) < self.most_seeds}
        if counts:
            told = ", ".join(f"{row} ({len(seeds)})" for row, seeds in counts.items())
            sentences.append(f"Seeds are missing of {told}; others have {self.most_seeds}.")
        return sentences

    @property
    def most_seeds(self) -> int:
        """Seeds of the row that has most."""
        return max(len(seeds) for seeds in self.seeds.values())


def is_baseline(row: str) -> bool:
    """Whether a row (`<method>`, `<method>+<recalibration>`, `<method> (<source>)`) belongs to no method of `OURS`."""
    return row.partition("+")[0].partition(" ")[0] not in OURS


def build_table(
    data: str,
    split: str,
    sides: Mapping[str, Side],
    *,
    bins: int,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> SuiteTable:
    """Computes a table.

    Args:
        data: Name of the data set.
        split: Name of the split.
        sides: By row name, at least one.
        bins: Bins of the binned metrics.
        level: Coverage of intervals; adjusted p-values below 1 - level are marked.
        draws: Bootstrap draws.
        seed: Of the bootstrap.

    Raises:
        CaltuneError: Rows answered different questions with the same seed.
    """
    bootstrap = SeedBootstrap(sides, bins, draws, seed)
    cells: dict[str, dict[str, TableCell]] = {name: {} for name in sides}
    compared: list[tuple[str, str, PairedDifference]] = []
    for column in COLUMNS:
        figures = {name: mean_and_spread(side.values(column.metric, bins)) for name, side in sides.items()}
        best = _best({name: mean for name, (mean, _) in figures.items()}, column)
        reference = _best({name: mean for name, (mean, _) in figures.items() if is_baseline(name)}, column)[:1]
        for name, (mean, spread) in figures.items():
            cells[name][column.metric] = TableCell(mean, spread, name in best, name in reference)
            both = [name, *reference]
            if reference and name not in reference and not any(math.isnan(figures[each][0]) for each in both):
                compared.append((name, column.metric, bootstrap.difference(column.metric, name, reference[0], level)))
    for (name, metric, difference), p in zip(compared, holm([d.p_value for _, _, d in compared]), strict=True):
        before = cells[name][metric]
        cells[name][metric] = TableCell(before.mean, before.spread, before.best, before.reference, difference, p)
    seeds = {name: tuple(side.predictions) for name, side in sides.items()}
    return SuiteTable(data, split, COLUMNS, seeds, cells, level, len(compared), draws)


def _best(means: Mapping[str, float], column: Column) -> list[str]:
    """Rows with the best mean, up to rounding of a float; a lone row is best of nothing."""
    sign = 1 if column.better == "higher" else -1
    defined = {name: sign * mean for name, mean in means.items() if not math.isnan(mean)}
    if not defined:
        return []
    top = max(defined.values())
    return [name for name, value in defined.items() if np.isclose(value, top, rtol=1e-12, atol=1e-12)]
