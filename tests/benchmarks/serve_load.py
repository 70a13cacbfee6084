"""The service under load: no answer lost or wrong, bad requests refused with a reason, memory flat, batches formed.

    make bench        or        python tests/benchmarks/serve_load.py

By default with what `make run` has left; without that it says so and measures nothing. It starts `caltune serve` on
loopback and prints a Markdown table; exit code 1 when any answer was lost or wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.registry import load

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "outputs" / "quickstart"
CLOSE = 1e-5
HOST = "127.0.0.1"
Plan = tuple[bytes, int, Any]
"""A request's body, the status it must get, and the rows it must be answered with."""


def plans(rows: list[dict[str, Any]], expected: list[dict[str, Any]], requests: int) -> list[Plan]:
    """Requests of one to four questions, a tenth of them malformed and a tenth over-long, in an order of chance."""
    rng = random.Random(0)
    long = {"question": "Why? " * 3000, "choices": ["yes", "no"]}
    bad: list[tuple[Any, int]] = [
        (b"{not json", 400),
        (json.dumps([]).encode(), 422),
        (json.dumps({"question": "Q", "choices": ["a"]}).encode(), 422),
        (json.dumps([rows[0], {"choices": ["a", "b"]}]).encode(), 422),
    ]
    huge = [(json.dumps(long).encode(), 422), (json.dumps({**long, "question": "Why? " * 9000}).encode(), 413),
            (json.dumps([rows[0]] * 100).encode(), 413)]  # fmt: skip
    made: list[Plan] = []
    for _ in range(requests):
        kind = rng.random()
        if kind < 0.2:
            body, status = rng.choice(bad if kind < 0.1 else huge)
            made.append((body, status, None))
            continue
        chosen = rng.choices(range(len(rows)), k=rng.choice([1, 1, 1, 2, 4]))
        single = len(chosen) == 1
        asked, told = [rows[i] for i in chosen], [expected[i] for i in chosen]
        made.append((json.dumps(asked[0] if single else asked).encode(), 200, told[0] if single else told))
    return made


def right(status: int, content: Any, plan: Plan) -> bool:
    """Whether an answer is what it must be: a reason in the place of a refused one, else the very numbers."""
    _, wanted_status, wanted = plan
    if status != wanted_status:
        return False
    if wanted is None:
        return isinstance(content, dict) and bool(content.get("error"))
    told, wanted = (content, wanted) if isinstance(wanted, list) else ([content], [wanted])
    return len(told) == len(wanted) and all(_same(one, other) for one, other in zip(told, wanted, strict=True))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    differences = [abs(one[k] - other[k]) for k in other if k.startswith("confidence_")]
    differences += [abs(a - b) for a, b in zip(one["probabilities"], other["probabilities"], strict=True)]
    exact = all(one[k] == other[k] for k in ("id", "answer", "answer_index", "abstained"))
    return exact and max(differences) < CLOSE


class Service:
    """`caltune serve` on a free port."""

    def __init__(self, model: str) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "pipelines.cli",
            "serve",
            "--model",
            model,
            "--port",
            str(self.port),
            "--quiet",
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """One request over a connection of its own."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=600)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def figures(self) -> dict[str, float]:
        """What `/metrics` counts."""
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def wait(self) -> None:
        """Until it is ready."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit("the service ended before it was ready")
            try:
                if self.ask("GET", "/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)


@contextmanager
def serving(model: str) -> Iterator[Service]:
    """A service that is ready, and ends with the block."""
    service = Service(model)
    try:
        service.wait()
        yield service
    finally:
        service.process.send_signal(signal.SIGTERM)
        service.process.wait(timeout=120)


def measure(service: Service, made: list[Plan], clients: int) -> dict[str, Any]:
    """Sends all requests from `clients` threads and looks at memory before, halfway and after."""
    latencies: list[float] = []
    outcomes: Counter[str] = Counter()
    memory: list[float] = []
    lock = threading.Lock()

    def send(plan: Plan) -> None:
        begun = time.monotonic()
        try:
            status, body = service.ask("POST", "/predict", plan[0])
            outcome = "right" if right(status, json.loads(body), plan) else "wrong"
        except (OSError, ValueError, http.client.HTTPException):
            status, outcome = 0, "lost"
        with lock:
            outcomes[outcome] += 1
            outcomes[f"status {status}"] += 1
            if status == 200:
                latencies.append(time.monotonic() - begun)

    begun = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        for half in (made[: len(made) // 2], made[len(made) // 2 :]):
            memory.append(service.figures()["process_resident_memory_bytes"] / 2**20)
            list(pool.map(send, half))
    seconds = time.monotonic() - begun
    figures = service.figures()
    memory.append(figures["process_resident_memory_bytes"] / 2**20)
    batches = figures["caltune_batch_rows_count"]
    return {
        "requests": len(made),
        "clients": clients,
        "wrong answers": outcomes["wrong"],
        "lost answers": outcomes["lost"],
        **{name: outcomes[name] for name in sorted(outcomes) if name.startswith("status")},
        "questions answered": int(figures["caltune_rows_total"]),
        "questions a second": round(figures["caltune_rows_total"] / seconds, 1),
        "requests a second": round(len(made) / seconds, 1),
        "p50 of answered, s": round(statistics.median(latencies), 3),
        "p99 of answered, s": round(statistics.quantiles(latencies, n=100)[98], 3),
        "batches": int(batches),
        "questions a batch": round(figures["caltune_batch_rows_sum"] / batches, 1),
        "batches of 1 / up to 8 / up to 32 / up to 64": " / ".join(
            str(int(figures[f'caltune_batch_rows_bucket{{le="{size}.0"}}'])) for size in (1, 8, 32, 64)
        ),
        "memory at start, half, end, MiB": ", ".join(f"{value:.0f}" for value in memory),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=QUICKSTART / "calm" / "adapter")
    parser.add_argument("--questions", type=Path, default=QUICKSTART / "data" / "id.jsonl")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    if not given.model.exists():
        print(f"{given.model} is not there: make run leaves it, or name another with --model and --questions")
        return
    rows = [json.loads(line) for line in given.questions.read_text().splitlines()]
    lengths = random.Random(1)
    rows = [{**row, "question": "Think of it well. " * lengths.choice([0, 0, 1, 4]) + row["question"]} for row in rows]
    expected = [prediction.as_row() for prediction in load(given.model).predict(rows)]
    with serving(str(given.model.resolve())) as service:
        found = measure(service, plans(rows, expected, given.requests), given.clients)
    print("| figure | value |\n| --- | --- |")
    for name, value in found.items():
        print(f"| {name} | {value} |")
    sys.exit(bool(found["wrong answers"] or found["lost answers"]))


if __name__ == "__main__":
    main()
