"""The exported model of a real base model, by transformers alone, against caltune's evaluation of the adapter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from components.errors import ModelError
from components.evaluation.predictions import read_predictions

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = 200
TOLERANCE = 1e-5
"""Of a probability among the options."""


def probabilities_by_transformers(folder: Path, questions: Path, ids: set[str]) -> dict[str, np.ndarray]:
    """Each option's probability among a question's options, from an exported folder, the prompt read once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.spec_from_file_location("exported_logits", folder / "calibrated_logits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alpha = module.CalibratedLogits.from_pretrained(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = {}
    for line in questions.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["id"] not in ids:
            continue
        text = f"Question: {row['question']}\nAnswer:"
        prompt = tokenizer(text).input_ids
        options = [tokenizer(f"{text} {choice}").input_ids[len(prompt) :] for choice in row["choices"]]
        width = max(map(len, options))
        tokens = torch.tensor([option + [0] * (width - len(option)) for option in options])
        with torch.no_grad():
            first = model(torch.tensor([prompt]), use_cache=True)
            first.past_key_values.batch_repeat_interleave(len(options))
            later = model(tokens, past_key_values=first.past_key_values).logits
        logits = torch.cat([first.logits[:, -1:].expand(len(options), 1, -1), later[:, :-1]], dim=1)
        values = alpha.adjust(logits).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        sums = [float(value[: len(option)].sum()) for value, option in zip(values, options, strict=True)]
        found[row["id"]] = torch.tensor(sums).double().softmax(0).numpy()
    return found


def apart(folder: Path, evaluation: Path, questions: Path) -> float:
    """Greatest difference of a probability on the first questions of a split's `predictions.parquet`."""
    predictions = read_predictions(evaluation / "predictions.parquet")
    ids = predictions.ids[:QUESTIONS]
    found = probabilities_by_transformers(folder, questions, set(ids))
    assert len(found) == QUESTIONS
    return max(
        float(np.abs(predictions.probabilities[i, : len(found[name])] - found[name]).max())
        for i, name in enumerate(ids)
    )


RUN_FILE = """
run: export
output_dir: {folder}
methods: [calm]
model: {{name: {model}, adapter: {{r: 8}}}}
data:
  source: {{kind: facts, domain: geography}}
  splits: {{train: 64, calibration: 32, validation: 32, test: 200}}
  prompt: {{style: plain, template: "Question: {{question}}\\nAnswer:", delimiter: " ", scoring: text}}
training: {{steps: 4, batch_size: 8, evaluate_every: 4, checkpoint_every: 4}}
evaluation: {{bootstrap: 100}}
tracking: {{enabled: false}}
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_questions_have_the_probabilities_of_their_evaluation(smollm2_folder, tmp_path):
    from components.export.merged import export_merged
    from components.export.source import open_source

    (tmp_path / "run.yaml").write_text(RUN_FILE.format(folder=tmp_path / "outputs", model=smollm2_folder))
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "run", "--config", str(tmp_path / "run.yaml"), "--quiet"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "outputs" / "export"
    source = open_source(run / "calm" / "adapter")
    export_merged(source, tmp_path / "merged", fold=False, results="")
    assert apart(tmp_path / "merged", run / "calm" / "evaluation" / "id", run / "data" / "id.jsonl") <= TOLERANCE
    with pytest.raises(ModelError, match="LlamaForCausalLM has no bias"):
        export_merged(source, tmp_path / "folded", fold=True, results="")
