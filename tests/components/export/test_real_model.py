"""The export of a real base model's adapter, scored by transformers alone, against caltune's scores of the adapter.

The adapter is LoRA and a calibration head moved at random, so that each of the two shows in the scores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from components.config import AdapterConfig, ModelConfig
from components.config_data import PromptConfig
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder
from components.data.schema import Question
from components.errors import ModelError

QUESTIONS = 200
TOLERANCE = 1e-5
"""Of a probability among the options."""
TEMPLATE = "Question: {question}\nAnswer:"


def probabilities_by_transformers(folder: Path, questions: Sequence[Question]) -> list[np.ndarray]:
    """Each option's probability among a question's options, from an exported folder, the prompt read once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.spec_from_file_location("exported_logits", folder / "calibrated_logits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alpha = module.CalibratedLogits.from_pretrained(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for question in questions:
        text = f"Question: {question.question}\nAnswer:"
        prompt = tokenizer(text).input_ids
        options = [tokenizer(f"{text} {choice}").input_ids[len(prompt) :] for choice in question.choices]
        width = max(map(len, options))
        tokens = torch.tensor([option + [0] * (width - len(option)) for option in options])
        with torch.no_grad():
            first = model(torch.tensor([prompt]), use_cache=True)
            first.past_key_values.batch_repeat_interleave(len(options))
            later = model(tokens, past_key_values=first.past_key_values).logits
        logits = torch.cat([first.logits[:, -1:].expand(len(options), 1, -1), later[:, :-1]], dim=1)
        values = alpha.adjust(logits).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        sums = [float(value[: len(option)].sum()) for value, option in zip(values, options, strict=True)]
        found.append(torch.tensor(sums).double().softmax(0).numpy())
    return found


def write_adapter(folder: Path) -> Path:
    from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
    from components.models.adapter_files import AdapterRecord, save_adapter
    from components.models.base import load_model, load_tokenizer, resolve_model
    from components.models.calibration_head import CalibrationHead

    config = ModelConfig(adapter=AdapterConfig(r=8))
    resolved = resolve_model(config)
    model, head = attach_adapter(load_model(resolved, config), config.adapter, seed=0), CalibrationHead(49152)
    with torch.no_grad():
        for value in trainable_parameters(model).values():
            value.add_(0.01 * torch.randn_like(value))
        head.l.normal_(std=0.3)
        head.rho.normal_(std=0.2)
        head.shared.fill_(0.4)
    return save_adapter(
        folder,
        model=model,
        state=adapter_state(model),
        head=head,
        tokenizer=load_tokenizer(resolved, config),
        config=config,
        adapter=config.adapter,
        resolved=resolved,
        record=AdapterRecord("calm", 1, PromptConfig(style="plain", template=TEMPLATE, delimiter=" ")),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_questions_have_the_probabilities_of_their_evaluation(smollm2_folder, tmp_path):
    from components.export.merged import export_merged
    from components.export.source import open_source
    from components.models.score_questions import score_questions
    from components.models.scoring import ScoringModel

    source = open_source(write_adapter(tmp_path / "adapter"))
    export_merged(source, tmp_path / "merged", fold=False, results="")
    questions = build_facts("geography", seed=0).with_choices[:QUESTIONS]
    theirs = probabilities_by_transformers(tmp_path / "merged", questions)
    model, head = source.load()
    tokenizer = source.tokenizer()
    encoded = PromptEncoder(tokenizer, source.prompt, 512).encode_all(questions)
    scores = score_questions(
        ScoringModel(model).eval(), head, encoded, pad_id=tokenizer.pad_token_id, token_budget=2048
    )
    ours = torch.tensor(scores.log_probs).softmax(dim=1).numpy()
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    print(f"probabilities of {QUESTIONS} questions within {apart:.2g}")
    assert apart <= TOLERANCE
    with pytest.raises(ModelError, match="LlamaForCausalLM has no bias"):
        export_merged(source, tmp_path / "folded", fold=True, results="")
