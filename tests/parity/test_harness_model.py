"""lm-evaluation-harness's command line on a caltune adapter against `caltune evaluate` on the same ARC-Easy questions.

Real: model, data, both command lines. The adapter is LoRA and a calibration head moved at random, so that each of the
two shows in the scores.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from components.evaluation.predictions import read_predictions
from components.run_file import load_run_file
from components.training.methods import METHODS

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[parity]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "arc_easy"
ROWS = 200
TOLERANCE = 1e-4

TASK = """
task: arc_easy_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
RUN_FILE = """
run: parity
output_dir: {folder}
methods: [base]
model: {{name: {model}, adapter: {{r: 4}}, mixlora: {{r: 4, num_experts: 4}}}}
data:
  source: {{kind: file, path: {train}}}
  test_source: {{kind: file, path: {test}}}
  splits: {{train: 1, calibration: 0, validation: 1, test: {n}}}
  prompt: {{style: plain, template: "Question: {{question}}\\nAnswer:", delimiter: " ", scoring: text}}
evaluation: {{bootstrap: 100}}
tracking: {{enabled: false}}
"""


def command(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def run_file(tmp_path, smollm2_folder):
    if not DATA.is_dir():
        pytest.skip(f"ARC-Easy's question files, which the comparison is on, are not at {DATA}")
    rows = gzip.decompress((DATA / "test.jsonl.gz").read_bytes()).decode().splitlines()[:ROWS]
    (tmp_path / "test.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "task.yaml").write_text(TASK.format(rows=tmp_path / "test.jsonl"))
    path = tmp_path / "run.yaml"
    fields = {"folder": tmp_path / "outputs", "model": smollm2_folder, "n": ROWS}
    path.write_text(RUN_FILE.format(train=DATA / "train.jsonl.gz", test=tmp_path / "test.jsonl", **fields))
    return path


@pytest.mark.parametrize("method", ["calm", "uq4ct"])
def test_the_harness_agrees_with_evaluate(method, run_file, write_adapter, random_head, tmp_path):
    config = load_run_file(run_file)
    spec, head = (
        METHODS[method].adapter_spec(config),
        partial(random_head, size=49152, l=0.3, rho=0.2, shared=0.4) if method == "calm" else None,
    )
    adapter = write_adapter(
        tmp_path / "adapter", config.model, spec, method, scale=0.01, head=head, prompt=config.data.prompt
    )
    said = command(
        "pipelines.cli", "evaluate", "--config", str(run_file), "--adapter", str(adapter), "--json", folder=tmp_path
    )  # fmt: skip
    (block,) = json.loads(said)["methods"].values()
    (path,) = (tmp_path / "outputs" / "parity").glob("*/evaluation/id/predictions.parquet")
    ours = read_predictions(path)

    command(
        "components.export.harness_command", "run", "--model", "caltune", "--model_args", f"adapter={adapter}",
        "--tasks", "arc_easy_local", "--include_path", str(tmp_path / "tasks"), "--device", "cpu",
        "--log_samples", "--output_path", str(tmp_path / "harness"), folder=tmp_path,
    )  # fmt: skip
    (results,) = (tmp_path / "harness").rglob("results_*.json")
    (samples,) = (tmp_path / "harness").rglob("samples_*.jsonl")
    accuracy = json.loads(results.read_text())["results"]["arc_easy_local"]["acc,none"]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    theirs = {row["doc"]["id"]: [float(value) for ((value, _),) in row["resps"]] for row in rows}

    assert len(theirs) == ROWS
    assert set(ours.ids) == set(theirs)
    apart = [
        float(np.abs(scores[:n] - theirs[name]).max())
        for name, n, scores in zip(ours.ids, ours.n_options, ours.option_log_probs, strict=True)
    ]
    print(f"{method}: accuracy {accuracy}, log-probabilities within {max(apart):.2g}")
    assert max(apart) <= TOLERANCE
    assert accuracy == block["id"]["accuracy"]["value"]
