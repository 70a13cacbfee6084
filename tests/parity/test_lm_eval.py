"""`caltune evaluate` against lm-evaluation-harness on ARC-Easy's test questions, same model, prompt and rows.

All 2,376 rows, by text and by letter. The harness runs one row per option, so each takes half an hour on one core.
Some rows have three options, some five. Real: model, data, command line, harness.

The harness is told to take its softmax in float64. In float32, its default, torch's `log_softmax` over 49,152 tokens is
off by about 9e-6 a token, always to the same side, which makes 1.6e-4 of an answer of 16 tokens; `logsumexp`, which
caltune uses, stays within 5e-5 of float64 on the same answers.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.config_data import PromptConfig
from components.data.prompts import PromptEncoder
from components.data.schema import Question
from components.evaluation.predictions import Predictions, read_predictions

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[parity]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(10800)]

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "arc_easy"
TOLERANCE = 1e-4

RUN_FILE = """
run: parity-{scoring}
output_dir: {folder}
methods: [base]
model: {{name: {model}}}
data:
  source: {{kind: file, path: {train}}}
  test_source: {{kind: file, path: {test}}}
  splits: {{train: 1, calibration: 0, validation: 1, test: {rows}}}
  prompt: {{style: plain, template: "{template}", delimiter: " ", scoring: {scoring}}}
evaluation: {{bootstrap: 100}}
tracking: {{enabled: false}}
"""
TEMPLATES = {"text": "Question: {question}\\nAnswer:", "letter": "{question}\\n{options}\\nAnswer:"}
ROWS = 2376


def harness_prompt(scoring: str, row: dict[str, Any]) -> str:
    """The prompt, written here once more: `arc_easy`'s own for text, the options one a line for letters."""
    if scoring == "text":
        return f"Question: {row['question']}\nAnswer:"
    options = [f"{letter}. {choice}" for letter, choice in zip("ABCDE", row["choices"], strict=False)]
    return "\n".join([row["question"], *options, "Answer:"])


def harness_choices(scoring: str, row: dict[str, Any]) -> list[str]:
    return row["choices"] if scoring == "text" else list("ABCDE"[: len(row["choices"])])


def ask_harness(scoring: str, rows: Path, model: Path, cache: Path) -> tuple[dict[str, list[float]], float]:
    """Log-probability of every option by question id, and the accuracy, both by the harness."""
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    task = ConfigurableTask(
        config={
            "task": f"arc_easy_{scoring}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(cache)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": lambda row: harness_prompt(scoring, row),
            "doc_to_choice": lambda row: harness_choices(scoring, row),
            "doc_to_target": lambda row: row["answer"],
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    harness = HFLM(pretrained=str(model), device="cpu", dtype="float32", softmax_dtype="float64", batch_size=8)
    found = simple_evaluate(harness, tasks=[task], bootstrap_iters=0, log_samples=True)
    samples = found["samples"][f"arc_easy_{scoring}"]
    scores = {s["doc"]["id"]: [float(score) for ((score, _),) in s["resps"]] for s in samples}
    return scores, found["results"][f"arc_easy_{scoring}"]["acc,none"]


def ask_caltune(scoring: str, rows: Path, model: Path, folder: Path) -> tuple[Predictions, float]:
    """Predictions and reported accuracy of the command line."""
    run_file = folder / "run.yaml"
    run_file.write_text(
        RUN_FILE.format(
            scoring=scoring,
            folder=folder / "outputs",
            model=model,
            train=DATA / "train.jsonl.gz",
            test=rows,
            rows=ROWS,
            template=TEMPLATES[scoring],
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "evaluate", "--config", str(run_file), "--json"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = json.loads(done.stdout)["methods"]["base"]["id"]["accuracy"]["value"]
    predictions = folder / "outputs" / f"parity-{scoring}" / "base" / "evaluation" / "id" / "predictions.parquet"
    return read_predictions(predictions), accuracy


@pytest.fixture
def arc_easy(tmp_path):
    """ARC-Easy's test file, unpacked for the harness."""
    if not DATA.is_dir():
        pytest.skip(f"ARC-Easy's question files, which the comparison is on, are not at {DATA}")
    path = tmp_path / "test.jsonl"
    path.write_bytes(gzip.decompress((DATA / "test.jsonl.gz").read_bytes()))
    return path


@pytest.mark.parametrize("scoring", ["text", "letter"])
def test_evaluate_agrees_with_the_harness(scoring, arc_easy, smollm2_folder, tmp_path):
    ours, our_accuracy = ask_caltune(scoring, arc_easy, smollm2_folder, tmp_path)
    theirs, their_accuracy = ask_harness(scoring, arc_easy, smollm2_folder, tmp_path / "cache")
    assert set(ours.ids) == set(theirs)
    assert len(theirs) == ROWS
    worst = 0.0
    for name, options, scores in zip(ours.ids, ours.n_options, ours.option_log_probs, strict=True):
        assert len(theirs[name]) == options
        worst = max(worst, float(np.abs(scores[:options] - theirs[name]).max()))
    assert worst <= TOLERANCE
    assert our_accuracy == their_accuracy


@pytest.mark.parametrize("delimiter", [" ", "", "\n"])
@pytest.mark.parametrize("style", ["plain", "chat"])
def test_ids_are_the_harness_s(style, delimiter, tiny_model, tiny_tokenizer):
    """On a tokenizer that writes BOS by itself, beside a chat template that writes it too."""
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=tiny_model, tokenizer=tiny_tokenizer, device="cpu", batch_size=1)
    config = PromptConfig(style=style, template="{question}", answer_prefix="Answer:", delimiter=delimiter)
    asked = Question("q", "What is the capital of Peru?", ("Lima", "Paris, France", "Os lo"), 0)
    encoded = PromptEncoder(tiny_tokenizer, config, 512).encode(asked)
    text = "What is the capital of Peru?Answer:"
    if style == "chat":
        text = "<s><|user|>\nWhat is the capital of Peru?</s>\n<|assistant|>\nAnswer:"
    for choice, option in zip(asked.choices, encoded.options, strict=True):
        prompt_ids, option_ids = harness._encode_pair(text, delimiter + choice)
        assert (list(encoded.prompt), list(option)) == (prompt_ids, option_ids)
