"""What the service refuses, and what it counts and logs, without a service."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import numpy as np
import pytest

from components.registry import load
from components.registry.prediction import Prediction
from components.registry.prediction_log import read_confidences
from components.registry.prediction_writer import PredictionLog
from ray_jobs.serve_metrics import ServiceMetrics
from ray_jobs.serve_requests import Limits, RefusedError, read_body, read_rows

LIMITS = Limits(rows=3, characters=100)


@dataclass
class Sent:
    """A request whose body comes in parts."""

    parts: list[bytes]

    async def stream(self):
        for part in self.parts:
            yield part


def body(*parts: bytes):
    return asyncio.run(read_body(Sent(list(parts)), LIMITS))  # type: ignore[arg-type]


def test_one_question_or_a_list():
    assert body(b'{"question"', b': "Q"}') == ([{"question": "Q"}], True)
    assert body(b"[1, 2]") == ([1, 2], False)


@pytest.mark.parametrize(
    ("parts", "status", "reason"),
    [
        ([b"{"], 400, "not JSON"),
        ([b"\xff"], 400, "not UTF-8"),
        ([b"[" * 1700], 400, "nested too deeply"),
        ([b"[" * 100_000], 413, "larger than 1800 bytes"),
        ([b"[" * 1000, b"[" * 1000], 413, "larger than 1800 bytes"),
        ([b"[]"], 422, "no question"),
        ([b"[1, 2, 3, 4]"], 413, "has 4 questions; at most 3"),
    ],
)
def test_a_body_that_is_refused(parts, status, reason):
    with pytest.raises(RefusedError, match=reason) as refused:
        body(*parts)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("row", "status", "reason"),
    [
        ({"question": "Q" * 60, "choices": ["a" * 30, "b" * 30]}, 413, "questions:2: has 120 characters"),
        ({"question": "Q", "choices": ["a"]}, 422, "questions:2: field 'choices'"),
        (7, 422, "questions:2: is int"),
        ({"id": "\ud800", "question": "Q", "choices": ["a", "b"]}, 422, "field 'id': holds half a surrogate pair"),
    ],
)
def test_a_row_that_is_refused(row, status, reason, tiny_adapter, asked_rows):
    with pytest.raises(RefusedError, match=reason) as refused:
        read_rows([asked_rows[0], row], load(tiny_adapter("calm")), None, LIMITS)
    assert refused.value.status == status


def test_a_number_of_too_many_digits():
    with pytest.raises(RefusedError, match="number that cannot be read") as refused:
        asyncio.run(read_body(Sent([b"1" * 5000]), Limits()))  # type: ignore[arg-type]
    assert refused.value.status == 400


def test_over_long_in_tokens_though_not_in_characters(tiny_adapter):
    row = {"question": "word " * 300, "choices": ["a", "b"]}
    with pytest.raises(RefusedError, match="tokens long") as refused:
        read_rows([row], load(tiny_adapter("calm")), None, Limits())
    assert refused.value.status == 422


PREDICTIONS = [
    Prediction("a", "Paris", 1, {"softmax": 0.75, "flc": 0.5}, (0.25, 0.75), False),
    Prediction("b", "Lima \ud800", 0, {"softmax": 0.5, "flc": 0.25}, (0.5, 0.5), True),
]


def test_metrics_count_answers_abstention_and_confidence():
    metrics = ServiceMetrics()
    metrics.answered(PREDICTIONS)
    text = metrics.exposition().decode()
    for line in (
        "caltune_rows_total 2.0",
        "caltune_abstained_total 1.0",
        'caltune_confidence_sum{source="softmax"} 1.25',
        'caltune_confidence_count{source="flc"} 2.0',
    ):
        assert line in text
    assert "process_resident_memory_bytes" in text


def test_the_log_is_what_drift_reads(tmp_path):
    log = PredictionLog(tmp_path / "new" / "log.jsonl")
    log.write(PREDICTIONS, [{"answer": 1}, {}], 0.25)
    spoken = Prediction("c", "tin", None, {"sequence": 0.5, "sequence_sum": 0.25}, None)
    log.write([PREDICTIONS[0], spoken], [{}, {}], 0.125)
    found = read_confidences(tmp_path / "new" / "log.jsonl", ["softmax", "flc"])
    np.testing.assert_array_equal(found["softmax"], [0.75, 0.5, 0.75])
    np.testing.assert_array_equal(found["flc"], [0.5, 0.25, 0.5])
    rows = [json.loads(line) for line in (tmp_path / "new" / "log.jsonl").read_text().splitlines()]
    assert rows[0].keys() == {
        "id", "time", "answer", "answer_index", "confidence_softmax", "confidence_flc", "abstained", "latency_s",
        "gold",
    }  # fmt: skip
    assert (rows[0]["gold"], rows[0]["latency_s"], "gold" in rows[1]) == (1, 0.25, False)
    told = json.loads((tmp_path / "new" / "log-open.jsonl").read_text())
    assert (told["id"], told["confidence_sequence_sum"]) == ("c", 0.25)
