"""SIGTERM, as Kubernetes, Slurm and spot instances send it before they take a node away, as an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from components.errors import Interrupted


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within it SIGTERM raises `Interrupted` in the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: Any) -> None:
    raise Interrupted("stopped on request; go on with --resume")
