"""Versions, promotion, rollback and history on a real MLflow database, no server."""

from __future__ import annotations

import json

import pytest

from components.config_gate import GateConfig
from components.errors import GateError, ModelError, PromotionConflictError, RegistryError, UsageError
from components.registry import ledger as ledger_module
from components.registry.candidate import note_champion, read_candidate
from components.registry.client import Connection
from components.registry.judging import judge_version
from components.registry.ledger import Ledger, champions
from components.registry.promotion import history, promote, rollback
from components.registry.registry import CHALLENGER, Registry

LENIENT = {"method": "calm", "rules": [{"metric": "ece", "threshold": 0.9}]}


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    return Connection(f"sqlite:///{tmp_path_factory.mktemp('database')}/mlflow.db")


@pytest.fixture
def registry(connection):
    return Registry(connection)


@pytest.fixture
def model(request):
    """A registered model of the test's own."""
    return request.node.name.replace("[", "-").replace("]", "")


@pytest.fixture
def tracked_run(connection, tmp_path):
    """A finished MLflow run."""
    with connection.requests() as client:
        experiment = client.create_experiment(tmp_path.name, artifact_location=(tmp_path / "artifacts").as_uri())
        run_id = client.create_run(experiment).info.run_id
        client.set_terminated(run_id)
    return run_id


@pytest.fixture
def ship(registry, model, make_run, tracked_run, simulate):
    """Registers a model of the given over-confidence, the first one calibrated; each on the same questions."""
    made = 0

    def register(sharpening=1.0, gate=LENIENT, method="calm", **results):
        nonlocal made
        made += 1
        found = {"calm": {"id": simulate(300, sharpening=sharpening)}, **results}
        candidate = read_candidate(make_run(found, name=f"run-{made}", gate=gate), method)
        return registry.register(model, candidate, tracked_run)

    return register


def promoted(registry, version, by="ada"):
    return promote(registry, version, judge_version(registry, version), by)


def test_a_registered_version_holds_all_that_is_needed(registry, model, ship, simulate, tmp_path):
    version = ship(sft={"id": simulate(300, sharpening=2.0)}, gate={**LENIENT, "rules": [
        {"metric": "ece", "against": "sft", "min_absolute_change": 0.0}]})  # fmt: skip
    assert version.number == "1"
    assert registry.by_alias(model, CHALLENGER) == version
    assert registry.champion(model) is None
    assert version.tags["caltune.git_commit"].startswith("c0ffee")
    assert version.tags["caltune.data_hash.train"] == "aa11"
    assert version.tags["caltune.run"] == "run-1"
    assert len(version.tags["caltune.run_hash"]) == 64
    value = simulate(300).correct.mean()
    assert version.tags["id/accuracy"].startswith(f"{value:.4f} [")
    from components.models.adapter_checks import verify_adapter

    folder = registry.download(version, tmp_path / "fetched")
    assert verify_adapter(folder)["method"] == "calm"
    results = registry.results(version, ["id", "ood"])
    assert results.predictions["id"].ids == simulate(300).ids
    assert (folder / "evaluation" / "sft" / "id" / "metrics.json").is_file()


def test_registering_again_gives_the_same_version(registry, model, make_run, tracked_run, simulate):
    candidate = read_candidate(make_run({"calm": {"id": simulate(50)}}))
    first, second = (registry.register(model, candidate, tracked_run) for _ in range(2))
    assert first.number == second.number == "1"
    assert len(registry.versions(model)) == 1


def test_what_cannot_be_registered(registry, model, make_run, tracked_run, simulate):
    folder = make_run({"calm": {"id": simulate(50)}})
    with pytest.raises(UsageError, match="'sft' has no adapter"):
        read_candidate(folder, "sft")
    weights = folder / "calm" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="bytes"):
        registry.register(model, read_candidate(folder), tracked_run)
    assert registry.versions(model) == []


def test_promotion_moves_the_alias_and_leaves_an_audit(registry, connection, model, ship):
    version = ship()
    entry = promoted(registry, version)
    assert registry.champion(model).number == "1"
    assert registry.by_alias(model, CHALLENGER) is None
    assert (entry.number, entry.action, entry.version, entry.before, entry.by) == (1, "promote", "1", None, "ada")
    tags = registry.version(model, "1").tags
    noted = json.loads(tags["caltune.audit.1"])
    assert noted["by"] == "ada"
    assert noted["git_commit"].startswith("c0ffee")
    assert tags["caltune.gate"] == "passed"
    with registry.files(version, f"audit/{entry.id}") as folder:
        decision = json.loads((folder / "decision.json").read_text())
        assert "at most 0.9" in (folder / "verdict.md").read_text()
    assert decision["verdict"]["passed"] is True
    assert decision["tags"]["caltune.data_hash.train"] == "aa11"
    assert decision["tags"]["id/ece"] == tags["id/ece"]


def test_a_refused_model_changes_nothing(registry, model, ship):
    strict = {"method": "calm", "rules": [{"metric": "ece", "min_absolute_change": 0.0}]}
    promoted(registry, ship(gate=strict))
    worse = ship(sharpening=3.0, gate=strict)
    verdict = judge_version(registry, worse)
    assert "paired with champion (version 1) on 300 questions" in verdict.rules[0].reason
    with pytest.raises(GateError, match="did not pass the gate") as caught:
        promote(registry, worse, verdict, "ada")
    assert caught.value.exit_code == 3
    assert registry.champion(model).number == "1"
    assert registry.by_alias(model, CHALLENGER).number == "2"
    assert "did not pass" in registry.version(model, "2").tags["caltune.gate"]
    assert len(history(registry, model).entries) == 1


@pytest.mark.slow
def test_rollback_restores_the_champion_before_step_by_step(registry, model, ship):
    for sharpening in (1.0, 1.1, 1.2):
        promoted(registry, ship(sharpening))
    assert registry.champion(model).number == "3"
    entry = rollback(registry, model, "bo", "complaints")
    assert (entry.action, entry.version, entry.before, entry.reason) == ("rollback", "2", "3", "complaints")
    assert registry.champion(model).number == "2"
    rollback(registry, model, "bo", "still")
    assert registry.champion(model).number == "1"
    with pytest.raises(RegistryError, match="no champion before version 1"):
        rollback(registry, model, "bo", "once more")
    promoted(registry, registry.version(model, "3"))
    rollback(registry, model, "bo", "no")
    assert registry.champion(model).number == "1"
    past = history(registry, model)
    assert [(e.number, e.action, e.version, e.state) for e in past.entries] == [
        (1, "promote", "1", "done"),
        (2, "promote", "2", "done"),
        (3, "promote", "3", "done"),
        (4, "rollback", "2", "done"),
        (5, "rollback", "1", "done"),
        (6, "promote", "3", "done"),
        (7, "rollback", "1", "done"),
    ]
    assert not past.moved_by_hand
    assert "caltune.audit.4" in registry.version(model, "2").tags


@pytest.mark.slow
def test_the_champion_of_yesterday_is_not_beaten_by_todays_verdict(registry, model, ship):
    """Two challengers judged against the same champion: the second to promote must be judged again."""
    promoted(registry, ship())
    one, other = ship(1.1), ship(1.2)
    verdicts = [judge_version(registry, version) for version in (one, other)]
    promote(registry, one, verdicts[0], "ada")
    with pytest.raises(PromotionConflictError, match="judged against version 1, but champion is now version 2"):
        promote(registry, other, verdicts[1], "bo")
    assert registry.champion(model).number == "2"


def test_two_claims_after_the_same_entry_have_one_winner(connection, model):
    ledger = Ledger(connection, model)
    tags = {"action": "promote", "version": "1", "by": "ada", "id": "a"}
    assert ledger.claim(0, tags, "file:///nowhere", None).number == 1
    with pytest.raises(PromotionConflictError, match="ada decided to promote version 1"):
        ledger.claim(0, {**tags, "by": "bo", "id": "b"}, "file:///nowhere", None)
    assert [entry.state for entry in ledger.entries()] == ["claimed", "lost"]
    with pytest.raises(PromotionConflictError):
        ledger.claim(1, {**tags, "id": "c"}, "file:///nowhere", None)  # the lost entry has come between
    assert ledger.claim(3, {**tags, "id": "d"}, "file:///nowhere", None).number == 4


@pytest.mark.slow
def test_a_promotion_that_died_half_way_is_settled_by_the_alias(registry, connection, model, ship, monkeypatch):
    monkeypatch.setattr(ledger_module.Ledger.settled, "__defaults__", (0.2,))
    one, other = ship(), ship(1.1)
    tags = {"action": "promote", "by": "ada", "id": "a"}
    ledger = Ledger(connection, model)
    ledger.claim(0, {**tags, "version": other.number}, "file:///nowhere", None)  # died before the alias moved
    promoted(registry, one)
    ledger.claim(2, {**tags, "version": other.number}, "file:///nowhere", None)
    with connection.requests() as client:
        client.set_registered_model_alias(model, "champion", other.number)  # died after
    rollback(registry, model, "bo", "why")
    assert [entry.state for entry in ledger.entries()] == ["abandoned", "done", "done", "done"]
    assert registry.champion(model).number == one.number


@pytest.mark.slow
def test_a_promotion_that_slept_too_long_puts_the_alias_back(registry, model, ship, monkeypatch):
    """It is given up by another one between its last look and its move."""
    monkeypatch.setattr(ledger_module.Ledger.settled, "__defaults__", (0.0,))
    promoted(registry, ship())
    slow, quick = ship(1.1), ship(1.2)
    verdict = judge_version(registry, slow)
    from components.registry import promotion

    move = promotion._move_champion

    def late(registry, version):
        monkeypatch.setattr(promotion, "_move_champion", move)
        ledger, entries, champion = promotion._standing(registry, model)  # gives the slow one up
        promotion._decide(registry, ledger, "promote", quick, entries, champion, "bo", "quick")
        move(registry, version)

    monkeypatch.setattr(promotion, "_move_champion", late)
    with pytest.raises(PromotionConflictError, match="the alias was put back"):
        promote(registry, slow, verdict, "ada")
    assert registry.champion(model).number == quick.number
    assert not history(registry, model).moved_by_hand


@pytest.mark.slow
def test_an_alias_moved_by_hand_shows_and_can_be_rolled_back(registry, connection, model, ship):
    one, other = ship(), ship(1.1)
    promoted(registry, one)
    with connection.requests() as client:
        client.set_registered_model_alias(model, "champion", other.number)
    assert history(registry, model).moved_by_hand
    rollback(registry, model, "ada", "not through the gate")
    assert registry.champion(model).number == one.number
    assert not history(registry, model).moved_by_hand


@pytest.mark.slow
def test_the_champions_answers_to_the_new_questions_are_used(registry, model, make_run, tracked_run, simulate, ship):
    """Evaluated in the candidate's run, it is compared paired; with a note of another version it is not."""
    gate = {"method": "calm", "rules": [{"metric": "ece", "non_inferiority_margin": 0.05}]}
    promoted(registry, ship())
    for noted, kind in (("1", "paired with champion (version 1)"), ("7", "answered other questions")):
        new = {"calm": {"id": simulate(200, seed=5)}, "champion": {"id": simulate(200, seed=5, sharpening=1.5)}}
        folder = make_run(new, name=f"fresh-{noted}", gate=gate)
        note_champion(folder, model, noted)
        verdict = judge_version(registry, registry.register(model, read_candidate(folder), tracked_run))
        assert kind in verdict.rules[0].reason


@pytest.mark.slow
def test_rules_may_be_named_when_the_run_file_has_none(registry, ship):
    version = ship(gate=None)
    with pytest.raises(UsageError, match="has no section 'gate'"):
        judge_version(registry, version)
    assert judge_version(registry, version, GateConfig.model_validate(LENIENT)).passed


@pytest.mark.slow
def test_a_verdict_about_another_version_is_refused(registry, ship):
    one, other = ship(), ship(1.1)
    with pytest.raises(RegistryError, match="not about"):
        promote(registry, other, judge_version(registry, one), "ada")


@pytest.mark.slow
def test_champion_already(registry, ship):
    version = ship()
    promoted(registry, version)
    with pytest.raises(RegistryError, match="champion already"):
        promoted(registry, version)


def test_the_stack_of_champions_knows_unfinished_decisions():
    from components.registry.ledger import Entry

    def entry(number, action, version, state="done"):
        return Entry(number, state, action, version, None, "", "", "", None, "", {})

    decisions = [entry(1, "promote", "1"), entry(2, "promote", "2", "lost"), entry(3, "promote", "3")]
    assert champions(decisions) == ["1", "3"]
    assert champions([*decisions, entry(4, "rollback", "1", "abandoned")]) == ["1", "3"]
    assert champions([*decisions, entry(4, "rollback", "1")]) == ["1"]
