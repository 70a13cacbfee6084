"""The table of a search's trials: ours, complete at every moment, and all that a search needs to be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from components.config_tune import Value
from components.errors import CaltuneError
from components.files import replacing

State = Literal["running", "finished", "stopped", "failed", "interrupted"]
OPEN_STATES = ("running", "interrupted")
REFERENCE = 0
"""Number of the reference, where there is one; trials are counted from 1."""


@dataclass(frozen=True)
class Trial:
    """One row.

    Attributes:
        number: The trial.
        method: What it trained.
        parameters: Value of each searched key.
        state: How it stands. `stopped`: by the scheduler. `interrupted`: the search ended before the trial did.
        reason: Why it stands so, for a person.
        step: Steps at its last evaluation; of a finished one, the step whose weights were kept.
        metrics: Of that evaluation, `<split>/<metric>`.
        folder: Where its trace, checkpoints and, once finished, its adapter are.
        seconds: Time it took, of several attempts the last.
        perturbations: Of population based training: each time that it went on from another trial's checkpoint, `step`,
            `from` (that trial), NLL of both there (`nll`, `from_nll`), and the values that changed on the way, `before`
            (its own) and `after`.
    """

    number: int
    method: str
    parameters: dict[str, Value]
    state: State = "running"
    reason: str = ""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    folder: str = ""
    seconds: float = 0.0
    perturbations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def adapter(self) -> Path | None:
        """Its adapter folder; only a finished trial has one."""
        return Path(self.folder) / "adapter" if self.state == "finished" else None


class TrialTable:
    """The rows of `trials.jsonl`, one JSON object a line. Every change is on disk before the call returns.

    Args:
        path: The file; an existing one is continued, and what was running in it has been interrupted.

    Raises:
        CaltuneError: A line of it is not a trial.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[int, Trial] = {}
        for trial in _read(path) if path.exists() else ():
            self._rows[trial.number] = trial
        self.interrupt()

    def __iter__(self) -> Iterator[Trial]:
        """The trials in order; the reference is none of them."""
        return (self._rows[number] for number in sorted(self._rows) if number != REFERENCE)

    def __getitem__(self, number: int) -> Trial:
        return self._rows[number]

    @property
    def reference(self) -> Trial | None:
        """The finished reference, if there is one."""
        found = self._rows.get(REFERENCE)
        return found if found is not None and found.state == "finished" else None

    @property
    def next_number(self) -> int:
        """Number of the next new trial."""
        return max(self._rows, default=REFERENCE) + 1

    def closed(self) -> list[Trial]:
        """Trials that need not run again."""
        return [trial for trial in self if trial.state not in OPEN_STATES]

    def interrupted(self) -> list[Trial]:
        """Trials to go on with."""
        return [trial for trial in self if trial.state == "interrupted"]

    def put(self, trial: Trial) -> None:
        """Adds a trial, or writes over the one of its number."""
        self._rows[trial.number] = trial
        self._write()

    def change(self, number: int, **changes: Any) -> Trial:
        """Changes a trial's attributes."""
        self.put(replace(self._rows[number], **changes))
        return self._rows[number]

    def interrupt(self) -> None:
        """Marks what is running as interrupted."""
        running = [trial for trial in self._rows.values() if trial.state == "running"]
        for trial in running:
            reason = f"the search ended at step {trial.step}"
            self._rows[trial.number] = replace(trial, state="interrupted", reason=reason)
        if running:
            self._write()

    def _write(self) -> None:
        rows = [asdict(self._rows[number]) for number in sorted(self._rows)]
        for row, trial in zip(rows, (self._rows[number] for number in sorted(self._rows)), strict=True):
            row["adapter"] = str(trial.adapter) if trial.adapter else None
        with replacing(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path) -> Iterator[Trial]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            row.pop("adapter", None)
            yield Trial(**row)
        except (ValueError, TypeError, AttributeError) as problem:
            raise CaltuneError(
                f"{path}:{number}: not a trial ({problem}); remove the line, or start the search anew with --overwrite"
            ) from problem
