"""The shipped suites: each names run files and methods that exist, and takes local data from where it is told to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from components.data.prepare import prepare
from components.suite_file import load_suite_file

ROOT = Path(__file__).resolve().parents[1]
MMLU = (
    "electrical_engineering",
    "computer_security",
    "machine_learning",
    "clinical_knowledge",
    "nutrition",
    "jurisprudence",
)
SUITES = sorted((ROOT / "ray_jobs" / "configs" / "suites").glob("*.yaml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_shipped_suite_loads(path):
    plan = load_suite_file(path, ())
    assert len(plan.runs) == len(plan.config.runs) * len(plan.config.seeds)
    assert plan.config.suite == path.stem.replace("_", "-")
    assert {"base", "sft"} <= set(plan.runs[0].config.methods)


def test_every_protocol_belongs_to_a_suite():
    named = {run.file.name for path in SUITES for run in load_suite_file(path, ()).config.runs}
    assert named == {path.name for path in (ROOT / "ray_jobs" / "configs" / "protocols").glob("*.yaml")}


def write_data(folder: Path) -> None:
    """A few rows in the layout that the CPU-size run files name."""
    for name in ("arc_easy/train.jsonl.gz", "arc_easy/test.jsonl.gz", "openbookqa/train.jsonl.gz"):
        _rows(folder / name, 40)
    _rows(folder / "openbookqa/test.jsonl", 40)
    _rows(folder / "mmlu/test.jsonl.gz", 48, subject=MMLU)


def _rows(path: Path, count: int, subject: Sequence[str] = ()) -> None:
    import gzip

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": f"{path.parent.name}-{i}", "question": f"{path} {i}?", "choices": ["x", "y"], "answer": 0}
        | ({"subject": subject[i % len(subject)]} if subject else {})
        for i in range(count)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def test_the_cpu_suites_mixture_is_read_from_data_root(tmp_path):
    write_data(tmp_path / "data")
    sizes = "data.splits={train: 30, calibration: 8, validation: 8, test: 12}"
    plan = load_suite_file(ROOT / "ray_jobs/configs/suites/cpu.yaml", (f"data.root={tmp_path / 'data'}", sizes))
    config = next(run.config for run in plan.runs if run.name == "mcqa")
    data = prepare(config, tmp_path / "out", tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 30,
        "calibration": 8,
        "validation": 8,
        "id": 12,
        "mmlu": 12,
    }
    groups = [question.group for question in data.splits["id"]]
    assert groups.count("arc_easy-test") == groups.count("openbookqa-test") == 6
