"""From run file to files on disk and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from components.config import RunConfig
from components.config_data import SourceConfig
from components.data.prepare import load_prepared, prepare
from components.data.sources import load_source
from components.data.splits import entity_of
from components.errors import DataError

SIZES = {"train": 60, "calibration": 15, "validation": 20, "test": 30}


def run(**data: object) -> RunConfig:
    return RunConfig.model_validate({"run": "t", "seed": 3, "methods": ["base"], "data": {"splits": SIZES, **data}})


FACTS = {"kind": "facts", "domain": "chemistry"}


def row(index: int, text: str | None = None, **others: object) -> dict[str, object]:
    return {"question": text or f"Question {index}?", "choices": ["a", "b", "c"], "answer": index % 3, **others}


def test_facts_in_and_out_of_domain(tmp_path: Path) -> None:
    config = run(source=FACTS, heldout_groups=["block"], ood={"ood": {"kind": "facts", "domain": "geography"}})
    prepared = prepare(config, tmp_path / "data", tmp_path)
    assert list(prepared.splits) == ["train", "calibration", "validation", "validation_shift", "id", "ood"]
    sizes = {"train": 60, "calibration": 15, "validation": 20, "validation_shift": 20, "id": 30, "ood": 30}
    assert {name: len(split) for name, split in prepared.splits.items()} == sizes
    assert prepared.overlaps == ()
    assert {q.group for q in prepared.splits["validation_shift"]} == {"block"}
    entry = prepared.manifest["splits"]["id"]
    assert entry["n"] == 30
    assert entry["hash"] == prepared.splits["id"].content_hash
    assert sum(entry["groups"].values()) == 30
    assert prepared.manifest["seed"] == 3


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    prepared = prepare(run(source=FACTS), tmp_path / "data", tmp_path)
    loaded = load_prepared(tmp_path / "data")
    assert loaded == prepared
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "calibration.jsonl",
        "id.jsonl",
        "manifest.json",
        "train.jsonl",
        "validation.jsonl",
    ]
    again = prepare(run(source=FACTS), tmp_path / "again", tmp_path)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (tmp_path / "data" / "manifest.json").read_bytes()
    assert again == prepared


def test_a_changed_or_missing_file_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    prepare(run(source=FACTS), folder, tmp_path)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(DataError, match=r"train\.jsonl: is not what the manifest describes"):
        load_prepared(folder)
    (folder / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"train\.jsonl: no such file"):
        load_prepared(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read.*prepare the data again"):
        load_prepared(folder)


def test_a_same_domain_test_set_shares_no_entity_with_training(tmp_path: Path) -> None:
    config = run(
        source={**FACTS, "groups": ["symbol", "period"]},
        heldout_groups=["period"],
        ood={"numbers": {**FACTS, "groups": ["atomic_number"]}},
        splits={"train": 40, "calibration": 5, "validation": 5, "test": 20},
    )
    prepared = prepare(config, tmp_path / "data", tmp_path)
    used = {
        entity_of(q)
        for name in ("train", "calibration", "validation", "validation_shift")
        for q in prepared.splits[name]
    }
    assert len(used) == 40 + 5 + 5 + len(prepared.splits["validation_shift"])
    assert not used & {entity_of(q) for q in prepared.splits["numbers"]}
    assert prepared.manifest["left_out_by_entity"]["numbers"] == len(used)


def test_a_separate_test_file_and_what_overlaps(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    """60 + 15 + 20 of the 95 source questions are all used; 4 test questions stand among them."""
    write_rows([row(i) for i in range(95)], "source.jsonl")
    write_rows([row(i) for i in range(91, 95)] + [row(i, f"New {i}?") for i in range(6)], "test.jsonl")
    source, test = {"kind": "file", "path": "source.jsonl"}, {"kind": "file", "path": "test.jsonl"}
    config = run(source=source, test_source=test)
    prepared = prepare(config, tmp_path / "data", tmp_path)
    assert len(prepared.splits["id"]) == 10
    assert sum(overlap.questions for overlap in prepared.overlaps) == 4
    assert all(overlap.second == "id" for overlap in prepared.overlaps)
    assert load_prepared(tmp_path / "data") == prepared
    with pytest.raises(DataError, match=r"id share \d question texts"):
        prepare(run(source=source, test_source=test, overlap="error"), tmp_path / "no", tmp_path)
    assert not (tmp_path / "no").exists()
    dropped = prepare(run(source=source, test_source=test, overlap="drop"), tmp_path / "drop", tmp_path)
    assert sum(dropped.manifest["dropped"].values()) == 4
    assert len(dropped.splits["id"]) == 10
    texts = {q.question for q in dropped.splits["id"]}
    assert not any(q.question in texts for name in ("train", "calibration", "validation") for q in dropped.splits[name])


def test_names_of_other_splits_are_refused(tmp_path: Path) -> None:
    for name in ("id", "train", "../x"):
        with pytest.raises(DataError, match="no possible name"):
            prepare(run(source=FACTS, ood={name: FACTS}), tmp_path / "data", tmp_path)


def test_groups_and_limit(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    rows = [row(i, subject=("anatomy", "virology", "jurisprudence", "astronomy")[i % 4]) for i in range(80)]
    path = write_rows(rows)
    health = SourceConfig(kind="file", path=path, groups=["health"])
    assert {q.group for q in load_source(health, 0, "x", tmp_path)} == {"anatomy", "virology"}
    both = SourceConfig(kind="file", path=path, groups=["law", "astronomy"], limit=10)
    drawn = load_source(both, 0, "x", tmp_path)
    assert len(drawn) == 10
    assert sum(q.group == "astronomy" for q in drawn) == 5
    assert load_source(both, 0, "x", tmp_path) == drawn
    assert load_source(both, 1, "x", tmp_path) != drawn
    with pytest.raises(DataError, match=r"no question of group 'eng'.*anatomy, astronomy"):
        load_source(SourceConfig(kind="file", path=path, groups=["eng"]), 0, "x", tmp_path)


def test_real_split_with_its_official_test(tmp_path: Path, real_data: Path) -> None:
    """Of 23 OpenBookQA texts shared by train and test, those that fell into a split are reported, pair by pair."""
    folder = real_data / "openbookqa"
    config = run(
        source={"kind": "file", "path": str(folder / "train.jsonl.gz")},
        test_source={"kind": "file", "path": str(folder / "test.jsonl")},
        splits={"train": None, "validation": 200, "test": 500},
    )
    prepared = prepare(config, tmp_path / "data", tmp_path)
    assert sum(overlap.questions for overlap in prepared.overlaps) == 23
    assert sum(overlap.same_choices for overlap in prepared.overlaps) == 14
    assert sum(len(split) for name, split in prepared.splits.items() if name != "id") == 4957
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["splits"]["id"]["n"] == 500
