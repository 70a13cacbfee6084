"""Answers in the model's own words: the right tokens, the right probabilities, and no say for the batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.models import generate
from components.models.calibration_head import CalibrationHead
from components.models.decode import Decoded, LineEnds
from components.models.generate import Answers, Generator, Settings
from components.models.scoring import ScoringModel, apply_head, option_scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

V = 320
TEXTS = (
    "What is the capital of France?",
    "Which element has the symbol Fe?",
    "Kenya?",
    "In which continent does Peru lie",
)


@pytest.fixture
def questions(tiny_tokenizer: PreTrainedTokenizerFast) -> list[EncodedQuestion]:
    """Prompts of four lengths."""
    return [EncodedQuestion(f"q{i}", tuple(tiny_tokenizer(t).input_ids), ((5,),), 0) for i, t in enumerate(TEXTS)]


@pytest.fixture
def head() -> CalibrationHead:
    """Far from the identity."""
    torch.manual_seed(1)
    made = CalibrationHead(V)
    with torch.no_grad():
        made.l.normal_(0, 0.5)
        made.rho.normal_(0, 0.3)
    return made


def generator(model, tokenizer, head=None, *, samples=3, rows=64, tokens=6, seed=0) -> Generator:
    return Generator(model, head, tokenizer, Settings(samples, tokens, seed, rows))


def close(a: list[Answers], b: list[Answers]) -> bool:
    flat = [[answer for own in each for answer in (own.greedy, *own.samples)] for each in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(
        (x.text, x.tokens) == (y.text, y.tokens) and abs(x.log_prob - y.log_prob) < 1e-4
        for x, y in zip(*flat, strict=True)
    )


def test_greedy_is_plain_generate(tiny_model, tiny_tokenizer, questions):
    """With no head, or an identity; one question at a time, without padding, by transformers alone."""
    ours = generator(tiny_model, tiny_tokenizer, CalibrationHead(V), samples=0).answer(questions)
    for question, own in zip(questions, ours, strict=True):
        prompt = torch.tensor([question.prompt])
        plain = tiny_model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6)
        text = tiny_tokenizer.decode(plain[0, prompt.shape[1] :], skip_special_tokens=True).strip()
        assert own.greedy.text == text.split("\n")[0].strip()
        assert own.samples == ()
    assert close(ours, generator(tiny_model, tiny_tokenizer, samples=0).answer(questions))


def test_log_probabilities_are_the_evaluation_s(tiny_model, tiny_tokenizer, questions, head, monkeypatch):
    """The tokens of every answer, scored as an option is scored, have the same sum of log-probabilities."""
    seen: list[Decoded] = []
    decoding = generate.decode
    monkeypatch.setattr(generate, "decode", lambda *a, **k: seen.extend(decoding(*a, **k)) or seen)
    found = generator(tiny_model, tiny_tokenizer, head).answer(questions[:1])[0]
    answers = [found.greedy, *found.samples]
    assert [len(own.tokens) for own in seen] == [answer.tokens for answer in answers]
    for own, answer in zip(seen, answers, strict=True):
        scored = EncodedQuestion("q", questions[0].prompt, (tuple(own.tokens),), 0)
        batch = collate([scored], pad_id=0)
        with torch.no_grad():
            expected = option_scores(apply_head(head, ScoringModel(tiny_model)(batch)), batch).log_probs
        assert answer.log_prob == pytest.approx(float(expected), abs=1e-4)


def test_the_batch_has_no_say(tiny_model, tiny_tokenizer, questions, head):
    """Rows of one batch, of many, of other questions, in another order; another seed gives other samples."""
    whole = generator(tiny_model, tiny_tokenizer, head).answer(questions)
    assert close(whole, generator(tiny_model, tiny_tokenizer, head, rows=3).answer(questions))
    assert close(whole[::-1], generator(tiny_model, tiny_tokenizer, head, rows=9).answer(questions[::-1]))
    assert close(whole[2:3], generator(tiny_model, tiny_tokenizer, head).answer(questions[2:3]))
    other = generator(tiny_model, tiny_tokenizer, head, seed=1).answer(questions)
    assert [a.greedy.text for a in other] == [a.greedy.text for a in whole]
    assert [a.samples for a in other] != [a.samples for a in whole]
    assert len({answer.text for answer in whole[0].samples}) > 1


def test_samples_follow_the_calibrated_distribution(tiny_model, tiny_tokenizer, questions, head):
    """First tokens of 3000 draws against the evaluation's probabilities; Pearson's statistic over its degrees of
    freedom is 1 give or take 0.2 for the right distribution, and not for the model's without the head."""
    n = 3000
    drawn = generator(tiny_model, tiny_tokenizer, head, samples=n, tokens=1, rows=1500).answer(questions[:1])[0].samples
    counts: dict[float, int] = {}
    for answer in drawn:
        counts[round(answer.log_prob, 4)] = counts.get(round(answer.log_prob, 4), 0) + 1
    with torch.no_grad():
        raw = ScoringModel(tiny_model)(collate(questions[:1], pad_id=0))[0]
    expected = apply_head(head, raw).log_softmax(-1)
    observed = torch.tensor([counts.get(round(float(v), 4), 0) for v in expected], dtype=torch.float64)
    assert float(observed.sum()) == pytest.approx(n, rel=0.02), "log-probabilities tell the tokens apart"

    def statistic(log_probs: torch.Tensor) -> float:
        wanted = n * log_probs.double().exp()
        enough = wanted > 5
        return float(((observed - wanted)[enough] ** 2 / wanted[enough]).sum() / enough.sum())

    assert 0.7 < statistic(expected) < 1.4
    assert statistic(raw.log_softmax(-1)) > 2


def test_an_answer_ends_at_the_line(tiny_model, tiny_tokenizer, questions):
    """Offsets push the model to say a word, then a line's end: what would follow is not generated."""
    newline = tiny_tokenizer("\n", add_special_tokens=False).input_ids[-1]
    ends = LineEnds(tiny_tokenizer, [2], V)
    word = next(i for i in range(3, V) if ends.speaks[i] and not ends.at(torch.tensor([i]), torch.tensor([True]))[0])

    def length(tokens: list[int]) -> int:
        """How many of them make an answer."""
        spoke = torch.tensor([False])
        for place, token in enumerate(tokens):
            spoke = spoke | ends.speaks[torch.tensor([token])]
            if ends.at(torch.tensor([token]), spoke)[0]:
                return place + 1
        return len(tokens)

    assert length([newline, word, newline, word]) == 3
    assert length([word, 2, 0, 0]) == 2
    assert length([word, word]) == 2
    head = CalibrationHead(V)
    with torch.no_grad():
        head.l[newline] = 50.0
    found = generator(tiny_model, tiny_tokenizer, head, samples=0).answer(questions[:1])[0].greedy
    assert (found.text, found.tokens) == ("", 6), "nothing but line ends is no answer yet, and is cut"


def test_finished_chunks_are_not_generated_again(tiny_model, tiny_tokenizer, questions, tmp_path: Path):
    """Of four chunks two are kept; going on makes the other two. Another key takes none of them."""
    done: list[int] = []
    first = generator(tiny_model, tiny_tokenizer, rows=4)
    with pytest.raises(KeyboardInterrupt):
        first.answer(questions, kept=tmp_path, key="a", on_progress=lambda n: done.append(n) or interrupt(len(done)))
    assert len(list(tmp_path.iterdir())) == 2
    calls = []
    again = generator(tiny_model, tiny_tokenizer, rows=4)
    rows = again._rows
    again._rows = lambda batch: calls.append(len(batch)) or rows(batch)  # type: ignore[method-assign]
    found = again.answer(questions, kept=tmp_path, key="a", on_progress=done.append)
    assert calls == [4, 4]
    assert close(found, generator(tiny_model, tiny_tokenizer, rows=4).answer(questions))
    again.answer(questions, kept=tmp_path, key="b")
    assert len(calls) == 6
    assert done == [1, 1, 1, 1, 1, 1]


def interrupt(chunks: int) -> None:
    if chunks == 2:
        raise KeyboardInterrupt


def test_the_model_s_own_settings_have_no_say(tiny_model, tiny_tokenizer, questions, head):
    plain = generator(tiny_model, tiny_tokenizer, head).answer(questions)
    tiny_model.generation_config.repetition_penalty = 1.5
    tiny_model.generation_config.temperature = 0.1
    tiny_model.generation_config.do_sample = True
    assert close(plain, generator(tiny_model, tiny_tokenizer, head).answer(questions))
    assert tiny_model.generation_config.repetition_penalty == 1.5


def test_no_room_for_an_answer(tiny_model, tiny_tokenizer, questions):
    with pytest.raises(ModelError, match=r"question 'q0'.*256 positions"):
        generator(tiny_model, tiny_tokenizer, tokens=250).answer(questions[:1])
