"""Generation under the calibration head: the distribution of the evaluation, and none other, at every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.models.calibrated_logits import CalibratedLogits, calibrated_logits
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel, apply_head

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

V = 320
PROMPT = torch.tensor([[1, 40, 41, 42, 43, 44]])
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0},
    "sampling_warped": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "beam": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
}


def moved_head() -> CalibrationHead:
    head = CalibrationHead(V)
    with torch.no_grad():
        head.l.normal_(0, 0.5)
        head.rho.normal_(0, 0.4)
        head.shared.fill_(0.3)
    return head


@pytest.mark.parametrize("way", WAYS)
def test_identity_alpha_generates_what_plain_generate_does(tiny_model: LlamaForCausalLM, way: str) -> None:
    settings = {"max_new_tokens": 12, "pad_token_id": 0, **WAYS[way]}
    attention = torch.ones_like(PROMPT)
    torch.manual_seed(5)
    plain = tiny_model.generate(PROMPT, attention_mask=attention, **settings)
    torch.manual_seed(5)
    with calibrated_logits(tiny_model, CalibrationHead(V)) as processors:
        ours = tiny_model.generate(PROMPT, attention_mask=attention, logits_processor=processors, **settings)
    assert torch.equal(ours, plain)


def evaluated(model: LlamaForCausalLM, head: CalibrationHead, tokens: list[int], prompt: int) -> torch.Tensor:
    """Probabilities [T, V] of each token after the prompt, by the way that options are scored."""
    question = EncodedQuestion("q", tuple(tokens[:prompt]), (tuple(tokens[prompt:]),), 0)
    with torch.no_grad():
        return apply_head(head, ScoringModel(model)(collate([question], pad_id=0))).softmax(dim=-1)


def test_probabilities_are_those_of_the_evaluation(tiny_model: LlamaForCausalLM) -> None:
    """At each of twelve sampled tokens, and not those without the head."""
    head = moved_head()
    with calibrated_logits(tiny_model, head) as processors:
        out = tiny_model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            logits_processor=processors,
            do_sample=True,
            top_k=0,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
    found = torch.cat(out.scores).softmax(dim=-1)
    expected = evaluated(tiny_model, head, out.sequences[0].tolist(), PROMPT.shape[1])
    assert found.shape == (12, V)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (found - torch.cat(out.logits).softmax(dim=-1)).abs().max() > 0.01


def test_beams_are_ranked_by_calibrated_probability(tiny_model: LlamaForCausalLM) -> None:
    """The score of each beam is the evaluation's log-probability of its tokens.

    Beam search hands log-probabilities to its processors; alpha put on them would give another, see the last lines.
    """
    head = moved_head()
    settings = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 6, "pad_token_id": 0}
    with calibrated_logits(tiny_model, head) as processors:
        out = tiny_model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            logits_processor=processors,
            do_sample=False,
            length_penalty=0.0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        probabilities = evaluated(tiny_model, head, sequence.tolist(), PROMPT.shape[1])
        of_tokens = probabilities.gather(1, sequence[PROMPT.shape[1] :, None])
        assert float(score) == pytest.approx(float(of_tokens.log().sum()), abs=1e-4)
    raw = torch.randn(1, V) * 3
    on_log_probs = head(raw.log_softmax(-1)).softmax(-1)
    assert (on_log_probs - head(raw).softmax(-1)).abs().max() > 1e-3


def test_an_adapter_is_looked_through(tiny_model: LlamaForCausalLM) -> None:
    from components.config import AdapterConfig
    from components.models.adapter import attach_adapter

    adapted = attach_adapter(tiny_model, AdapterConfig(r=4, alpha=8), seed=1)
    with calibrated_logits(adapted, moved_head()) as processors:
        out = adapted.generate(
            input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), logits_processor=processors, max_new_tokens=3
        )
    assert out.shape == (1, 9)


def test_scores_changed_before_are_refused(tiny_model: LlamaForCausalLM) -> None:
    """A repetition penalty is applied before any processor of the caller."""
    with (
        calibrated_logits(tiny_model, moved_head()) as processors,
        pytest.raises(ModelError, match="repetition_penalty"),
    ):
        tiny_model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            logits_processor=processors,
            repetition_penalty=1.3,
            max_new_tokens=3,
        )


def test_outside_of_its_block_it_refuses() -> None:
    with pytest.raises(ModelError, match="own scores"):
        CalibratedLogits(moved_head())(PROMPT, torch.zeros(1, V))


def test_without_a_head_nothing_changes(tiny_model: LlamaForCausalLM) -> None:
    scores = torch.randn(2, V)
    assert CalibratedLogits(None)(PROMPT, scores) is scores
