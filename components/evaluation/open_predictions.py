"""What a method answered to each open-ended question of a split, in its own words, and the Parquet file that keeps it.

Confidence comes from the probability of the greedy answer or from the agreement of sampled ones. The latter says how
likely the answer is that most samples give, so that answer is what it is judged by: unlike among options, what is right
depends on the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from components.errors import DataError
from components.evaluation.checks import BoolArray, FloatArray, IntArray, unit_interval
from components.evaluation.predictions import (
    FLC,
    Predictions,
    named_among,
    predictions_in,
    read_table,
    rows_of,
    write_predictions,
)
from components.evaluation.semantic.confidence import likelihood_entropy, sem1, sem2, semantic_entropy
from components.files import replacing

SEMANTIC, SEMANTIC_SPLIT, SEQUENCE, SEQUENCE_SUM = "semantic", "semantic_split", "sequence", "sequence_sum"
"""Confidence sources: Sem1 and Sem2, the share of the samples that agree; the greedy answer's probability, as the
geometric mean over its tokens, and as it is."""
JUDGED_BY_SAMPLES = (SEMANTIC, SEMANTIC_SPLIT)
_LISTS = ("samples", "sample_log_probs", "sample_tokens", "classes")
_COLUMNS = ("id", "group", "question", "answer", "log_prob", "tokens", *_LISTS, "correct", "samples_correct")


@dataclass(frozen=True, eq=False)
class OpenPredictions:
    """Generated answers to n questions.

    Attributes:
        ids: Question ids, n of them, no two equal.
        groups: Relation or subject of each question, None where the source has none.
        questions: Their texts.
        answers: Greedy answers.
        log_probs: Log-probability of each greedy answer in nats, [n], finite.
        tokens: Tokens of each greedy answer, [n].
        samples: Sampled answers of each question, at least two.
        sample_log_probs: Log-probability of each sample in nats.
        sample_tokens: Tokens of each sample.
        classes: Class of equal meaning of each sample, as `semantic/clustering.py` numbers them.
        answer_right: Whether the greedy answer is right, [n].
        samples_right: Whether the answer that most samples give is right, [n].
        flc: Router confidence, [n], in [0, 1]; None for a method without routers.

    Raises:
        ValueError: Lengths differ, ids repeat, a log-probability is positive or not finite, or there are too few
            samples.
    """

    ids: tuple[str, ...]
    groups: tuple[str | None, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    log_probs: FloatArray
    tokens: IntArray
    samples: tuple[tuple[str, ...], ...]
    sample_log_probs: tuple[tuple[float, ...], ...]
    sample_tokens: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    answer_right: BoolArray
    samples_right: BoolArray
    flc: FloatArray | None = None

    def __post_init__(self) -> None:
        """Checks shapes and values, and gives every array its exact type."""
        types = {"log_probs": np.float64, "tokens": np.int64, "answer_right": np.bool_, "samples_right": np.bool_}
        for name, kind in types.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        n = len(self.ids)
        for name in ("groups", "questions", "answers", *types, *_LISTS):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{n} ids, but {len(getattr(self, name))} entries in {name}")
        if len(set(self.ids)) != n:
            raise ValueError("ids repeat: every question needs its own")
        of_samples = zip(self.samples, self.sample_log_probs, self.sample_tokens, self.classes, strict=True)
        for i, own in enumerate(of_samples):
            if len({len(values) for values in own}) != 1 or len(own[0]) < 2:
                raise ValueError(f"question '{self.ids[i]}': it needs two samples at least, each with all its figures")
            figures = np.array([self.log_probs[i], *own[1]])
            if not (np.isfinite(figures) & (figures <= 0)).all() or min(self.tokens[i], *own[2]) < 1:
                raise ValueError(f"question '{self.ids[i]}': an answer has no possible log-probability or no tokens")
        if self.flc is not None:
            object.__setattr__(self, "flc", unit_interval(self.flc, "flc"))
            if len(self.flc) != n:
                raise ValueError(f"{n} ids, but {len(self.flc)} entries in flc")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sources(self) -> tuple[str, ...]:
        """Confidence sources there are; the first is the primary one (Sem1: inferred from what CALM reports)."""
        own = (SEMANTIC, SEMANTIC_SPLIT, SEQUENCE, SEQUENCE_SUM)
        return own if self.flc is None else (*own, FLC)

    @cached_property
    def _confidences(self) -> dict[str, FloatArray]:
        found = {
            SEMANTIC: np.array([sem1(own) for own in self.classes]),
            SEMANTIC_SPLIT: np.array([sem2(own) for own in self.classes]),
            SEQUENCE: np.exp(self.log_probs / self.tokens),
            SEQUENCE_SUM: np.exp(self.log_probs),
        }
        return found if self.flc is None else {**found, FLC: self.flc}

    def confidence(self, source: str | None = None) -> FloatArray:
        """Confidence, [n], in [0, 1]: in the answer of most samples for the semantic sources, else in the greedy one.

        Args:
            source: One of `sources`; None takes the primary one.

        Raises:
            ValueError: There is no such source.
        """
        return self._confidences[self.named(source)]

    def correctness(self, source: str | None = None) -> BoolArray:
        """Whether the answer that the source is about is right, [n]; arguments and errors as for `confidence`."""
        return self.samples_right if self.named(source) in JUDGED_BY_SAMPLES else self.answer_right

    def named(self, source: str | None) -> str:
        """The source itself, or the primary one for None.

        Raises:
            ValueError: There is no such source.
        """
        return named_among(self.sources, source)

    @property
    def option_mass(self) -> FloatArray:
        """NaN, [n]: there are no options to hold any probability."""
        return np.full(len(self), np.nan)

    @cached_property
    def entropies(self) -> dict[str, FloatArray]:
        """Semantic entropy of each question in nats: over the counts of its samples and over their likelihoods."""
        mean_log_probs = [np.divide(a, b) for a, b in zip(self.sample_log_probs, self.sample_tokens, strict=True)]
        weighted = [likelihood_entropy(*own) for own in zip(self.classes, mean_log_probs, strict=True)]
        return {
            "semantic_entropy": np.array([semantic_entropy(own) for own in self.classes]),
            "semantic_entropy_rao": np.array(weighted),
        }


AnyPredictions = Predictions | OpenPredictions
"""Either has ids, sources and, for each source, a pair (confidence, correctness)."""


def among_options(found: Mapping[str, AnyPredictions]) -> dict[str, Predictions]:
    """Predictions of the multiple-choice splits, by split."""
    return {split: predictions for split, predictions in found.items() if isinstance(predictions, Predictions)}


def write_any_predictions(path: Path, predictions: AnyPredictions) -> None:
    """Writes the Parquet file of a split, multiple-choice or open-ended."""
    if isinstance(predictions, Predictions):
        write_predictions(path, predictions)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "id": pa.array(predictions.ids, pa.string()),
        "group": pa.array(predictions.groups, pa.string()),
        "question": pa.array(predictions.questions, pa.string()),
        "answer": pa.array(predictions.answers, pa.string()),
        "correct": pa.array(predictions.answer_right),
        "samples_correct": pa.array(predictions.samples_right),
        **{f"confidence_{source}": pa.array(predictions.confidence(source)) for source in predictions.sources},
        **{name: pa.array(values) for name, values in predictions.entropies.items()},
        "log_prob": pa.array(predictions.log_probs),
        "tokens": pa.array(predictions.tokens),
        "samples": pa.array(predictions.samples, pa.list_(pa.string())),
        "classes": pa.array(predictions.classes, pa.list_(pa.int64())),
        "sample_log_probs": pa.array(predictions.sample_log_probs, pa.list_(pa.float64())),
        "sample_tokens": pa.array(predictions.sample_tokens, pa.list_(pa.int64())),
    }
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def read_any_predictions(path: Path) -> AnyPredictions:
    """Reads what `write_any_predictions` wrote; what follows from the answers is computed anew, not trusted.

    Raises:
        DataError: The file is missing, is not Parquet, lacks a column, or holds values that cannot be right.
    """
    table = read_table(path)
    if "samples" not in table.column_names:
        return predictions_in(path, table)
    rows = rows_of(path, table, _COLUMNS)
    lists = {name: tuple(map(tuple, rows[name])) for name in _LISTS}
    stated = f"confidence_{FLC}"
    try:
        return OpenPredictions(
            ids=tuple(rows["id"]),
            groups=tuple(rows["group"]),
            questions=tuple(rows["question"]),
            answers=tuple(rows["answer"]),
            log_probs=np.array(rows["log_prob"]),
            tokens=np.array(rows["tokens"]),
            answer_right=np.array(rows["correct"]),
            samples_right=np.array(rows["samples_correct"]),
            flc=np.array(table.column(stated), np.float64) if stated in table.column_names else None,
            **lists,
        )
    except ValueError as error:
        raise DataError(path, None, None, str(error), "evaluate again") from error
