"""Who is champion: promotion upon a passed gate, rollback, and the history of both.

Each decision is written down before anything moves, then claimed in the ledger (`ledger.py` says how two at once are
told apart), then carried out by moving the alias `champion`, then read back.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.config_gate import CHAMPION
from components.errors import GateError, PromotionConflictError, RegistryError
from components.registry.ledger import Action, Entry, Ledger, champions
from components.registry.registry import CHALLENGER, Registry, Version
from components.registry.verdict import Verdict


@dataclass(frozen=True)
class History:
    """What became of a model.

    Attributes:
        entries: All decisions, the first one first.
        champion: The version that the alias points at now; None for none.
        moved_by_hand: Whether that is another one than the decisions say.
    """

    entries: tuple[Entry, ...]
    champion: str | None
    moved_by_hand: bool


def promote(registry: Registry, version: Version, verdict: Verdict, by: str) -> Entry:
    """Makes a version the champion, provided that it passed the gate against the present one.

    Args:
        registry: The registry.
        version: The version.
        verdict: From `judging.judge_version`.
        by: Who promotes.

    Raises:
        GateError: The verdict is no pass; it is noted with the version.
        PromotionConflictError: The champion is not the one that the verdict compares with, or changed meanwhile.
        RegistryError: The verdict is about another version, or the version is champion already.
    """
    if verdict.version != version.number:
        raise RegistryError(f"the verdict is about {verdict.candidate}, not about {version.name}")
    with registry.connection.turn():
        _tag(registry, version, "caltune.gate", "passed" if verdict.passed else verdict.sentence)
        if not verdict.passed:
            _write_audit(registry, version, uuid.uuid4().hex, {"action": "refuse", "by": by}, verdict)
            raise GateError(verdict.sentence)
        ledger, entries, champion = _standing(registry, version.model)
        if champion == version.number:
            raise RegistryError(f"{version.name} is champion already")
        if verdict.champion != champion:
            raise PromotionConflictError(
                f"{version.name} was judged against {_called(verdict.champion)}, but champion is now "
                f"{_called(champion)}; judge again"
            )
        entry = _decide(registry, ledger, "promote", version, entries, champion, by, verdict.sentence, verdict)
        challenger = registry.by_alias(version.model, CHALLENGER)
        if challenger is not None and challenger.number == version.number:
            with registry.connection.requests() as client:
                client.delete_registered_model_alias(version.model, CHALLENGER)
        return entry


def rollback(registry: Registry, model: str, by: str, reason: str) -> Entry:
    """Makes the champion before the present one champion again; once more goes one further back.

    Where the alias was moved by hand, that counts as the last step: the champion of the last decision is restored.

    Args:
        registry: The registry.
        model: Name of the registered model.
        by: Who rolls back.
        reason: Why, for the history.

    Raises:
        RegistryError: There was no champion before.
        PromotionConflictError: Somebody else decided meanwhile.
    """
    with registry.connection.turn():
        ledger, entries, champion = _standing(registry, model)
        past = champions(entries)
        if past and past[-1] == champion:
            past.pop()
        if not past:
            raise RegistryError(f"{model}: there was no champion before {_called(champion)}")
        return _decide(registry, ledger, "rollback", registry.version(model, past[-1]), entries, champion, by, reason)


def history(registry: Registry, model: str) -> History:
    """All decisions about a model, and whether the alias is where they say."""
    entries = Ledger(registry.connection, model).entries()
    champion = registry.champion(model)
    number = None if champion is None else champion.number
    past = champions(entries)
    expected = past[-1] if past else None
    return History(tuple(entries), number, moved_by_hand=number != expected)


def _standing(registry: Registry, model: str) -> tuple[Ledger, list[Entry], str | None]:
    """The ledger with its last decision finished, and the champion's number after that."""

    def number() -> str | None:
        champion = registry.champion(model)
        return None if champion is None else champion.number

    ledger = Ledger(registry.connection, model)
    entries = ledger.settled(number)
    return ledger, entries, number()


def _decide(
    registry: Registry,
    ledger: Ledger,
    action: Action,
    version: Version,
    entries: list[Entry],
    champion: str | None,
    by: str,
    reason: str,
    verdict: Verdict | None = None,
) -> Entry:
    follows = entries[-1].number if entries else 0
    decision = {
        "action": action,
        "model": version.model,
        "version": version.number,
        "before": champion or "",
        "by": by,
        "id": uuid.uuid4().hex,
        "reason": reason[:1000],
        **{key.removeprefix("caltune."): value for key, value in version.tags.items() if _identifies(key)},
    }
    source = _write_audit(registry, version, decision["id"], decision, verdict)
    entry = ledger.claim(follows, decision, source, version.run_id)
    if ledger.state_of(entry) != "claimed":
        raise PromotionConflictError(f"decision {entry.number} took too long; the next one has given it up")
    _move_champion(registry, version)
    now = registry.champion(version.model)
    if ledger.state_of(entry) == "abandoned":
        _restore(registry, ledger, version.model)
        raise PromotionConflictError(
            f"decision {entry.number} took too long and another went ahead; the alias was put back"
        )
    if now is None or now.number != version.number:
        raise PromotionConflictError(
            f"the alias '{CHAMPION}' of {version.model} was moved elsewhere while {version.name} became champion"
        )
    _tag(registry, version, f"caltune.audit.{entry.number}", json.dumps({**decision, "at": entry.at}))
    ledger.settle(entry, "done")
    return entry


def _move_champion(registry: Registry, version: Version) -> None:
    with registry.connection.requests() as client:
        client.set_registered_model_alias(version.model, CHAMPION, version.number)


def _restore(registry: Registry, ledger: Ledger, model: str) -> None:
    past = champions(ledger.entries())
    if past:
        _move_champion(registry, registry.version(model, past[-1]))


def _write_audit(
    registry: Registry, version: Version, decision_id: str, decision: Mapping[str, Any], verdict: Verdict | None
) -> str:
    """Writes who, what and why beside the version's files; returns where."""
    folder = f"audit/{decision_id}"
    document = {**decision, "tags": version.tags, "verdict": None if verdict is None else verdict.as_dict()}
    with registry.connection.requests() as client:
        client.log_dict(version.run_id, document, f"{folder}/decision.json")
        if verdict is not None:
            client.log_text(version.run_id, verdict.as_markdown(), f"{folder}/verdict.md")
        return f"{client.get_run(version.run_id).info.artifact_uri}/{folder}"


def _identifies(tag: str) -> bool:
    """Whether a version's tag says which run, code and data it comes from."""
    return tag.startswith(("caltune.run", "caltune.method", "caltune.git", "caltune.data_hash"))


def _tag(registry: Registry, version: Version, key: str, value: str) -> None:
    with registry.connection.requests() as client:
        client.set_model_version_tag(version.model, version.number, key, value)


def _called(number: str | None) -> str:
    return "no champion" if number is None else f"version {number}"
