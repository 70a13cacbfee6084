"""The export of a real base model's adapter, scored by transformers alone, against caltune's scores of the adapter.

The adapter is LoRA and a calibration head moved at random, so that each of the two shows in the scores.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest
import torch

from components.config import AdapterConfig, ModelConfig
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder
from components.errors import ModelError

QUESTIONS = 200
TOLERANCE = 1e-5
"""Of a probability among the options."""
TEMPLATE = "Question: {question}\nAnswer:"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_questions_have_the_probabilities_of_their_evaluation(
    smollm2_folder, write_adapter, random_head, probabilities_by_transformers, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from components.export.merged import export_merged
    from components.export.source import open_source
    from components.models.score_questions import score_questions
    from components.models.scoring import ScoringModel

    config = ModelConfig(adapter=AdapterConfig(r=8))
    head = partial(random_head, size=49152, l=0.3, rho=0.2, shared=0.4)
    source = open_source(write_adapter(tmp_path / "adapter", config, config.adapter, "calm", scale=0.01, head=head))
    merged = tmp_path / "merged"
    export_merged(source, merged, fold=False, results="")
    questions = build_facts("geography", seed=0).with_choices[:QUESTIONS]
    spec = importlib.util.spec_from_file_location("exported_logits", merged / "calibrated_logits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain, words = AutoModelForCausalLM.from_pretrained(merged).eval(), AutoTokenizer.from_pretrained(merged)
    adjust = module.CalibratedLogits.from_pretrained(merged).adjust
    asked = [(q.question, q.choices) for q in questions]
    theirs = probabilities_by_transformers(plain, words, adjust, asked)
    model, head = source.load()
    tokenizer = source.tokenizer()
    encoded = PromptEncoder(tokenizer, source.prompt, 512).encode_all(questions)
    scores = score_questions(
        ScoringModel(model).eval(), head, encoded, pad_id=tokenizer.pad_token_id, token_budget=2048
    )
    ours = torch.tensor(scores.log_probs).softmax(dim=1).numpy()
    apart = max(float(np.abs(a[: len(b)] - b).max()) for a, b in zip(ours, theirs, strict=True))
    print(f"probabilities of {QUESTIONS} questions within {apart:.2g}")
    assert apart <= TOLERANCE
    bare = probabilities_by_transformers(plain, words, lambda logits: logits, asked[:20])
    assert max(abs(a[0] - b[0]) for a, b in zip(theirs, bare, strict=False)) > 0.05, "the head shows"
    with pytest.raises(ModelError, match="LlamaForCausalLM has no bias"):
        export_merged(source, tmp_path / "folded", fold=True, results="")
