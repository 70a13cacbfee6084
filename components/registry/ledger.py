"""The ledger: a numbered list of the decisions about a model's champion, of which no two can have the same number.

MLflow has no compare-and-swap: the last of two who set an alias wins, and the other never hears of it. It has one thing
that only one of two can get, the next version number of a registered model, which the server's database keeps unique.
So the decisions about model `m` are the versions of a second registered model, `m-ledger`: version 7 is the seventh.
Who decides reads the last number n, judges, then appends an entry that says `follows n`. The server gives it a number.
Is it n + 1, nobody has come between; else somebody has, and the entry is marked `lost`.

Limits:

- It binds those who go through it. Whoever moves the alias by hand is not held up; `history` shows that it happened.
- An entry is `claimed` until its alias is moved. If its process dies in between, the next decision waits, then settles
  the entry by what the alias says. A process that was only stopped for longer than that, between its last check and the
  moving of the alias, moves it late; it notices afterwards, puts the alias back where the ledger says, and fails. Until
  then the alias is wrong, and if it dies before that it stays wrong; `history` shows this too.
- Deleting entries through MLflow deletes history.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from components.errors import PromotionConflictError, RegistryError
from components.registry.client import Connection

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

SETTLE_SECONDS = 20.0
"""How long an unfinished decision is waited for."""
_POLL_SECONDS = 0.2
_PREFIX = "caltune."
_PAGE = 200

State = Literal["claimed", "done", "lost", "abandoned"]
Action = Literal["promote", "rollback"]


@dataclass(frozen=True)
class Entry:
    """One decision.

    Attributes:
        number: Its place in the order of decisions, from 1.
        state: `claimed` while under way, `done`, `lost` to one that came between, `abandoned` before it moved anything.
        action: `promote` or `rollback`.
        version: The version that becomes champion.
        before: The champion before; None where there was none.
        by: Who decided.
        at: When, by the server's clock, UTC.
        id: Unique id, which also names the audit artifact.
        run_id: MLflow run of the version, which holds the audit artifact.
        reason: Why, in words.
        details: Everything else that was noted: run, git commit, data hashes.
    """

    number: int
    state: str
    action: str
    version: str
    before: str | None
    by: str
    at: str
    id: str
    run_id: str | None
    reason: str
    details: Mapping[str, str]


class Ledger:
    """Decisions about one model.

    Args:
        connection: The server.
        model: Name of the registered model.
    """

    def __init__(self, connection: Connection, model: str) -> None:
        self._connection, self.model, self.name = connection, model, f"{model}-ledger"

    def entries(self) -> list[Entry]:
        """All decisions in order."""
        found: list[Any] = []
        token = None
        with self._connection.requests() as client:
            while True:
                page = client.search_model_versions(f"name='{self.name}'", max_results=_PAGE, page_token=token)
                found += page
                token = page.token
                if not token:
                    break
        return sorted((_entry(version) for version in found), key=lambda entry: entry.number)

    def settled(self, champion: Callable[[], str | None], wait: float = SETTLE_SECONDS) -> list[Entry]:
        """All decisions, the last of them finished: one under way is waited for, then settled by what the alias says.

        Args:
            champion: Reads what the alias says.
            wait: Seconds to wait.
        """
        deadline = time.monotonic() + wait
        while (entries := self.entries()) and entries[-1].state == "claimed" and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if entries and entries[-1].state == "claimed":
            self.settle(entries[-1], "done" if entries[-1].version == champion() else "abandoned")
            return self.entries()
        return entries

    def claim(self, follows: int, tags: Mapping[str, str], source: str, run_id: str | None) -> Entry:
        """Appends an entry, provided that nobody has since entry `follows` was the last.

        Args:
            follows: Number of the last entry when the decision was taken, 0 for an empty ledger.
            tags: What `Entry` holds, by its names.
            source: Where the audit artifact stands.
            run_id: MLflow run that holds it.

        Raises:
            PromotionConflictError: Somebody has; the entry made is marked `lost`.
        """
        self._create()
        prefixed = {f"{_PREFIX}{key}": value for key, value in {**tags, "follows": str(follows)}.items()}
        with self._connection.requests() as client:
            made = client.create_model_version(
                self.name,
                source,
                run_id=run_id,
                tags={**prefixed, f"{_PREFIX}state": "claimed"},
                await_creation_for=0,
            )
        entry = _entry(made)
        if entry.number == follows + 1:
            return entry
        self.settle(entry, "lost")
        winner = next((other for other in self.entries() if other.number == follows + 1), None)
        if winner is not None and winner.id == entry.id:  # ours too: its answer was lost and the request repeated
            return winner
        who = f"{winner.by} decided to {winner.action} version {winner.version}" if winner else "somebody decided"
        raise PromotionConflictError(
            f"{who} of '{self.model}' at the same time and was first; nothing was changed. Judge again against the "
            "champion there is now"
        )

    def state_of(self, entry: Entry) -> str:
        """The state of an entry as the server has it now."""
        with self._connection.requests() as client:
            return str(client.get_model_version(self.name, str(entry.number)).tags[f"{_PREFIX}state"])

    def settle(self, entry: Entry, state: State) -> None:
        """Notes how a decision ended."""
        with self._connection.requests() as client:
            client.set_model_version_tag(self.name, str(entry.number), f"{_PREFIX}state", state)

    def _create(self) -> None:
        try:
            with self._connection.requests() as client:
                client.create_registered_model(
                    self.name,
                    description=f"Decisions about the champion of {self.model}, in order; written by caltune. "
                    "Version n is the n-th decision. Do not delete.",
                )
        except RegistryError as error:
            if getattr(error.__cause__, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise


def champions(entries: list[Entry]) -> list[str]:
    """Versions that were champion, as a stack: the present one last, the one that a rollback restores before it."""
    stack: list[str] = []
    for entry in entries:
        if entry.state != "done":
            continue
        if entry.action == "rollback":
            while stack and stack[-1] != entry.version:
                stack.pop()
        if not stack or stack[-1] != entry.version:
            stack.append(entry.version)
    return stack


def _entry(version: ModelVersion) -> Entry:
    tags = {key.removeprefix(_PREFIX): value for key, value in version.tags.items() if key.startswith(_PREFIX)}
    known = {"state", "action", "version", "before", "by", "id", "reason", "follows"}
    return Entry(
        int(version.version),
        tags.get("state", "claimed"),
        tags["action"],
        tags["version"],
        tags.get("before") or None,
        tags["by"],
        datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
        tags["id"],
        version.run_id or None,
        tags.get("reason", ""),
        {key: value for key, value in tags.items() if key not in known},
    )
