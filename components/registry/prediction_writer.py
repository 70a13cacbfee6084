"""The prediction log of a model in service, as `prediction_log.py` reads it: appended to, a JSON object a question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.registry.prediction import Prediction


class PredictionLog:
    """Appends what was answered. Whoever reads while it is written sees whole rows.

    Open-ended answers have other confidences than drift is judged by, so they go to a file of their own beside it,
    `<stem>-open.jsonl`.

    Args:
        path: A `.jsonl` file; its folder is made where there is none.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._paths = {False: path, True: path.with_name(f"{path.stem}-open{path.suffix}")}

    def write(self, predictions: Sequence[Prediction], asked: Sequence[Mapping[str, Any]], latency_s: float) -> None:
        """Appends the predictions of one request.

        Args:
            predictions: What was answered.
            asked: The rows that asked, in the same order; a label in them, `answer`, is kept as `label`.
            latency_s: From the request's arrival to its answer, seconds.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        lines: dict[bool, str] = {False: "", True: ""}
        for prediction, row in zip(predictions, asked, strict=True):
            told = prediction.as_row()
            told.pop("probabilities", None)
            label = {"label": row["answer"]} if row.get("answer") is not None else {}
            entry = {"id": told.pop("id"), "time": now, **told, "latency_s": round(latency_s, 6), **label}
            lines[prediction.answer_index is None] += json.dumps(entry, ensure_ascii=True) + "\n"
        for open_ended, text in lines.items():
            if text:
                with self._paths[open_ended].open("ab", buffering=0) as file:
                    file.write(text.encode("ascii"))
