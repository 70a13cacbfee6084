"""What a method said about each question of a split, and the Parquet file that keeps it.

Everything reported later (confidence, correctness, metrics, plots) is computed from this and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.errors import DataError
from components.evaluation.checks import BoolArray, FloatArray, IntArray, gold_indices, unit_interval
from components.files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

SOFTMAX, FLC = "softmax", "flc"
"""Confidence sources: the answer's probability among the options, which stands for a method where only one figure is
shown; the routers' confidence in the prompt (UQ4CT's functional-level confidence)."""
STORED = ("id", "group", "gold", "option_mass", "option_log_probs")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Scores of n questions with up to K options.

    Attributes:
        ids: Question ids, n of them, no two equal.
        gold: Right option of each question, int [n].
        option_log_probs: Log-probability of each option in nats, up to a constant per question, float64 [n, K]; -inf
            after a question's last option.
        option_mass: Probability that the model puts on the options together, before renormalising, [n], in [0, 1].
        groups: Relation or subject of each question, n of them, None where the source has none.
        flc: Router confidence, [n], in [0, 1]; None for a method without routers.

    Raises:
        ValueError: Lengths differ, ids repeat, NaN, a question without options or with a gap between them, gold at an
            absent option, a confidence outside [0, 1].
    """

    ids: tuple[str, ...]
    gold: IntArray
    option_log_probs: FloatArray
    option_mass: FloatArray
    groups: tuple[str | None, ...]
    flc: FloatArray | None = None

    def __post_init__(self) -> None:
        """Checks shapes and values, and gives every array its exact type."""
        n = len(self.ids)
        scores = np.asarray(self.option_log_probs, dtype=np.float64)
        if scores.ndim != 2 or len(scores) != n:
            raise ValueError(f"option_log_probs must be a matrix of {n} rows (one an id), not of shape {scores.shape}")
        self._refuse_bad_scores(scores)
        mass = unit_interval(self.option_mass, "option_mass")
        if len(mass) != n or len(self.groups) != n:
            raise ValueError(f"{n} ids, but {len(mass)} entries in option_mass and {len(self.groups)} groups")
        if len(set(self.ids)) != n:
            raise ValueError("ids repeat: every question needs its own")
        gold = gold_indices(self.gold, *scores.shape)
        absent = np.flatnonzero(np.isneginf(scores[np.arange(n), gold]))
        if absent.size:
            raise ValueError(f"question '{self.ids[absent[0]]}': gold is option {gold[absent[0]]}, which it lacks")
        for name, value in (("gold", gold), ("option_log_probs", scores), ("option_mass", mass)):
            object.__setattr__(self, name, value)
        if self.flc is not None:
            flc = unit_interval(self.flc, "flc")
            if len(flc) != n:
                raise ValueError(f"{n} ids, but {len(flc)} entries in flc")
            object.__setattr__(self, "flc", flc)

    def _refuse_bad_scores(self, scores: FloatArray) -> None:
        present = ~np.isneginf(scores)
        problems = {
            "a log-probability is NaN or +inf": (np.isnan(scores) | np.isposinf(scores)).any(axis=1),
            "it has no option with a log-probability above -inf": ~present.any(axis=1),
            "an option before its last one has log-probability -inf": (present[:, 1:] & ~present[:, :-1]).any(axis=1),
        }
        for problem, rows in problems.items():
            if rows.any():
                raise ValueError(f"option_log_probs, question '{self.ids[int(np.argmax(rows))]}': {problem}")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def n_options(self) -> IntArray:
        """Options of each question, [n]."""
        return (~np.isneginf(self.option_log_probs)).sum(axis=1).astype(np.int64)

    @cached_property
    def log_probabilities(self) -> FloatArray:
        """Log-softmax over the options present, [n, K]; -inf where an option is absent."""
        shifted = self.option_log_probs - self.option_log_probs.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    @cached_property
    def probabilities(self) -> FloatArray:
        """Softmax over the options present, [n, K]; 0 where an option is absent, rows add up to one."""
        return np.minimum(np.exp(self.log_probabilities), 1.0)

    @cached_property
    def answer(self) -> IntArray:
        """Most probable option of each question, [n]; the first of equals."""
        return self.option_log_probs.argmax(axis=1).astype(np.int64)

    @cached_property
    def correct(self) -> BoolArray:
        """Whether the answer is right, [n]."""
        return self.answer == self.gold

    def correctness(self, source: str | None = None) -> BoolArray:
        """Whether the answer is right, [n]; the answer is the most probable option whatever the source.

        Raises:
            ValueError: There is no such source.
        """
        self.named(source)
        return self.correct

    @property
    def sources(self) -> tuple[str, ...]:
        """Confidence sources there are; the first is the primary one, which tables and comparisons take by default."""
        return (SOFTMAX,) if self.flc is None else (SOFTMAX, FLC)

    def confidence(self, source: str | None = None) -> FloatArray:
        """Confidence in the answer, [n], in [0, 1]. The answer is the most probable option whatever the source.

        Args:
            source: One of `sources`; None takes the primary one.

        Raises:
            ValueError: There is no such source.
        """
        if self.named(source) == FLC and self.flc is not None:
            return self.flc
        return self.probabilities.max(axis=1)

    def named(self, source: str | None) -> str:
        """The source itself, or the primary one for None.

        Raises:
            ValueError: There is no such source.
        """
        return named_among(self.sources, source)

    def tempered(self, temperature: float | FloatArray) -> Predictions:
        """The same questions with scores divided by `temperature`; answers and option mass stay as they are.

        Softmax is the only source of the result: a temperature of the scores leaves a router's confidence as it is,
        and that stands with the method it came from.

        Args:
            temperature: One for all questions, or one each, [n].

        Raises:
            ValueError: A temperature is not a positive number, or there are neither one nor n of them.
        """
        divisor = np.asarray(temperature, dtype=np.float64)
        if divisor.shape not in ((), (len(self),)):
            raise ValueError(f"temperature has shape {divisor.shape}, but must be one number or {len(self)}")
        bad = divisor[~(np.isfinite(divisor) & (divisor > 0))]
        if bad.size:
            raise ValueError(f"temperature is {bad[0]}, but must be a positive number")
        per_question = np.broadcast_to(divisor, len(self))[:, None]
        return self.rescored(self.option_log_probs / per_question)

    def rescored(self, option_log_probs: FloatArray) -> Predictions:
        """The same questions with other scores of their options; option mass stays, the softmax is the only source.

        Args:
            option_log_probs: Log-probabilities in nats, up to a constant per question, [n, K]; -inf where an option is
                absent.

        Raises:
            ValueError: As for the class.
        """
        return replace(self, option_log_probs=option_log_probs, flc=None)


def named_among(sources: Sequence[str], source: str | None) -> str:
    """The source itself, or the first of `sources` for None.

    Raises:
        ValueError: There is no such source.
    """
    if source is not None and source not in sources:
        raise ValueError(f"no confidence source '{source}'; there is: {', '.join(sources)}")
    return source or sources[0]


def write_predictions(path: Path, predictions: Predictions) -> None:
    """Writes the Parquet file; lists hold a question's own options, without padding."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def options_of(matrix: FloatArray) -> list[FloatArray]:
        return [row[:k] for row, k in zip(matrix, predictions.n_options, strict=True)]

    columns = {
        "id": pa.array(predictions.ids, pa.string()),
        "group": pa.array(predictions.groups, pa.string()),
        "answer": pa.array(predictions.answer),
        "gold": pa.array(predictions.gold),
        "correct": pa.array(predictions.correct),
        **{f"confidence_{source}": pa.array(predictions.confidence(source)) for source in predictions.sources},
        "option_mass": pa.array(predictions.option_mass),
        "probabilities": pa.array(options_of(predictions.probabilities), pa.list_(pa.float64())),
        "option_log_probs": pa.array(options_of(predictions.option_log_probs), pa.list_(pa.float64())),
    }
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def read_table(path: Path) -> pa.Table:
    """Reads a Parquet file of predictions.

    Raises:
        DataError: The file is missing or is not Parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(path, None, None, f"cannot be read as Parquet: {error}", "evaluate again") from error


def rows_of(path: Path, table: pa.Table, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Columns of a table of predictions, as Python values.

    Args:
        path: Where it was read from, for the error.
        table: From `read_table`.
        columns: Names of those wanted.

    Raises:
        DataError: A column is missing.
    """
    for column in columns:
        if column not in table.column_names:
            raise DataError(path, None, column, "column is missing", "evaluate again")
    return {column: table.column(column).to_pylist() for column in columns}


def read_predictions(path: Path) -> Predictions:
    """Reads what `write_predictions` wrote; what follows from the scores is computed anew, not trusted.

    Raises:
        DataError: The file is missing, is not Parquet, lacks a column, or holds values that cannot be right.
    """
    return predictions_in(path, read_table(path))


def predictions_in(path: Path, table: pa.Table) -> Predictions:
    """Predictions from what `read_table` read; errors as of `read_predictions`."""
    rows = rows_of(path, table, STORED)
    stated = f"confidence_{FLC}"
    flc = np.array(table.column(stated), np.float64) if stated in table.column_names else None
    widest = max((len(scores) for scores in rows["option_log_probs"]), default=0)
    padded = np.full((table.num_rows, widest), -np.inf)
    for i, scores in enumerate(rows["option_log_probs"]):
        padded[i, : len(scores)] = scores
    try:
        return Predictions(
            tuple(rows["id"]),
            np.array(rows["gold"]),
            padded,
            np.array(rows["option_mass"]),
            tuple(rows["group"]),
            flc,
        )
    except ValueError as error:
        raise DataError(path, None, None, str(error), "evaluate again") from error
