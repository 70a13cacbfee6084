"""Is a model in service still calibrated? The prediction log by windows, judged as far as labels have arrived.

A window is so many answers in the order of the log, whatever time they took, so that every window's figures rest on as
many. What needs no label (mean confidence, share abstained from) is of all its answers; accuracy, ECE, Brier score and
the risk achieved among the answers given are of those with a label. With few labels an ECE is high by chance alone: the
number of labels stands beside it. And labels that arrive for some kinds of questions only say nothing of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from components.errors import DataError
from components.evaluation.calibration_error import expected_calibration_error
from components.evaluation.checks import BoolArray, FloatArray, bin_count
from components.evaluation.scores import top_label_brier_score
from components.evaluation.selective import share_interval
from components.registry.prediction_log import Gold, Logged, numbered_rows

_REMEDY = 'write {"id": ..., "correct": true or false} or {"id": ..., "answer": text or 0-based option} a line'


@dataclass(frozen=True)
class SourceFigures:
    """How one confidence source did in a window; None where nothing in it has what the figure needs.

    Attributes:
        mean_confidence: Over the answers that state it, in [0, 1].
        ece: Expected calibration error over those with a label, in [0, 1].
        brier: Mean squared distance of confidence and correctness, likewise.
    """

    mean_confidence: float | None
    ece: float | None
    brier: float | None


@dataclass(frozen=True)
class Window:
    """Consecutive answers.

    Attributes:
        first: Row of the first one, from 1.
        last: Row of the last one.
        begins: Time of the first one as written; None where it has none.
        ends: Time of the last one.
        labelled: Answers with a label.
        accuracy: Share of these that is right, whether given or abstained from; None where there are none.
        abstained: Share abstained from, of those answered under a policy; None without one.
        answered: Answers given under a policy, not abstained from, that have a label.
        risk: Error rate among these; None where there are none.
        risk_low: Lower end of its Clopper-Pearson interval.
        risk_high: Upper end.
        sources: Figures by confidence source.
    """

    first: int
    last: int
    begins: str | None
    ends: str | None
    labelled: int
    accuracy: float | None
    abstained: float | None
    answered: int
    risk: float | None
    risk_low: float | None
    risk_high: float | None
    sources: Mapping[str, SourceFigures]

    @property
    def n(self) -> int:
        """Answers."""
        return self.last - self.first + 1

    def as_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"n": self.n, **asdict(self)}


def read_labels(path: Path) -> dict[str, bool | Gold]:
    """Reads labels that came later: JSON lines with `id` and either `correct`, or the right `answer`.

    Rows of questions as data files have them will do. Where an id comes again, the last label stands.

    Returns:
        By id: whether the answer given was right, or the right answer itself (a text or a 0-based option).

    Raises:
        DataError: The file cannot be read or is empty, or a row is not as above.
    """
    found: dict[str, bool | Gold] = {}
    for number, row in numbered_rows(path, _REMEDY):
        if not isinstance(row.get("id"), str):
            raise DataError(path, number, "id", f"is {row.get('id')!r}, not a text", _REMEDY)
        key = "correct" if "correct" in row else "answer"
        label = row.get(key)
        if not isinstance(label, bool) if key == "correct" else type(label) not in (int, str):
            raise DataError(path, number, key, f"is {label!r}", _REMEDY)
        found[row["id"]] = row[key]
    if not found:
        raise DataError(path, None, None, "has no rows", _REMEDY)
    return found


def with_labels(log: Sequence[Logged], labels: Mapping[str, bool | Gold]) -> list[Logged]:
    """The log with what the labels say; they come before what a row says itself.

    Raises:
        ValueError: A label is an option's number, but that question was not answered among options.
    """
    return [_labelled(row, labels[row.id]) if row.id in labels else row for row in log]


def _labelled(row: Logged, label: bool | Gold) -> Logged:
    return replace(row, correct=label if isinstance(label, bool) else row.judged_by(label))


def windows_of(log: Sequence[Logged], size: int, bins: int) -> list[Window]:
    """The log by windows; the last one holds what is left.

    Args:
        log: Answers in order, at least one.
        size: Answers of a window, at least 1.
        bins: Bins of the ECE.

    Raises:
        ValueError: `size` or `bins` below 1.
    """
    if size < 1:
        raise ValueError(f"a window of {size} answers; it needs at least 1")
    bin_count(bins)
    sources = list(dict.fromkeys(source for row in log for source in row.confidence))
    return [_window(log[at : at + size], at + 1, sources, bins) for at in range(0, len(log), size)]


def _window(rows: Sequence[Logged], first: int, sources: Sequence[str], bins: int) -> Window:
    under_policy = [row.abstained for row in rows if row.abstained is not None]
    judged = [row.correct for row in rows if row.correct is not None]
    given = [row.correct for row in rows if row.abstained is False and row.correct is not None]
    wrong = given.count(False)
    low, high = share_interval(wrong, len(given)) if given else (None, None)
    return Window(
        first=first,
        last=first + len(rows) - 1,
        begins=rows[0].time,
        ends=rows[-1].time,
        labelled=len(judged),
        accuracy=float(np.mean(judged)) if judged else None,
        abstained=float(np.mean(under_policy)) if under_policy else None,
        answered=len(given),
        risk=wrong / len(given) if given else None,
        risk_low=low,
        risk_high=high,
        sources={
            source: _figures([row for row in rows if source in row.confidence], source, bins) for source in sources
        },
    )


def _figures(rows: Sequence[Logged], source: str, bins: int) -> SourceFigures:
    if not rows:
        return SourceFigures(None, None, None)
    mean = float(_confidence(rows, source).mean())
    labelled = [row for row in rows if row.correct is not None]
    if not labelled:
        return SourceFigures(mean, None, None)
    confidence = _confidence(labelled, source)
    correct: BoolArray = np.array([row.correct for row in labelled], dtype=np.bool_)
    return SourceFigures(
        mean,
        expected_calibration_error(confidence, correct, bins),
        top_label_brier_score(confidence, correct),
    )


def _confidence(rows: Sequence[Logged], source: str) -> FloatArray:
    return np.array([row.confidence[source] for row in rows], dtype=np.float64)
