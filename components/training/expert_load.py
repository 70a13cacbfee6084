"""What the experts of each router receive in the course of training: a file, and an alarm when a router collapses.

The file, `expert_load.json`, holds by evaluated step: `steps`; `share` [step][router][expert], the part of the router's
choices that went to the expert, adding up to 1; `entropy` [step][router], the mean entropy of its probabilities over
the tokens, in nats, at most ln N.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.files import read_json, write_json

log = logging.getLogger(__name__)

LOAD_FILE = "expert_load.json"


@dataclass(frozen=True)
class ExpertLoad:
    """Of one step's global batch.

    Attributes:
        share: [router][expert]; part of the router's (token, choice) pairs, adding up to 1 over experts.
        first_share: [router]; largest part of the tokens that have one and the same expert as their first choice.
            1 / N when balanced, 1 in collapse, whatever k is.
        entropy: [router]; mean over tokens, in nats.
    """

    share: list[list[float]]
    first_share: list[float]
    entropy: list[float]


class ExpertLoadLog:
    """Keeps the file; for one process of a training.

    Args:
        path: The file; one that is there is replaced at the first `add`, unless `resume` is called before.
        collapse_share: Warn when a router's `first_share` exceeds this.
    """

    def __init__(self, path: Path, collapse_share: float) -> None:
        self.path, self.collapse_share = path, collapse_share
        self._steps: list[int] = []
        self._share: list[list[list[float]]] = []
        self._entropy: list[list[float]] = []
        self._warned: set[int] = set()

    def resume(self, taken: int) -> None:
        """Takes over what an earlier process wrote up to the step that training continues from.

        Raises:
            CaltuneError: The file is damaged.
        """
        if not self.path.exists():
            return
        found: dict[str, Any] = read_json(self.path, remedy="use --overwrite")
        kept = sum(step <= taken for step in found["steps"])
        self._steps, self._share = found["steps"][:kept], found["share"][:kept]
        self._entropy = found["entropy"][:kept]

    def add(self, taken: int, load: ExpertLoad) -> None:
        """Writes the load of the step that made `taken` steps; warns once of each router that has collapsed."""
        self._steps.append(taken)
        self._share.append(load.share)
        self._entropy.append(load.entropy)
        write_json(self.path, {"steps": self._steps, "share": self._share, "entropy": self._entropy})
        for router, share in enumerate(load.first_share):
            if share > self.collapse_share and router not in self._warned:
                self._warned.add(router)
                log.warning(
                    "step %d: router %d sends %.0f %% of its tokens to one expert first; raise uq4ct.balance_weight or "
                    "lower uq4ct.router_learning_rate",
                    taken,
                    router,
                    100 * share,
                )
