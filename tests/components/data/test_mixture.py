"""Mixtures of sources, and where relative paths of sources start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.config_data import SourceConfig
from components.data.sources import load_source
from components.errors import RunFileError
from components.run_file import config_hash, load_run_file, save_resolved


def rows(folder: Path, name: str, count: int, **more: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": f"row-{i}", "question": f"{name} {i}?", "choices": ["x", "y"], "answer": i % 2, **more})
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def mixture(tmp_path: Path) -> SourceConfig:
    """12 rows of a, of which 4 are taken, and 3 of b in group law; ids are the same in both."""
    rows(tmp_path, "a/train.jsonl", 12)
    rows(tmp_path, "b/train.jsonl", 3, group="law")
    parts = [{"kind": "file", "path": "a/train.jsonl", "limit": 4}, {"kind": "file", "path": "b/train.jsonl"}]
    return SourceConfig.model_validate({"kind": "mixture", "sources": parts})


def test_sources_stand_one_after_the_other_and_are_told_apart(mixture, tmp_path):
    found = load_source(mixture, 0, "source", tmp_path)
    assert [q.group for q in found] == ["a-train"] * 4 + ["law"] * 3
    assert [q.id for q in found][4:] == ["b-train/row-0", "b-train/row-1", "b-train/row-2"]
    assert len({q.id for q in found}) == 7
    assert "a/train.jsonl" in found.source
    assert "b/train.jsonl" in found.source


def test_a_limit_and_groups_apply_to_the_whole(mixture, tmp_path):
    drawn = load_source(mixture.model_copy(update={"limit": 4}), 0, "source", tmp_path)
    assert sorted(q.group for q in drawn) == ["a-train", "a-train", "law", "law"]
    assert len(load_source(mixture.model_copy(update={"groups": ["law"]}), 0, "source", tmp_path)) == 3


def test_the_same_source_twice_gets_two_names(tmp_path):
    parts = [{"kind": "facts", "domain": "chemistry", "limit": 2}] * 2
    found = load_source(SourceConfig.model_validate({"kind": "mixture", "sources": parts}), 0, "source", tmp_path)
    assert {q.id.split("/")[0] for q in found} == {"chemistry-1", "chemistry-2"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{kind: mixture}", "needs 'sources'"),
        ("{kind: facts, domain: chemistry, sources: [{kind: facts, domain: chemistry}]}", "belongs to kind 'mixture'"),
        (
            "{kind: mixture, sources: [{kind: mixture, sources: [{kind: facts, domain: chemistry}]}]}",
            "a mixture itself",
        ),
        ("{kind: mixture, sources: [{kind: file}]}", "data.source.sources.0: kind 'file' needs 'path'"),
        ("{kind: mixture, sources: [{kind: facts, domian: chemistry}]}", "did you mean 'domain'"),
    ],
)
def test_a_bad_mixture_is_refused(tmp_path, source, said):
    (tmp_path / "run.yaml").write_text(f"run: r\ndata:\n  source: {source}\n")
    with pytest.raises(RunFileError) as problem:
        load_run_file(tmp_path / "run.yaml")
    assert said in str(problem.value)


def test_root_is_where_relative_paths_start_and_does_not_stay(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "run: r\ndata:\n"
        "  source: {kind: mixture, sources: [{kind: file, path: a.jsonl}, {kind: file, path: /b.jsonl}]}\n"
        "  test_source: {kind: file, path: sub/t.jsonl}\n  ood: {o: {kind: file, path: o.jsonl}}\n"
    )
    plain = load_run_file(tmp_path / "run.yaml")
    assert plain.data.test_source.path == tmp_path / "sub/t.jsonl"
    config = load_run_file(tmp_path / "run.yaml", [f"data.root={tmp_path / 'there'}"])
    assert [str(part.path) for part in config.data.source.sources] == [str(tmp_path / "there/a.jsonl"), "/b.jsonl"]
    assert config.data.test_source.path == tmp_path / "there/sub/t.jsonl"
    assert config.data.ood["o"].path == tmp_path / "there/o.jsonl"
    save_resolved(config, tmp_path / "elsewhere" / "config.resolved.yaml")
    again = load_run_file(tmp_path / "elsewhere" / "config.resolved.yaml")
    assert again == config
    assert config_hash(again) == config_hash(config) != config_hash(plain)
