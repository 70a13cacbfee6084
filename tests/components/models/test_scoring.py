"""Scores against a naive reference: one row per option through the model's own forward, without mask or padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel, apply_head, option_scores

PAD = 0
TEXT = [
    EncodedQuestion("four", (5, 6, 7, 8, 9), ((10, 11, 12), (13,), (14, 15, 16, 17), (18, 19)), 2),
    EncodedQuestion("three", (30, 31), ((10, 11), (40, 41), (42,)), 0),
    EncodedQuestion("five", (50, 51, 52), ((60, 61), (62, 63), (64, 65), (66, 67), (68, 69, 70)), 4),
]
LETTERS = [
    EncodedQuestion("four", (5, 6, 7, 8, 9), ((36,), (37,), (38,), (39,)), 1),
    EncodedQuestion("three", (30, 31), ((36,), (37,), (38,)), 2),
]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}


def tiny(model_type: str, **changes: Any):
    """A tiny random model of an architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | changes))).eval()


@torch.no_grad()
def one_by_one(model, question: EncodedQuestion, head: CalibrationHead | None = None) -> list[float]:
    """Sum of log-probabilities of each option's tokens, one option at a time."""
    scores = []
    for option in question.options:
        row = torch.tensor([question.prompt + option])
        logits = model(input_ids=row, use_cache=False).logits[0].float()
        if head is not None:
            logits = logits / head.rho.exp() + head.l
        predicted = torch.log_softmax(logits, dim=-1)[len(question.prompt) - 1 : -1]
        scores.append(sum(float(predicted[i, token]) for i, token in enumerate(option)))
    return scores


@torch.no_grad()
def scores_of(model, questions, head=None, **collated):
    batch = collate(questions, PAD, **collated)
    return option_scores(apply_head(head, ScoringModel(model)(batch)), batch)


def assert_equal_to_one_by_one(model, questions, head=None, *, atol=1e-5, **collated) -> None:
    found = scores_of(model, questions, head, **collated).log_probs
    for row, question in zip(found, questions, strict=True):
        expected = torch.tensor(one_by_one(model, question, head))
        torch.testing.assert_close(row[: len(expected)], expected, atol=atol, rtol=0)
        assert torch.isneginf(row[len(expected) :]).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("questions", [TEXT, LETTERS], ids=["text", "letters"])
def test_packed_rows_equal_one_row_per_option(tiny_model, questions, side):
    """3, 4 and 5 options in one batch, options side by side, padding on either side."""
    assert_equal_to_one_by_one(tiny_model, questions, padding_side=side)


def test_options_of_the_reference_differ(tiny_model):
    """By far more than the tolerance, so that a mix-up of options, rows or positions would show."""
    scores = torch.tensor(sorted(score for question in TEXT for score in one_by_one(tiny_model, question)))
    assert scores.diff().min() > 1e-2


def test_batch_equals_single_questions(tiny_model):
    together = scores_of(tiny_model, TEXT)
    for i, question in enumerate(TEXT):
        alone = scores_of(tiny_model, [question])
        torch.testing.assert_close(together.log_probs[i, : len(question.options)], alone.log_probs[0])
        torch.testing.assert_close(together.mass[i], alone.mass[0])


def test_padding_token_does_not_matter(tiny_model):
    batches = [collate(TEXT, pad_id) for pad_id in (0, 7)]
    first, second = (option_scores(ScoringModel(tiny_model)(batch), batch).log_probs for batch in batches)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gold_scores_the_right_option_alone(tiny_model, side):
    found = scores_of(tiny_model, TEXT, options="gold", padding_side=side).log_probs
    expected = [[one_by_one(tiny_model, question)[question.answer]] for question in TEXT]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {}),
        ("phi3", {}),
        ("olmo2", {}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("gemma3_text", {"sliding_window": 64}),
        ("granite", {"logits_scaling": 1.0}),
    ],
)
def test_architectures_give_their_own_logits(model_type, changes):
    model = tiny(model_type, **changes)
    assert_equal_to_one_by_one(model, TEXT)
    batch = collate(TEXT[:1], PAD, options="gold")
    with torch.no_grad():
        own = model(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.positions]
        torch.testing.assert_close(ScoringModel(model)(batch), own)


def test_capped_logits_stay_within_the_cap():
    """Gemma 2: without the cap some logit of this model is beyond it, so leaving the cap out would show."""
    model = tiny("gemma2", final_logit_softcapping=2.0)
    batch = collate(TEXT, PAD)
    capped = ScoringModel(model)(batch)
    model.config.final_logit_softcapping = None
    assert capped.abs().max() < 2 < ScoringModel(model)(batch).abs().max()


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("granite", {"logits_scaling": 8.0}, "GraniteForCausalLM scales its logits.*logits_scaling 8"),
        ("cohere", {}, r"CohereForCausalLM scales its logits.*logit_scale 0\.0625"),
        ("mamba2", {"num_heads": 8, "n_groups": 1}, "Mamba2ForCausalLM has layers that attention masks do not reach"),
        ("qwen3_next", {}, "Qwen3NextForCausalLM has layers that attention masks do not reach"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"Lfm2ForCausalLM has layers .* \(conv\)"),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, r"MptForCausalLM .* \(ALiBi\)"),
    ],
)
def test_architectures_with_other_logits_are_refused(model_type, changes, reason):
    model = tiny(model_type, **changes)
    with pytest.raises(ModelError, match=reason):
        ScoringModel(model)


def test_adapter_does_not_hide_the_architecture():
    model = get_peft_model(tiny("granite", logits_scaling=8.0), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="GraniteForCausalLM"):
        ScoringModel(model)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_row_beyond_the_attention_window_is_refused(model_type):
    """Five prompt tokens and three fed of the longest option are 8 positions; the window may not be narrower."""
    with pytest.raises(ModelError, match=r"last 7 tokens.*takes 8; set data\.max_length to 7"):
        scores_of(tiny(model_type, sliding_window=7), TEXT)
    assert_equal_to_one_by_one(tiny(model_type, sliding_window=8), TEXT)


def test_single_options_may_go_beyond_the_attention_window():
    """The model applies its window itself where it is given no block mask."""
    model = tiny("mistral", sliding_window=3)
    assert_equal_to_one_by_one(model, LETTERS)
    wide = copy.deepcopy(model)
    wide.config.sliding_window = None
    assert abs(one_by_one(wide, LETTERS[0])[0] - one_by_one(model, LETTERS[0])[0]) > 1e-3


def test_adapter_is_part_of_the_score(tiny_model):
    base = one_by_one(tiny_model, TEXT[0])
    adapted = get_peft_model(tiny_model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    assert_equal_to_one_by_one(adapted, TEXT)
    assert abs(one_by_one(adapted, TEXT[0])[0] - base[0]) > 1e-3


@pytest.fixture
def head() -> CalibrationHead:
    """A head far from the identity."""
    made = CalibrationHead(320)
    with torch.no_grad():
        made.rho.normal_(std=0.5)
        made.l.normal_()
    return made


def test_calibration_head_acts_on_every_token(tiny_model, head):
    assert_equal_to_one_by_one(tiny_model, TEXT, head)
    assert_equal_to_one_by_one(tiny_model, LETTERS, head)


def test_head_and_softmax_are_float32_under_a_bfloat16_model(tiny_model, head):
    """bfloat16 has 8 bits: a head applied in it would be off by up to 1 part in 256, in float32 it is exact."""
    batch = collate(TEXT, PAD)
    with torch.no_grad():
        logits = ScoringModel(tiny_model.bfloat16())(batch)
        adjusted = apply_head(head, logits)
    assert logits.dtype == adjusted.dtype == torch.float32
    expected = logits.double() / head.rho.double().exp() + head.l.double()
    torch.testing.assert_close(adjusted.double(), expected, atol=1e-5, rtol=1e-6)
    scores = option_scores(adjusted, batch)
    assert scores.log_probs.dtype == scores.mass.dtype == torch.float32


def test_bfloat16_model_stays_near_its_float32_self(tiny_model):
    exact = scores_of(tiny_model, TEXT).log_probs
    rounded = scores_of(tiny_model.bfloat16(), TEXT).log_probs
    real = torch.isfinite(exact)
    assert not torch.equal(rounded[real], exact[real])
    torch.testing.assert_close(rounded[real], exact[real], atol=0.2, rtol=1e-2)


def test_mass_of_letters_is_the_sum_of_their_probabilities(tiny_model):
    found = scores_of(tiny_model, LETTERS).mass
    for mass, question in zip(found, LETTERS, strict=True):
        with torch.no_grad():
            probabilities = tiny_model(input_ids=torch.tensor([question.prompt])).logits[0, -1].softmax(-1)
        expected = sum(float(probabilities[token]) for (token,) in question.options)
        assert float(mass) == pytest.approx(expected, abs=1e-6)
        assert 0 < mass < 1


def test_mass_of_all_letters_of_the_vocabulary_is_one(tiny_model):
    everything = EncodedQuestion("all", (5, 6), tuple((token,) for token in range(320)), 0)
    assert float(scores_of(tiny_model, [everything]).mass) == pytest.approx(1, abs=1e-5)


def test_mass_of_texts_is_the_sum_of_their_probabilities(tiny_model):
    found = scores_of(tiny_model, TEXT).mass
    expected = torch.stack([torch.tensor(one_by_one(tiny_model, question)).exp().sum() for question in TEXT])
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)


def test_scores_are_differentiable_with_absent_options(tiny_model, head):
    """-inf of an absent option must not become NaN in a gradient."""
    batch = collate(TEXT, PAD)
    scores = option_scores(apply_head(head, ScoringModel(tiny_model)(batch)), batch)
    (scores.log_probs[batch.option_mask].sum() + scores.mass.sum()).backward()
    for gradient in (head.l.grad, head.rho.grad, tiny_model.get_input_embeddings().weight.grad):
        assert torch.isfinite(gradient).all()
        assert gradient.abs().sum() > 0
