"""`caltune serve` on loopback: the Predictor's answers, refusals with their reason, health, counts, the log."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.registry import load
from components.registry.prediction_log import read_confidences

ROOT = Path(__file__).parents[2]


class Client:
    """Asks a service on loopback, over a connection of its own each time."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, content: object = None) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def predict(self, content: object) -> tuple[int, object]:
        """Status and what was told."""
        status, told, _ = self.ask("POST", "/predict", content)
        return status, json.loads(told)

    def ready(self) -> bool:
        """Whether it answers questions."""
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except OSError:
            return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_queue_refuses_more(tiny_adapter, asked_rows, free_port, ray_here):
    from ray import serve

    from ray_jobs.serve import ServiceSpec, start
    from ray_jobs.serve_requests import Limits

    spec = ServiceSpec(str(tiny_adapter("calm")), {}, None, None, Limits(queue=3))
    try:
        start(spec, "127.0.0.1", free_port, cpus=1, gpus=0)
        client = Client(free_port)
        assert client.ready()
        assert client.predict(asked_rows[:3])[0] == 200
        status, told, headers = client.ask("POST", "/predict", asked_rows[:4])
        assert (status, headers["retry-after"]) == (503, "1")
        assert "questions are waiting" in json.loads(told)["error"]
        assert client.predict(asked_rows[:3])[0] == 200, "what was refused does not count as waiting"
    finally:
        serve.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_service_from_start_to_end(tiny_adapter, asked_rows, free_port, tmp_path):
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pipelines.cli", "serve", "--model", str(tiny_adapter("uq4ct"))]
    command += ["--port", str(free_port), "--log", str(log), "--cpus", "1"]
    with (tmp_path / "err").open("wb") as err:
        service = subprocess.Popen(command, cwd=ROOT, stdout=err, stderr=err, env=dict(os.environ))

    client = Client(free_port)
    try:
        deadline = time.monotonic() + 400
        while not client.ready():
            assert service.poll() is None, (tmp_path / "err").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()[-3000:]
            time.sleep(0.5)
        expected = [p.as_row() for p in load(tiny_adapter("uq4ct")).predict(asked_rows)]

        def same(found: object, wanted: dict) -> None:
            for key, value in wanted.items():
                assert found[key] == (value if key in ("id", "answer", "abstained") else pytest.approx(value, abs=1e-5))

        status, told = client.predict(asked_rows)
        assert (status, len(told)) == (200, 40)
        for found, wanted in zip(told, expected, strict=True):
            same(found, wanted)
        with ThreadPoolExecutor(16) as clients:
            for (status, found), wanted in zip(clients.map(client.predict, asked_rows), expected, strict=True):
                assert status == 200
                same(found, wanted)
        for content, code, reason in (
            (b"{nope", 400, "not JSON"),
            ([asked_rows[0], {"question": "Q", "choices": ["a"]}], 422, "questions:2: field 'choices'"),
            ({"question": "word " * 300, "choices": ["a", "b"]}, 422, "tokens long"),
            ({"question": "w" * 30_000, "choices": ["a", "b"]}, 413, "characters"),
            ([asked_rows[0]] * 65, 413, "at most 64"),
        ):
            status, told = client.predict(content)
            assert (status, reason in told["error"]) == (code, True)
        assert client.ask("GET", "/healthz")[0] == 200
        assert client.ask("GET", "/docs")[0] == 200
        assert "/predict" in json.loads(client.ask("GET", "/openapi.json")[1])["paths"]
        figures = client.ask("GET", "/metrics")[1].decode().splitlines()
        counted = dict(line.rsplit(" ", 1) for line in figures if not line.startswith("#"))
        assert float(counted["caltune_rows_total"]) == 80
        assert float(counted["caltune_batch_rows_count"]) < 41, "questions of several clients came together"
        assert float(counted['caltune_requests_total{status="413"}']) == 2
        assert len(read_confidences(log, ["softmax", "flc"])["flc"]) == 80
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=120) == 0
