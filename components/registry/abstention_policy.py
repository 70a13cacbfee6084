"""When to abstain: a threshold on a confidence, kept in an adapter folder's `abstention.json` under a name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from components.errors import CaltuneError, UsageError
from components.evaluation.checks import BoolArray, FloatArray
from components.files import read_json

FILE_NAME = "abstention.json"
FORMAT = 1
_REMEDY = "choose its thresholds anew"


@dataclass(frozen=True)
class AbstentionPolicy:
    """One threshold: a prediction is abstained from when its confidence lies below it.

    Attributes:
        source: The confidence that is read: `softmax`, `flc` and so on.
        threshold: In [0, 1]; None where the target cannot be guaranteed, so that every prediction is abstained from.
        details: How it was chosen: target, delta, method, number of questions.
    """

    source: str
    threshold: float | None
    details: Mapping[str, Any] = field(default_factory=dict)

    def abstains(self, confidence: FloatArray) -> BoolArray:
        """Whether to abstain, [n].

        Args:
            confidence: Of the policy's source, [n], in [0, 1].
        """
        return np.ones(len(confidence), dtype=np.bool_) if self.threshold is None else confidence < self.threshold


@dataclass(frozen=True)
class Policies:
    """The policies of an adapter folder by name, and the one that holds where none is named."""

    named: Mapping[str, AbstentionPolicy] = field(default_factory=dict)
    default: str | None = None

    def choose(self, name: str | None) -> AbstentionPolicy | None:
        """The policy of a name; for None the default one, which is None where there are no policies.

        Raises:
            UsageError: There is no policy of that name.
        """
        wanted = name or self.default
        if wanted is None:
            return None
        if wanted not in self.named:
            there = ", ".join(sorted(self.named)) or "none"
            raise UsageError(f"the adapter has no abstention policy '{wanted}'; there is: {there}")
        return self.named[wanted]


def read_policies(folder: Path) -> Policies:
    """The policies in an adapter folder; none where it has no `abstention.json`.

    Raises:
        CaltuneError: The file is damaged or of an unknown format.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return Policies()
    content = read_json(path, _REMEDY)
    if content.get("format") != FORMAT:
        raise CaltuneError(f"{path}: format {content.get('format')!r}, but {FORMAT} is known; {_REMEDY}")
    entries, default = content.get("policies"), content.get("default")
    if not isinstance(entries, dict) or default not in entries:
        raise CaltuneError(f"{path}: 'default' is {default!r}, which is none of its 'policies'; {_REMEDY}")
    return Policies({name: _policy(path, name, entry) for name, entry in entries.items()}, default)


def _policy(path: Path, name: str, entry: Any) -> AbstentionPolicy:
    where = f"{path}: policy '{name}'"
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str) or "threshold" not in entry:
        raise CaltuneError(f"{where} lacks 'source' or 'threshold'; {_REMEDY}")
    threshold = entry["threshold"]
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and not math.isnan(threshold)
    if threshold is not None and not number:
        raise CaltuneError(f"{where}: 'threshold' is {threshold!r}, neither a number nor null; {_REMEDY}")
    details = {key: value for key, value in entry.items() if key not in ("source", "threshold")}
    return AbstentionPolicy(entry["source"], None if threshold is None else float(threshold), details)
