"""A whole run on open-ended rows: train, answer, report, compare."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.config import RunConfig
from components.run_file import to_yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S = 800


def test_run_and_compare(
    tmp_path: Path, small_run: Callable[..., RunConfig], start: Callable[..., subprocess.Popen[str]]
) -> None:
    rows = [{"id": f"o{i}", "question": f"Who wrote book {i}?", "answers": [f"Ann {i}", "Bo"]} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {
        "source": {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "rows": "open"},
        "splits": {"train": 16, "calibration": 8, "validation": 6, "test": 8},
        "ood": {"facts": {"kind": "facts", "domain": "chemistry"}},
        "prompt": {"style": "plain", "template": "Question: {question}\nAnswer:", "delimiter": " "},
    }
    config = small_run(
        tmp_path / "outputs",
        methods=["base", "sft", "calm"],
        recalibrate={},
        data=data,
        calm={"inner_steps": 1, "entropy_over": "vocabulary"},
        generation={"samples": 4, "max_new_tokens": 6},
    )
    (tmp_path / "open.yaml").write_text(to_yaml(config))
    assert start(tmp_path, "run", "--config", tmp_path / "open.yaml").wait(TIMEOUT_S) == 0
    summary = json.loads((config.folder / "report" / "summary.json").read_text())
    assert set(summary["methods"]["calm"]) == {"id", "facts"}
    assert list(summary["sources"]["calm"]) == ["semantic", "semantic_split", "sequence", "sequence_sum", "softmax"]
    assert {row["metric"] for row in summary["comparisons"] if row["split"] == "id"} >= {"ece", "accuracy"}
    page = (config.folder / "report" / "index.html").read_text()
    assert "answers in its own words" in page
    assert not (config.folder / "calm" / "generated").exists()
    assert start(tmp_path, "compare", config.folder, "--json", name="compare").wait(TIMEOUT_S) == 0
    compared = json.loads((tmp_path / "compare.out").read_text())
    assert compared["methods"] == summary["methods"]
