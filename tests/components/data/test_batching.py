"""Encoded questions to tensors. What the numbers do in a model is in tests/components/models/test_scoring.py."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.batching import PADDING, StepSampler, batches_by_length, collate
from components.data.prompts import EncodedQuestion

PAD = 0
# Prompt 5 6 7; options 10 11 12, 13 and 14 15. Fed behind the prompt: 10 11 (option 0), nothing, 14 (option 2).
TEXT = EncodedQuestion("text", (5, 6, 7), ((10, 11, 12), (13,), (14, 15)), answer=2)
LETTER = EncodedQuestion("letter", (8, 9), ((20,), (21,), (22,), (23,), (24,)), answer=4)


def encoded_questions():
    """Questions of any lengths; their tokens do not matter."""
    shape = st.tuples(st.integers(1, 20), st.lists(st.integers(1, 6), min_size=2, max_size=5))
    return st.lists(shape, min_size=1, max_size=30).map(
        lambda shapes: [
            EncodedQuestion(str(i), (1,) * prompt, tuple((2,) * length for length in options), 0)
            for i, (prompt, options) in enumerate(shapes)
        ]
    )


def test_row_is_prompt_and_options_side_by_side():
    """Each option's last token is scored but never fed; positions go on from the prompt's for every option."""
    batch = collate([TEXT], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7, 10, 11, 14]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.answers.tolist() == [2]
    assert batch.option_mask.tolist() == [[True, True, True]]
    assert not batch.single_option


def test_every_answer_token_is_scored_where_it_is_predicted():
    """(predicting token, scored token, option): first tokens after the prompt's last (7), others after their own."""
    batch = collate([TEXT], PAD)
    flat = batch.input_ids.flatten()[batch.positions]
    scored = zip(
        flat[batch.entry_position].tolist(), batch.entry_token.tolist(), batch.entry_slot.tolist(), strict=True
    )
    assert sorted(scored) == sorted([(7, 10, 0), (10, 11, 0), (11, 12, 0), (7, 13, 1), (7, 14, 2), (14, 15, 2)])
    assert batch.positions.tolist() == [2, 3, 4, 5], "each predicting token goes through the output layer once"


def test_letters_share_one_position():
    batch = collate([LETTER], PAD)
    assert batch.positions.tolist() == [1]
    assert batch.entry_position.tolist() == [0] * 5
    assert batch.entry_token.tolist() == [20, 21, 22, 23, 24]
    assert batch.input_ids.tolist() == [[8, 9]]
    assert batch.single_option, "no option is fed, so plain causal attention is right"


@pytest.mark.parametrize(("side", "expected"), [("right", [8, 9, PAD, PAD, PAD, PAD]), ("left", [PAD] * 4 + [8, 9])])
def test_padding_on_either_side(side, expected):
    batch = collate([TEXT, LETTER], PAD, padding_side=side)
    assert batch.input_ids[1].tolist() == expected
    assert (batch.segments[1] == PADDING).sum() == 4
    real = batch.segments[1] != PADDING
    assert batch.position_ids[1][real].tolist() == [0, 1]
    assert batch.input_ids[1][real].tolist() == [8, 9]


def test_options_of_a_wider_row_are_missing_in_a_narrower_one():
    batch = collate([TEXT, LETTER], PAD)
    assert batch.option_mask.tolist() == [[True, True, True, False, False], [True] * 5]
    assert batch.entry_slot[batch.entry_token >= 20].tolist() == [5, 6, 7, 8, 9]


def test_gold_keeps_the_right_option_alone():
    batch = collate([TEXT, LETTER], PAD, options="gold")
    assert batch.input_ids.tolist() == [[5, 6, 7, 14], [8, 9, PAD, PAD]]
    assert batch.entry_token.tolist() == [14, 15, 24]
    assert batch.entry_slot.tolist() == [0, 0, 1]
    assert batch.option_mask.tolist() == [[True], [True]]
    assert batch.answers.tolist() == [0, 0]
    assert batch.single_option


def test_block_mask_lets_an_option_see_the_prompt_and_itself():
    """Rows are queries. 5 6 7 | 10 11 | 14, then two tokens of padding, which nothing but themselves sees."""
    batch = collate([TEXT, EncodedQuestion("longer", (1,) * 8, ((2,), (3,)), 0)], PAD)
    mask = batch.attention_mask(torch.float32)
    assert mask.shape == (2, 1, 8, 8)
    expected = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert (mask[0, 0] == 0).int().tolist() == expected
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min}


def test_mask_of_a_half_precision_model_is_finite():
    mask = collate([TEXT], PAD).attention_mask(torch.float16)
    assert mask.dtype == torch.float16
    assert torch.isfinite(mask).all()


def test_mask_of_single_options_is_the_padding_mask():
    batch = collate([TEXT, LETTER], PAD, options="gold", padding_side="left")
    assert batch.attention_mask(torch.float32).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_moving_a_batch_moves_every_tensor():
    batch = collate([TEXT], PAD).to("meta")
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 9
    assert {value.device.type for value in tensors.values()} == {"meta"}
    assert batch.single_option is False


@settings(max_examples=50, deadline=None)
@given(questions=encoded_questions(), budget=st.integers(1, 200))
def test_batches_cover_each_question_once_within_the_budget(questions, budget):
    batches = list(batches_by_length(questions, budget))
    assert sorted(i for batch in batches for i in batch) == list(range(len(questions)))
    for batch in batches:
        cost = collate([questions[i] for i in batch], PAD).input_ids.numel()
        assert cost <= budget or len(batch) == 1
    lengths = [questions[i].packed_length for batch in batches for i in batch]
    assert lengths == sorted(lengths, reverse=True)


@settings(max_examples=50, deadline=None)
@given(questions=encoded_questions(), budget=st.integers(1, 200))
def test_batches_are_as_large_as_the_budget_allows(questions, budget):
    """The first question of the next batch would not have fitted."""
    batches = list(batches_by_length(questions, budget))
    for batch in batches[:-1]:
        assert questions[batch[0]].packed_length * (len(batch) + 1) > budget


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=200))
def test_batches_of_some_size_are_hardly_padded(lengths):
    """Beyond 512 tokens padding is at most a twentieth; a batch's questions make the same batch again."""
    questions = [EncodedQuestion(str(i), (1,) * (n - 1), ((2, 2),), 0) for i, n in enumerate(lengths)]
    batches = list(batches_by_length(questions, 2048))
    assert sorted(i for batch in batches for i in batch) == list(range(len(questions)))
    for batch in batches:
        own = [questions[i] for i in batch]
        real = sum(q.packed_length for q in own)
        assert real >= 0.95 * own[0].packed_length * len(own) or real - own[-1].packed_length < 512
        assert [i for group in batches_by_length(own, 2048) for i in group] == list(range(len(own)))
        assert len(list(batches_by_length(own, 2048))) == 1


@given(size=st.integers(1, 12), batch_size=st.integers(1, 30), seed=st.integers(0, 5))
def test_every_question_is_drawn_equally_often(size, batch_size, seed):
    """`size` steps are `batch_size` whole epochs; before that no question is ahead of another by more than one."""
    sampler = StepSampler(size, batch_size, seed)
    counts: Counter[int] = Counter({i: 0 for i in range(size)})
    for step in range(size):
        drawn = sampler.indices(step)
        assert len(drawn) == batch_size
        counts.update(drawn)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert set(counts.values()) == {batch_size}


@given(size=st.integers(1, 12), batch_size=st.integers(1, 30), steps=st.lists(st.integers(0, 40), max_size=8))
def test_a_step_depends_on_seed_and_number_alone(size, batch_size, steps):
    """Asked in any order, by a sampler that saw other steps before: what a resumed run does."""
    used = StepSampler(size, batch_size, seed=3)
    assert [used.indices(step) for step in steps] == [StepSampler(size, batch_size, seed=3).indices(s) for s in steps]


def test_a_batch_spans_two_epochs():
    """3 questions by 2: the second step takes the last of the first epoch and the first of the second."""
    sampler = StepSampler(3, 2, seed=0)
    drawn = [*sampler.indices(0), *sampler.indices(1), *sampler.indices(2)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == [0, 1, 2]


def test_seeds_and_epochs_differ_in_order():
    orders = [tuple(StepSampler(50, 50, seed).indices(epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_an_empty_split_cannot_be_drawn_from():
    with pytest.raises(ValueError, match="empty"):
        StepSampler(0, 4, seed=0)
