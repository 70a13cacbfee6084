"""Answers in a model's own words: the greedy one and sampled ones, each with its log-probability, under alpha.

Every answer is a row of a batch. Samples are drawn by the Gumbel-max rule from a stream of random numbers that belongs
to (seed, question id, number of the draw) alone, so neither the batch nor the other questions have a say in them; what
remains is rounding, where two tokens tie to six digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn

from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.files import read_json, write_json
from components.models.calibration_head import CalibrationHead
from components.models.decode import LineEnds, decode

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
        self._ends = LineEnds(tokenizer, self._stops(), int(self._text_config.vocab_size), device)

    @property
    def _text_config(self) -> Any:
        return self._causal_lm.config.get_text_config()

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
            ModelError: A prompt leaves the model no room for an answer.
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
        places = {question: place for place, question in enumerate(dict.fromkeys(question for question, _ in rows))}
        found = decode(
            self.model,
            self.head,
            [question.prompt for question in places],
            [places[question] for question, _ in rows],
            [self._stream(question.id, draw) for question, draw in rows],
            self._ends,
            max_new_tokens=self.settings.max_new_tokens,
            pad_id=int(self.tokenizer.pad_token_id),  # type: ignore[arg-type]
            device=self.device,
        )
        return [Answer(self._first_line(own.tokens), own.log_prob, len(own.tokens)) for own in found]

    def _first_line(self, tokens: Sequence[int]) -> str:
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
        return text.split("\n")[0].strip()

    def _stream(self, question: str, draw: int) -> torch.Generator | None:
        """Random numbers of a draw; None for the greedy answer."""
        if draw == GREEDY:
            return None
        digest = hashlib.sha256(f"{self.settings.seed}/{question}/{draw}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def _stops(self) -> list[int]:
        theirs = self._causal_lm.generation_config.eos_token_id
        stated = theirs if isinstance(theirs, list) else [theirs]
        return sorted({int(i) for i in (*stated, self.tokenizer.eos_token_id) if i is not None})  # type: ignore[arg-type]

    def _check_room(self, questions: Sequence[EncodedQuestion]) -> None:
        room = getattr(self._text_config, "max_position_embeddings", None)
        longest = max(questions, key=lambda q: len(q.prompt))
        if room is not None and len(longest.prompt) + self.settings.max_new_tokens > room:
            raise ModelError(
                f"question '{longest.id}' has a prompt of {len(longest.prompt)} tokens, which with "
                f"generation.max_new_tokens {self.settings.max_new_tokens} exceeds the model's {room} positions"
            )
