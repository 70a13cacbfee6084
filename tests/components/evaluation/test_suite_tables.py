"""Tables over seeds: the figures of synthetic predictions, who is marked, and the three formats."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.errors import CaltuneError
from components.evaluation.intervals import paired_bootstrap
from components.evaluation.predictions import Predictions
from components.evaluation.seed_bootstrap import SeedBootstrap, Side
from components.evaluation.suite_plots import accuracy_ece_plot, pareto_front, rank_plot
from components.evaluation.suite_tables import COLUMNS, build_table, is_baseline
from components.evaluation.table_files import as_csv, escape, latex, markdown, write_tables

ECE, ACCURACY = COLUMNS[1], COLUMNS[0]


def certain(right: list[bool], confidence: float, ids: str = "q") -> Predictions:
    """Two options, the first one right; the answer has the stated confidence."""
    p = np.where(np.array(right)[:, None], [confidence, 1 - confidence], [1 - confidence, confidence])
    n = len(right)
    return Predictions(tuple(f"{ids}{i}" for i in range(n)), np.zeros(n, int), np.log(p), np.ones(n), (None,) * n)


def sides(**of: list[Predictions]) -> dict[str, Side]:
    return {name: Side(dict(enumerate(found)), "softmax") for name, found in of.items()}


def test_mean_and_spread_by_hand():
    """Three of four right at .75: ECE 0. Two of four at .75: ECE .25. Mean .125, sample deviation .25 / sqrt(2)."""
    found = [certain([True, True, True, False], 0.75), certain([True, True, False, False], 0.75)]
    table = build_table("d", "id", sides(sft=found), bins=10, draws=100)
    ece, accuracy = (table.cells["sft"][column.metric] for column in (ECE, ACCURACY))
    assert (ece.mean, ece.spread) == pytest.approx((0.125, 0.25 / np.sqrt(2)))
    assert (accuracy.mean, accuracy.spread) == pytest.approx((0.625, 0.125 * np.sqrt(2)))
    assert "0.125 ± 0.177" in markdown(table)
    assert table.comparisons == 0


def test_one_seed_is_the_paired_bootstrap(simulate):
    a, b = simulate(80), simulate(80, sharpening=3.0)
    config = EvaluationConfig(bootstrap=500)
    bootstrap = SeedBootstrap(sides(a=[a], b=[b]), config.bins, 500, seed=4)
    for metric in ("ece", "accuracy", "nll"):
        assert bootstrap.difference(metric, "a", "b", config.level) == paired_bootstrap(metric, a, b, config, 4)


def test_a_question_counts_alike_in_every_seed(simulate):
    """Twice the same answers are no more evidence than once; other questions with the second seed are."""
    a, b = simulate(60), simulate(60, sharpening=3.0)

    def width(*, same: bool) -> float:
        def again(found: Predictions) -> Predictions:
            return found if same else replace(found, ids=tuple(f"other{i}" for i in range(len(found))))

        found = SeedBootstrap(sides(a=[a, again(a)], b=[b, again(b)]), 15, 1000, 0).difference("nll", "a", "b", 0.95)
        return found.ci_high - found.ci_low

    alone = SeedBootstrap(sides(a=[a], b=[b]), 15, 1000, 0).difference("nll", "a", "b", 0.95)
    assert width(same=True) == pytest.approx(alone.ci_high - alone.ci_low)
    assert width(same=False) == pytest.approx(width(same=True) / np.sqrt(2), rel=0.1)


def test_seeds_that_only_one_has_are_left_out_of_the_comparison(simulate):
    a, b = simulate(40), simulate(40, sharpening=3.0)
    both = {"a": Side({0: a, 1: simulate(40, seed=1)}, "softmax"), "b": Side({0: b}, "softmax")}
    one = SeedBootstrap(sides(a=[a], b=[b]), 15, 200, 0).difference("ece", "a", "b", 0.95)
    assert SeedBootstrap(both, 15, 200, 0).difference("ece", "a", "b", 0.95).difference == one.difference
    assert "b (1)" in " ".join(build_table("d", "id", both, bins=15, draws=100).notes())


def test_other_questions_with_the_same_seed_are_refused():
    with pytest.raises(CaltuneError, match="different questions with seed 0"):
        SeedBootstrap(sides(a=[certain([True], 0.7)], b=[certain([True], 0.7, "z")]), 15, 100, 0)


def test_the_best_baseline_is_the_reference_and_a_clear_difference_is_marked(simulate):
    """calm is calibrated, sft three times too sharp, base five times; all answer alike, so accuracy ties everywhere."""
    rows = {"base": 5.0, "sft": 3.0, "calm": 1.0}
    found = {name: [simulate(400, sharpening=s, seed=i) for i in range(2)] for name, s in rows.items()}
    table = build_table("d", "id", sides(**found), bins=15, draws=2000)
    assert [row for row in rows if table.cells[row]["ece"].reference] == ["sft"]
    assert [table.verdict(row, ECE) for row in rows] == ["worse", "", "better"]
    assert [row for row in rows if table.cells[row]["ece"].best] == ["calm"]
    assert [row for row in rows if table.cells[row]["accuracy"].best] == list(rows)
    assert [table.verdict(row, ACCURACY) for row in rows] == ["", "", ""]
    assert table.comparisons == 2 * len(COLUMNS)
    assert table.cells["calm"]["ece"].adjusted_p >= table.cells["calm"]["ece"].difference.p_value
    assert pareto_front({row: (c["ece"].mean, c["accuracy"].mean) for row, c in table.cells.items()}) == ["calm"]


def test_an_undefined_figure_is_neither_best_nor_compared(simulate):
    found = simulate(50, flc=0.5)
    table = build_table(
        "d", "id", {"sft": Side({0: found}, "softmax"), "uq4ct (flc)": Side({0: found}, "flc")}, bins=15, draws=100
    )
    cell = table.cells["uq4ct (flc)"]["nll"]
    assert (cell.best, cell.difference) == (False, None)
    assert "n/a" in markdown(table)
    assert table.comparisons == len(COLUMNS) - 2  # no NLL and no class-wise ECE of router confidence
    assert "no difference can stand" in " ".join(table.notes())


@pytest.mark.parametrize(
    ("row", "baseline"),
    [
        ("sft", True),
        ("base+temperature", True),
        ("calm", False),
        ("uq4ct (flc)", False),
        ("calm_uq4ct+isotonic", False),
    ],
)
def test_whose_row_it_is(row, baseline):
    assert is_baseline(row) == baseline


def test_latex_is_escaped_and_booktabs():
    assert escape(r"50 % of a_b & \x{}~^#$") == (
        r"50 \% of a\_b \& \textbackslash{}x\{\}\textasciitilde{}\textasciicircum{}\#\$"
    )
    found = certain([True, True, False, False], 0.6)
    text = latex(build_table("a_b & c", "id", sides(**{"label_smoothing": [found], "calm_uq4ct": [found]}), bins=5))
    assert r"a\_b \& c" in text
    assert r"label\_smoothing &" in text
    assert r"\textbf{\underline{0.500}}" in text
    assert text.count(r"\\") == 3
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in body} == {len(COLUMNS)}
    assert [rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [True] * 3


def test_files_hold_every_table_and_all_digits(tmp_path, simulate):
    tables = [
        build_table(name, "id", sides(sft=[simulate(30)], calm=[simulate(30, sharpening=2.0)]), bins=15, draws=100)
        for name in ("one", "two")
    ]
    write_tables(tables, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "tables.csv").read_text())))
    assert len(rows) == 2 * 2 * len(COLUMNS)
    assert float(rows[1]["mean"]) == tables[0].cells["sft"]["ece"].mean
    assert rows[1]["std"] == ""
    assert (tmp_path / "tables.tex").read_text().count(r"\begin{table}") == 2
    assert (tmp_path / "tables.md").read_text().count("## ") == 2
    assert as_csv(tables).count("\n") == len(rows) + 1


def test_points_alike_are_on_the_front_together():
    points = {"a": (0.1, 0.5), "b": (0.1, 0.5), "worse": (0.1, 0.4), "accurate": (0.3, 0.9), "beaten": (0.4, 0.9)}
    assert pareto_front(points) == ["a", "b", "accurate"]


def test_figures_are_drawn(simulate):
    tables = [
        build_table(name, "id", sides(sft=[simulate(30)], calm=[simulate(30, sharpening=2.0)]), bins=15, draws=100)
        for name in ("one", "two")
    ]
    for image in (accuracy_ece_plot(tables[0]), rank_plot(tables, ECE), rank_plot(tables[:1], ECE)):
        assert image.startswith(b"\x89PNG")
    lone = [build_table("d", "id", sides(sft=[simulate(30)]), bins=15, draws=100)]
    assert rank_plot(lone, ECE) is None
