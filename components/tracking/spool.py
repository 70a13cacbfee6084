"""Delivering spools: in the background while a run goes on, and on demand afterwards (`caltune sync`)."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from components.errors import TrackingError
from components.tracking.delivery import Delivery, Progress
from components.tracking.events import FOLDER, Spool
from components.tracking.server import shown

_EVERY_SECONDS = 2.0
_RETRY_SECONDS = 30.0
_LONGEST_RETRY_SECONDS = 600.0
_FRESH_FAILURE_SECONDS = 10.0
_SYNC_WAIT_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """What `sync_spool` did.

    Attributes:
        uri: The server, password hidden.
        experiment: The experiment's name there.
        delivered: Events delivered by this call.
        before: Events that an earlier delivery had brought there.
        runs: MLflow run id of each local run key; `run` is the root.
        missing: Artifacts that were gone when their turn came.
        refused: What the server would not take, with its reason.
        torn: Lines of the spool that a crash cut off.
    """

    uri: str
    experiment: str
    delivered: int
    before: int
    runs: dict[str, str]
    missing: list[str]
    refused: list[str]
    torn: int


def sync_spool(folder: Path, uri: str | None = None) -> SyncReport:
    """Deliver what a run has logged and a server has not received. Repeating it delivers nothing twice.

    Args:
        folder: A run folder, or the `tracking_spool` in it.
        uri: Where to; by default where the run itself would have. Another server receives the whole run.

    Raises:
        TrackingError: There is no spool, no destination, or the server cannot be reached; run it again then.
    """
    spool = Spool.find(Path(folder))
    header = spool.header()
    target = uri or header["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not target:
        raise TrackingError(f"{folder}: the server's URI holds a password and was not stored; name it with --uri")
    delivery = Delivery(spool, target, header["experiment"])
    before = delivery.progress().events
    after = delivery.deliver(wait=_SYNC_WAIT_SECONDS)
    if after is None:
        raise TrackingError(f"{folder}: another process has been delivering for {_SYNC_WAIT_SECONDS:.0f} s")
    return SyncReport(
        uri=shown(target),
        experiment=header["experiment"],
        delivered=after.events - before,
        before=before,
        runs=after.runs,
        missing=after.missing,
        refused=after.refused,
        torn=after.torn,
    )


def find_spools(root: Path) -> list[Path]:
    """The run folders with a spool under an output directory, `root` itself included, in order of name."""
    return sorted(header.parent.parent for header in root.glob(f"**/{FOLDER}/spool.json"))


class Courier:
    """Delivers a spool from a thread of its own, so that no server, however slow, ever holds up training.

    After a failure it says once, through `logging`, that the run goes on and where its events are kept, then tries
    again after 30 s and ever more rarely, at least every 10 minutes.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._stopping = threading.Event()
        self._reachable, self._failed_at = True, 0.0
        self._thread = threading.Thread(target=self._work, name="caltune-tracking", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def stop(self) -> Progress | None:
        """Deliver what is left, once, and end; None where it could not be delivered."""
        self._stopping.set()
        self._thread.join()
        if not self._reachable and time.monotonic() - self._failed_at < _FRESH_FAILURE_SECONDS:
            return None  # it was asked just now
        return self._attempt(wait=_EVERY_SECONDS)

    def _work(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            self._attempt()
            longer = min(max(2 * pause, _RETRY_SECONDS), _LONGEST_RETRY_SECONDS)
            pause = _EVERY_SECONDS if self._reachable else longer

    def _attempt(self, wait: float = 0.0) -> Progress | None:
        try:
            progress = self._delivery.deliver(wait)
        except TrackingError as error:
            if self._reachable:
                folder = self._delivery.spool.run_folder
                _log.warning("%s. The run goes on; `caltune sync %s` delivers later what it logs.", error, folder)
            self._reachable, self._failed_at = False, time.monotonic()
            return None
        if not self._reachable:
            _log.info("tracking server %s is reachable again", shown(self._delivery.uri))
        self._reachable = True
        return progress
