"""Answers in a model's own words: the greedy one and sampled ones, each with its log-probability, under alpha.

Every answer is a row of a batch. Samples are drawn by the Gumbel-max rule from a stream of random numbers that belongs
to (seed, question id, number of the draw) alone, so neither the batch nor the other questions have a say in them; what
remains is rounding, where two tokens tie to six digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.files import read_json, write_json
from components.models.calibrated_logits import calibrated_logits
from components.models.calibration_head import CalibrationHead

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GREEDY = -1
"""Number of the draw that is no draw."""


@dataclass(frozen=True)
class Settings:
    """How answers are generated.

    Attributes:
        samples: Sampled answers a question, at temperature 1 from the whole distribution.
        max_new_tokens: Where an answer that does not end is cut.
        seed: Of the samples.
        rows: Answers generated side by side, over all questions of a batch.
    """

    samples: int
    max_new_tokens: int
    seed: int
    rows: int


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Attributes:
        text: Its first line that is not blank, without outer spaces.
        log_prob: Log-probability in nats under the calibrated distribution, of all its tokens and of the token that
            ended it, without which it would be that of every answer beginning like this (ours).
        tokens: How many tokens those are.
    """

    text: str
    log_prob: float
    tokens: int


@dataclass(frozen=True)
class Answers:
    """The greedy answer to a question, and the sampled ones."""

    greedy: Answer
    samples: tuple[Answer, ...]


class Generator:
    """A model that answers in its own words; an answer ends at a line's end or an end-of-sequence token.

    Args:
        model: A `transformers` causal language model on `device`, with or without an adapter, in evaluation mode.
        head: Its calibration head on the same device, or None.
        tokenizer: Its tokenizer, with a padding token.
        settings: How to generate.
        device: Where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        head: CalibrationHead | None,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        device: str = "cpu",
    ) -> None:
        self.model, self.head, self.tokenizer = model, head, tokenizer
        self.settings, self.device = settings, device
        self._causal_lm: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._config, self._ends = self._own_settings(), _LineEnds(tokenizer, self._vocabulary, device)

    @property
    def _vocabulary(self) -> int:
        return int(self._causal_lm.config.get_text_config().vocab_size)

    def answer(
        self,
        questions: Sequence[EncodedQuestion],
        *,
        kept: Path | None = None,
        key: str = "",
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Answers]:
        """Answers questions, a chunk at a time, which is a batch as long as a question's answers fit into one.

        Args:
            questions: Their prompts are used, their options are not.
            kept: A folder for finished chunks; those found there are not generated again.
            key: Names model and adapter; a chunk that was kept under another key, or by other settings or of other
                prompts, is not taken.
            on_progress: Called with the number of questions done since the last call.

        Returns:
            Answers in the order of the questions.

        Raises:
            ModelError: A prompt leaves the model no room for an answer, or something changes its scores on the way.
            FloatingPointError: A log-probability is NaN.
        """
        self._check_room(questions)
        size = max(1, self.settings.rows // (1 + self.settings.samples))
        order = sorted(range(len(questions)), key=lambda i: (-len(questions[i].prompt), i))
        found: dict[int, Answers] = {}
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            found |= dict(zip(chunk, self._chunk([questions[i] for i in chunk], kept, key), strict=True))
            if on_progress is not None:
                on_progress(len(chunk))
        return [found[i] for i in range(len(questions))]

    def _chunk(self, questions: Sequence[EncodedQuestion], kept: Path | None, key: str) -> list[Answers]:
        if kept is None:
            return self._generate_chunk(questions)
        prompts = [(question.id, question.prompt) for question in questions]
        identity = json.dumps([key, asdict(self.settings), prompts])
        path = kept / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
        if path.exists():
            stored = read_json(path, remedy="delete it")["answers"]
            return [Answers(Answer(**own["greedy"]), tuple(Answer(**a) for a in own["samples"])) for own in stored]
        answers = self._generate_chunk(questions)
        kept.mkdir(parents=True, exist_ok=True)
        write_json(path, {"answers": [asdict(own) for own in answers]})
        return answers

    def _generate_chunk(self, questions: Sequence[EncodedQuestion]) -> list[Answers]:
        draws = range(GREEDY, self.settings.samples)
        rows = [(question, draw) for question in questions for draw in draws]
        answers: list[Answer] = []
        for start in range(0, len(rows), self.settings.rows):
            answers += self._rows(rows[start : start + self.settings.rows])
        each = len(draws)
        of_questions = [answers[start : start + each] for start in range(0, len(answers), each)]
        return [Answers(own[0], tuple(own[1:])) for own in of_questions]

    def _rows(self, rows: Sequence[tuple[EncodedQuestion, int]]) -> list[Answer]:
        """One batch: an answer for each (question, draw)."""
        width = max(len(question.prompt) for question, _ in rows)
        pad = int(self.tokenizer.pad_token_id)  # type: ignore[arg-type]
        tokens = torch.tensor([[pad] * (width - len(q.prompt)) + list(q.prompt) for q, _ in rows])
        mask = torch.tensor([[0] * (width - len(q.prompt)) + [1] * len(q.prompt) for q, _ in rows])
        chooser = _Chooser([self._stream(question.id, draw) for question, draw in rows])
        self._ends.start = width
        with calibrated_logits(self.model, self.head) as processors, self._settings_in_force():
            processors.append(chooser)
            sequences = self.model.generate(  # type: ignore[operator]
                input_ids=tokens.to(self.device),
                attention_mask=mask.to(self.device),
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([self._ends]),
            )
        return self._read(sequences[:, width:].cpu(), torch.stack(chooser.log_probs, dim=1).double().cpu())

    def _read(self, generated: Tensor, log_probs: Tensor) -> list[Answer]:
        """Answers from tokens [R, G] and their log-probabilities [R, G]; what follows an answer's end is filling."""
        if torch.isnan(log_probs).any():
            raise FloatingPointError("the model gave a generated token the log-probability NaN")
        answers = []
        for tokens, values in zip(generated.tolist(), log_probs, strict=True):
            length = self._ends.length(tokens, self._config.eos_token_id)  # type: ignore[arg-type]
            text = str(self.tokenizer.decode(tokens[:length], skip_special_tokens=True)).strip()
            answers.append(Answer(text.split("\n")[0].strip(), float(values[:length].sum()), length))
        return answers

    def _stream(self, question: str, draw: int) -> torch.Generator | None:
        """Random numbers of a draw; None for the greedy answer."""
        if draw == GREEDY:
            return None
        digest = hashlib.sha256(f"{self.settings.seed}/{question}/{draw}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def _own_settings(self) -> GenerationConfig:
        theirs = self._causal_lm.generation_config.eos_token_id
        stated = theirs if isinstance(theirs, list) else [theirs]
        ends = {int(i) for i in (*stated, self.tokenizer.eos_token_id) if i is not None}  # type: ignore[arg-type]
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=self.settings.max_new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(ends),
            use_cache=True,
        )

    @contextmanager
    def _settings_in_force(self) -> Iterator[None]:
        """Puts our settings in the place of the model's own, which may hold penalties and a temperature."""
        before = self._causal_lm.generation_config
        self._causal_lm.generation_config = self._config
        try:
            yield
        finally:
            self._causal_lm.generation_config = before

    def _check_room(self, questions: Sequence[EncodedQuestion]) -> None:
        room = getattr(self._causal_lm.config.get_text_config(), "max_position_embeddings", None)
        longest = max(questions, key=lambda q: len(q.prompt))
        if room is not None and len(longest.prompt) + self.settings.max_new_tokens > room:
            raise ModelError(
                f"question '{longest.id}' has a prompt of {len(longest.prompt)} tokens, which with "
                f"generation.max_new_tokens {self.settings.max_new_tokens} exceeds the model's {room} positions"
            )


class _Chooser(LogitsProcessor):
    """Chooses each row's next token, the most probable one or a draw, and leaves the decoder no other.

    A draw is the argmax of log p - log E with E exponentially distributed, which is distributed as p. In float64: among
    50,000 tokens, float32 would draw an E of exactly 0 now and then.

    Args:
        streams: Random numbers of each row, None where its most probable token is wanted.

    Attributes:
        log_probs: Of the tokens chosen, float32 [R] a step.
    """

    def __init__(self, streams: Sequence[torch.Generator | None]) -> None:
        self.streams = streams
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [R, V] to 0 for the token chosen, -inf for the others."""
        log_probs = scores.log_softmax(dim=-1)
        perturbed = log_probs.double()
        for row, stream in enumerate(self.streams):
            if stream is not None:
                perturbed[row] -= torch.empty_like(perturbed[row]).exponential_(generator=stream).log()
        chosen = perturbed.argmax(dim=-1, keepdim=True)
        self.log_probs.append(log_probs.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


class _LineEnds(StoppingCriteria):
    """Ends an answer at a token with a line's end in it, once it says anything.

    Args:
        tokenizer: Says which tokens have one.
        vocabulary: V, the width of the logits.
        device: Where the sequences are.

    Attributes:
        start: Where the generated tokens begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, device: str) -> None:
        known = len(tokenizer)
        texts = tokenizer.batch_decode([[i] for i in range(min(known, vocabulary))], skip_special_tokens=True)
        self.breaks, self.speaks = torch.zeros(2, vocabulary, dtype=torch.bool, device=device)
        self.breaks[: len(texts)] = torch.tensor(["\n" in text for text in texts], device=device)
        self.speaks[: len(texts)] = torch.tensor([bool(text.strip()) for text in texts], device=device)
        self.start = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # type: ignore[override]
        """Which rows have ended, bool [R]."""
        generated = input_ids[:, self.start :]
        return self.breaks[generated[:, -1]] & self.speaks[generated].any(dim=1)

    def length(self, tokens: Sequence[int], ends: Sequence[int]) -> int:
        """How many of a row's tokens are its answer, the one that ended it included."""
        spoke = False
        for place, token in enumerate(tokens):
            spoke = spoke or bool(self.speaks[token])
            if token in ends or (spoke and bool(self.breaks[token])):
                return place + 1
        return len(tokens)
