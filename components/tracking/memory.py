"""A logger that keeps everything in memory, for tests and for looking at a run in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from components.tracking.logger import Status


@dataclass
class MemoryLogger:
    """Keeps what it is given.

    Attributes:
        name: The run's name; empty for a root.
        params: Parameters by name, as given.
        metrics: `(step, value)` in the order logged, by metric name.
        artifacts: Path by the name it was logged under.
        dicts: Content by file name.
        tags: Tags by name.
        children: Child loggers by name.
        status: None while open, then what `close` was given.
    """

    name: str = ""
    params: dict[str, object] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    dicts: dict[str, dict[str, object]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    children: dict[str, MemoryLogger] = field(default_factory=dict)
    status: Status | None = None

    def log_params(self, params: Mapping[str, object]) -> None:
        """Keep parameters.

        Raises:
            ValueError: A parameter changes its value, which no tracking server allows.
        """
        for key, value in params.items():
            if key in self.params and self.params[key] != value:
                raise ValueError(f"parameter '{key}' was {self.params[key]!r}, now {value!r}")
            self.params[key] = value

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep metrics of one step."""
        for key, value in metrics.items():
            self.metrics.setdefault(key, []).append((step, float(value)))

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Keep the path of a file or folder."""
        self.artifacts[name or path.name] = path

    def log_dict(self, content: Mapping[str, object], name: str) -> None:
        """Keep a copy of a dictionary."""
        self.dicts[name] = dict(content)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Keep tags."""
        self.tags.update(tags)

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> MemoryLogger:
        """The child called `name`."""
        child = self.children.setdefault(name, MemoryLogger(name))
        child.set_tags(tags or {})
        return child

    def close(self, status: Status = "FINISHED") -> None:
        """Note how the run ended."""
        self.status = status
