"""What the service counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary, generate_latest

from components.registry.prediction import Prediction

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServiceMetrics:
    """Counters of one replica, in a registry of their own.

    Mean confidence is `caltune_confidence_sum / caltune_confidence_count` of a source, over any stretch of time.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, CPU seconds, open files
        self.requests = Counter(
            "caltune_requests", "Requests to /predict by HTTP status.", ["status"], registry=registry
        )
        self.rows = Counter("caltune_rows", "Questions answered.", registry=registry)
        self.latency = Histogram(
            "caltune_request_seconds", "From arrival to answer.", buckets=SECONDS, registry=registry
        )
        self.batches = Histogram("caltune_batch_rows", "Questions scored together.", buckets=ROWS, registry=registry)
        self.waiting = Gauge("caltune_waiting_rows", "Questions waiting and in work.", registry=registry)
        self.abstained = Counter("caltune_abstained", "Questions abstained from.", registry=registry)
        self.unlogged = Counter(
            "caltune_unlogged_rows", "Questions answered whose row the prediction log did not take.", registry=registry
        )
        self.confidence = Summary("caltune_confidence", "Confidence stated.", ["source"], registry=registry)

    def answered(self, predictions: Sequence[Prediction]) -> None:
        """Counts what was answered."""
        self.rows.inc(len(predictions))
        for prediction in predictions:
            self.abstained.inc(bool(prediction.abstained))
            for source, value in prediction.confidence.items():
                self.confidence.labels(source).observe(value)

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
