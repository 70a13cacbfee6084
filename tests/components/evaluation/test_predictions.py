"""Predictions: what is derived from option scores, what is refused, and the Parquet file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.errors import DataError
from components.evaluation.predictions import Predictions, read_predictions, write_predictions

Simulate = Callable[..., Predictions]


@pytest.fixture
def ragged() -> Predictions:
    """Three options, then two; the second question is answered wrongly."""
    scores = np.log([[0.1, 0.2, 0.1], [0.3, 0.1, 1.0]])
    scores[1, 2] = -np.inf
    return Predictions(("a", "b"), np.array([1, 1]), scores, np.array([0.4, 0.4]), ("capital", None))


def test_derived_values(ragged: Predictions) -> None:
    """Renormalised over the options present: .1 .2 .1 -> 1/4 1/2 1/4, and .3 .1 -> 3/4 1/4."""
    np.testing.assert_allclose(ragged.probabilities, [[0.25, 0.5, 0.25], [0.75, 0.25, 0.0]])
    assert ragged.n_options.tolist() == [3, 2]
    assert ragged.answer.tolist() == [1, 0]
    assert ragged.correct.tolist() == [True, False]
    np.testing.assert_allclose(ragged.confidence(), [0.5, 0.75])


def test_the_first_of_equal_options_is_the_answer() -> None:
    tied = Predictions(("a",), np.array([1]), np.zeros((1, 3)), np.array([1.0]), (None,))
    assert tied.answer.tolist() == [0]


def test_tempering_flattens_and_keeps_answers(simulate: Simulate) -> None:
    sharp = simulate(sharpening=3.0)
    flat = sharp.tempered(3.0)
    np.testing.assert_array_equal(flat.answer, sharp.answer)
    np.testing.assert_allclose(flat.probabilities, simulate(sharpening=1.0).probabilities, atol=1e-12)
    assert (flat.confidence() <= sharp.confidence()).all()


def test_very_small_scores_do_not_underflow() -> None:
    """A long option text can have a log-probability far below what exp can hold; only differences matter."""
    low = Predictions(("a",), np.array([0]), np.array([[-2000.0, -2001.0]]), np.array([0.0]), (None,))
    assert low.confidence()[0] == pytest.approx(1 / (1 + np.exp(-1)))


def test_file_gives_back_what_was_written(ragged: Predictions, tmp_path: Path) -> None:
    path = tmp_path / "evaluation" / "id" / "predictions.parquet"
    write_predictions(path, ragged)
    back = read_predictions(path)
    assert (back.ids, back.groups) == (ragged.ids, ragged.groups)
    np.testing.assert_array_equal(back.gold, ragged.gold)
    np.testing.assert_array_equal(back.option_log_probs, ragged.option_log_probs)
    np.testing.assert_array_equal(back.option_mass, ragged.option_mass)
    assert list(path.parent.iterdir()) == [path]


def test_file_has_the_contracts_columns(ragged: Predictions, tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.parquet", ragged)
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert rows[1]["id"] == "b"
    assert (rows[1]["answer"], rows[1]["gold"], rows[1]["correct"]) == (0, 1, False)
    assert rows[1]["confidence_softmax"] == pytest.approx(0.75)
    assert rows[1]["probabilities"] == pytest.approx([0.75, 0.25])


def test_damaged_files_are_named(ragged: Predictions, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    with pytest.raises(DataError, match="cannot be read"):
        read_predictions(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"p\.parquet.*cannot be read"):
        read_predictions(path)
    write_predictions(path, ragged)
    pq.write_table(pq.read_table(path).drop_columns(["option_mass"]), path)
    with pytest.raises(DataError, match=r"'option_mass'.*missing"):
        read_predictions(path)


def test_an_interrupted_write_leaves_the_old_file(
    ragged: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.parquet"
    write_predictions(path, ragged)
    before = path.read_bytes()

    def full_disk(table: object, where: Path) -> None:
        where.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_predictions(path, ragged)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"option_log_probs": np.array([[np.nan, 0, 0], [0, 0, 0]])}, "'a': a log-probability is NaN"),
        ({"option_log_probs": np.full((2, 3), -np.inf)}, "'a': it has no option"),
        ({"option_log_probs": np.array([[0, 0, 0], [-np.inf, 0, 0]])}, "'b': an option before its last"),
        ({"option_log_probs": np.zeros((3, 3))}, "matrix of 2 rows"),
        ({"gold": np.array([0, 2])}, "'b': gold is option 2"),
        ({"gold": np.array([0, 7])}, r"gold\[1\] is 7"),
        ({"option_mass": np.array([0.5, 1.5])}, r"option_mass\[1\] is 1.5"),
        ({"option_mass": np.array([0.5])}, "2 ids, but 1 entries"),
        ({"ids": ("a", "a")}, "ids repeat"),
        ({"flc": np.array([0.5, 1.1])}, r"flc\[1\] is 1.1"),
        ({"flc": np.array([np.nan, 0.5])}, r"flc\[0\] is nan"),
        ({"flc": np.array([0.5])}, "2 ids, but 1 entries in flc"),
    ],
)
def test_bad_values_are_named(ragged: Predictions, change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(ragged, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf])
def test_bad_temperatures_are_refused(ragged: Predictions, temperature: float) -> None:
    for given in (temperature, np.array([1.0, temperature])):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            ragged.tempered(given)


def test_each_question_may_have_a_temperature_of_its_own(ragged: Predictions) -> None:
    """At T = .5 probabilities are squared: .1 .2 .1 -> 1/6 4/6 1/6. At T = 1 .3 .1 stay 3/4 1/4."""
    tempered = ragged.tempered(np.array([0.5, 1.0]))
    np.testing.assert_allclose(tempered.probabilities, [[1 / 6, 4 / 6, 1 / 6], [0.75, 0.25, 0.0]])
    np.testing.assert_array_equal(tempered.answer, ragged.answer)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_temperatures_fit_the_questions(ragged: Predictions, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be one number or 2"):
        ragged.tempered(np.ones(shape))


def test_unknown_confidence_source_is_refused(ragged: Predictions) -> None:
    with pytest.raises(ValueError, match=r"there is: softmax$"):
        ragged.confidence("flc")
    with pytest.raises(ValueError, match="there is: softmax, flc"):
        replace(ragged, flc=np.array([0.5, 0.5])).confidence("router")


def test_router_confidence_is_a_second_source_and_changes_no_answer(ragged: Predictions) -> None:
    routed = replace(ragged, flc=np.array([0.9, 0.3]))
    assert routed.sources == ("softmax", "flc")
    np.testing.assert_array_equal(routed.confidence("flc"), [0.9, 0.3])
    np.testing.assert_array_equal(routed.confidence(), ragged.confidence("softmax"))
    np.testing.assert_array_equal(routed.answer, ragged.answer)


def test_a_temperature_leaves_softmax_alone_as_source(ragged: Predictions) -> None:
    assert replace(ragged, flc=np.array([0.9, 0.3])).tempered(2.0).sources == ("softmax",)


@pytest.mark.parametrize("flc", [np.array([0.1 + 0.2, 1 / 3]), None])
def test_confidences_are_in_the_file(ragged: Predictions, tmp_path: Path, flc: np.ndarray | None) -> None:
    """A column for each source there is, none for one there is not; no rounding on the way."""
    written = replace(ragged, flc=flc)
    write_predictions(tmp_path / "p.parquet", written)
    columns = {c for c in pq.read_table(tmp_path / "p.parquet").column_names if c.startswith("confidence_")}
    assert columns == {f"confidence_{s}" for s in written.sources}
    back = read_predictions(tmp_path / "p.parquet")
    assert back.sources == written.sources
    np.testing.assert_array_equal(back.flc, flc)


def test_a_damaged_router_confidence_is_named(ragged: Predictions, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_predictions(path, replace(ragged, flc=np.array([0.9, 0.3])))
    table = pq.read_table(path)
    gap = table.set_column(table.column_names.index("confidence_flc"), "confidence_flc", [[None, 0.3]])
    pq.write_table(gap, path)
    with pytest.raises(DataError, match=r"flc\[0\] is nan"):
        read_predictions(path)
