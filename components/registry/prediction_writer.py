"""The prediction log of a model in service: what was answered, appended a request at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.registry.prediction import Prediction
from components.registry.prediction_log import append_rows, log_row


class PredictionLog:
    """Appends what was answered, in the form of `prediction_log.py`.

    Open-ended answers have other confidences than drift is judged by, so they go to a file of their own beside it,
    `<stem>-open.jsonl`.

    Args:
        path: A `.jsonl` file; its folder is made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._paths = {False: path, True: path.with_name(f"{path.stem}-open{path.suffix}")}

    def write(self, predictions: Sequence[Prediction], asked: Sequence[Mapping[str, Any]], latency_s: float) -> None:
        """Appends the predictions of one request.

        Args:
            predictions: What was answered.
            asked: The rows that asked, in the same order; a label in them, `answer`, is kept as `gold`.
            latency_s: From the request's arrival to its answer, seconds.

        Raises:
            OSError: The disk is full or the file may not be written.
        """
        rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for prediction, row in zip(predictions, asked, strict=True):
            gold = row.get("answer")
            rows[prediction.answer_index is None].append(
                log_row(
                    prediction.as_row(),
                    latency_s=round(latency_s, 6),
                    gold=gold if isinstance(gold, int | str) and not isinstance(gold, bool) else None,
                )
            )
        for open_ended, entries in rows.items():
            append_rows(self._paths[open_ended], entries)
