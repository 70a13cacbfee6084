"""A trained model over HTTP, on Ray Serve: questions of all clients are gathered into batches.

One replica holds one copy of the model, counts and logs. Requests are read and refused in its event loop, the model
works in a thread of its own, so that `/healthz` answers while it does.
"""

# Without the future import of annotations: Ray Serve carries the class by value, and FastAPI, which reads the types of
# the routes' arguments, would not find by name what they are in the replica.
import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from components.errors import CaltuneError
from components.registry import load
from components.registry.prediction import Prediction, Refusal
from components.registry.prediction_writer import PredictionLog
from components.registry.predictor import Ready
from ray_jobs.cluster import connect
from ray_jobs.serve_batches import Batches
from ray_jobs.serve_metrics import ServiceMetrics
from ray_jobs.serve_requests import BODY_SCHEMA, Limits, RefusedError, read_body, read_rows

NAME = "caltune"
REQUESTS_BEYOND = 64
"""Requests let into a replica although its queue is full: it refuses them itself, with the reason."""
PROXY_SECONDS = 60
"""How long a proxy may take to start."""

app = FastAPI(
    title="caltune",
    description="Answers multiple-choice questions with calibrated confidence. An error is an object with `error`.",
)


@dataclass(frozen=True)
class ServiceSpec:
    """What a replica serves.

    Attributes:
        model: As `components.registry.load` takes it; a folder's path is absolute.
        options: Of `load`.
        policy: Name of an abstention policy; None takes the model's default one.
        log: Prediction log, absolute; None writes none.
        limits: What it takes.
    """

    model: str
    options: dict[str, Any]
    policy: str | None
    log: Path | None
    limits: Limits


@serve.deployment(name="model")
@serve.ingress(app)
class Service:
    """One replica.

    Args:
        spec: What to serve.
    """

    def __init__(self, spec: ServiceSpec) -> None:
        self.limits = spec.limits
        self.predictor = load(spec.model, **spec.options)
        self.policy = self.predictor.policy(spec.policy)
        self.log = None if spec.log is None else PredictionLog(spec.log)
        self.metrics = ServiceMetrics()
        self._waiting = 0
        self._batches = Batches(self._answer_batch, spec.limits.batch_rows, self.metrics.batches.observe)

    @app.post("/predict", openapi_extra={"requestBody": {"content": {"application/json": {"schema": BODY_SCHEMA}}}})
    async def predict(self, request: Request) -> Response:
        """Answers one question, or a list of them in its order.

        Of each: `answer`, `answer_index`, `confidence_softmax` and with routers `confidence_flc`, `probabilities`,
        `abstained`. 400 not JSON, 413 too large, 422 a bad question, named; 503 busy.
        """
        begun = time.monotonic()
        try:
            rows, single = await read_body(request, self.limits)
            ready = read_rows(rows, self.predictor, self.policy, self.limits)
            found = await self._answer(ready)
        except RefusedError as refused:
            self.metrics.requests.labels(refused.status).inc()
            headers = {"Retry-After": "1"} if refused.status == 503 else None
            return JSONResponse({"error": refused.reason}, refused.status, headers)
        seconds = time.monotonic() - begun
        self.metrics.requests.labels(200).inc()
        self.metrics.latency.observe(seconds)
        self.metrics.answered(found)
        self._log(found, rows, seconds)
        told = [prediction.as_row() for prediction in found]
        return JSONResponse(told[0] if single else told)

    @app.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(self) -> Response:
        """Whether a question would be answered now: 503 while the queue is full."""
        full = self._waiting >= self.limits.queue
        return JSONResponse(
            {"status": "busy" if full else "ready", "method": self.predictor.method}, 503 if full else 200
        )

    @app.get("/metrics")
    async def prometheus(self) -> Response:
        """What was counted, for Prometheus."""
        return Response(self.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, ready: list[Ready]) -> list[Prediction]:
        """Answers the questions of one request, each in the batch that comes.

        Raises:
            RefusedError: The queue is full, or the model scored NaN.
        """
        if self._waiting + len(ready) > self.limits.queue:
            raise RefusedError(503, f"{self._waiting} questions are waiting; try again in a moment")
        self._count(len(ready))
        try:
            results = await asyncio.gather(*(self._batches.ask(one) for one in ready))
        finally:
            self._count(-len(ready))
        predictions = [one for one in results if isinstance(one, Prediction)]
        if refused := [one.reason for one in results if isinstance(one, Refusal)]:
            raise RefusedError(500, refused[0])
        return predictions

    def _answer_batch(self, ready: Sequence[Ready]) -> list[Prediction | Refusal]:
        """Of several requests' questions; the predictor forms batches of similar length of them."""
        return self.predictor.answer_each(ready, self.policy)

    def _log(self, found: list[Prediction], rows: list[Any], seconds: float) -> None:
        """A log that cannot be written (a full disk) is counted and said; the answer is given all the same."""
        if self.log is None:
            return
        try:
            self.log.write(found, rows, seconds)
        except OSError as problem:
            self.metrics.unlogged.inc(len(found))
            logging.getLogger("ray.serve").error("prediction log: %s; %d answers are not in it", problem, len(found))

    def _count(self, change: int) -> None:
        self._waiting += change
        self.metrics.waiting.set(self._waiting)


def start(spec: ServiceSpec, host: str, port: int, cpus: int, gpus: int) -> None:
    """Starts the service on this machine, or on the cluster that RAY_ADDRESS names, and waits until it is ready.

    Args:
        spec: What to serve.
        host: Address to listen at.
        port: Port to listen at.
        cpus: CPU cores of the replica, and threads of its model.
        gpus: GPUs of the replica.

    Raises:
        CaltuneError: It cannot be started.
    """
    import ray

    # Where cores are busy, a proxy takes longer to start than Serve's five seconds, and would be killed and begun anew.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PROXY_SECONDS))
    connect()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    replica = Service.options(  # type: ignore[attr-defined]
        num_replicas=1,
        max_ongoing_requests=spec.limits.queue + REQUESTS_BEYOND,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port))
        serve.run(replica.bind(spec), name=NAME, route_prefix="/")
    except (ray.exceptions.RayError, RuntimeError, TimeoutError) as problem:
        raise CaltuneError(f"the service cannot be started: {problem}") from problem


def stop() -> None:
    """Ends the service, once the requests in work are answered."""
    import ray

    serve.shutdown()
    ray.shutdown()
