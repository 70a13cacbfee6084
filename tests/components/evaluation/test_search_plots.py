"""Figures of a search: drawn for every shape of search space, the same bytes each time, and the best stands out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.evaluation.search_plots import SearchPoint, importance_plot, parallel_coordinates, pareto_plot

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def points() -> list[SearchPoint]:
    return [
        SearchPoint(
            n, {"calm.eta": 10.0**-n, "calm.head": head, "calm.inner_steps": 3}, 0.05 * n, 0.7 + 0.05 * n, n != 2
        )
        for n, head in enumerate(("scalar", "vocabulary", "scalar"), start=1)
    ]


def test_each_figure_is_a_png_and_equal_input_gives_equal_bytes(points):
    for draw in (
        lambda: pareto_plot(points, 0.8),
        lambda: parallel_coordinates(points, ["calm.eta"]),
        lambda: importance_plot({"calm.eta": 0.75, "calm.head": 0.25}),
    ):
        image = draw()
        assert image.startswith(SIGNATURE)
        assert image == draw()


def test_the_best_trial_the_front_and_the_required_accuracy_are_seen(points):
    marked = [replace(points[0], is_best=True), *points[1:]]
    plain = [replace(point, on_front=False) for point in points]
    assert len({pareto_plot(points), pareto_plot(marked), pareto_plot(plain), pareto_plot(points, 0.8)}) == 4
    assert len({parallel_coordinates(points), parallel_coordinates(marked), parallel_coordinates(plain)}) == 3


def test_a_logarithmic_axis_is_drawn_as_one(points):
    assert parallel_coordinates(points, ["calm.eta"]) != parallel_coordinates(points)


def test_one_trial_alone_can_be_drawn(points):
    assert pareto_plot(points[:1]).startswith(SIGNATURE)
    assert parallel_coordinates(points[:1], ["calm.eta"]).startswith(SIGNATURE)
