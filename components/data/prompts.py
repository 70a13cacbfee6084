"""Questions to token ids. The one place where text meets the tokenizer.

Two traps are dealt with here once (ecosystem E54, E56): the ids of an answer are found by tokenising prompt and answer
together and taking what follows the prompt, since " A" and "A" differ; and a prompt starts with exactly one BOS where
the model's tokenizer uses one, whether or not the chat template already wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.config_data import PromptConfig
from components.data.schema import AnyQuestion, OpenQuestion, Question
from components.errors import CaltuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PromptError(CaltuneError):
    """A question cannot be put into tokens as the run file asks."""


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """A question in token ids.

    Attributes:
        id: The question's id.
        prompt: Ids of the prompt, BOS included where the model uses one.
        options: Ids of each option, to be read after the prompt. Of an open-ended question there is one, its first
            accepted answer and the token that ends it.
        answer: 0-based index of the right option.
    """

    id: str
    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    answer: int

    @property
    def packed_length(self) -> int:
        """Tokens of a row that holds the prompt once and every option but its last token."""
        return len(self.prompt) + sum(len(option) - 1 for option in self.options)


def render_prompt(question: AnyQuestion, config: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text before the answer, chat template included.

    Args:
        question: The question.
        config: Style, template and answer prefix.
        tokenizer: Supplies the chat template for style `chat`.

    Returns:
        The prompt; whatever the model says next is the answer.

    Raises:
        PromptError: Style `chat` with a tokenizer that has no chat template, or a template that lists options for an
            open-ended question.
    """
    if isinstance(question, OpenQuestion) and "{options}" in config.template:
        raise PromptError(f"question '{question.id}' is open-ended, but data.prompt.template lists options")
    choices = question.choices if isinstance(question, Question) else ()
    options = "\n".join(f"{LETTERS[i]}. {choice}" for i, choice in enumerate(choices))
    # In one pass, not with str.format or one replace after another: all three texts may contain braces of their own.
    fields = {"{question}": question.question, "{options}": options}
    body = re.sub(r"\{question\}|\{options\}", lambda field: fields[field.group()], config.template)
    if config.style == "plain":
        return body + config.answer_prefix
    if not tokenizer.chat_template:
        raise PromptError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; set data.prompt.style to 'plain'"
        )
    messages = [{"role": "user", "content": body}]
    if config.system is not None:
        messages.insert(0, {"role": "system", "content": config.system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text) + config.answer_prefix


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer, left to itself, starts a text with BOS (Llama does, SmolLM2 and Qwen do not)."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and bool(ids) and ids[0] == tokenizer.bos_token_id


class PromptEncoder:
    """Encodes questions under one prompt configuration.

    Args:
        tokenizer: The model's tokenizer.
        config: The run file's prompt section.
        max_length: Longest row in tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig, max_length: int) -> None:
        self.tokenizer, self.config, self.max_length = tokenizer, config, max_length
        self._bos = (tokenizer.bos_token_id,) if adds_bos(tokenizer) else ()

    def _ids(self, text: str) -> tuple[int, ...]:
        ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        if self._bos and ids[:1] != self._bos:
            return self._bos + ids
        return ids

    def encode(self, question: AnyQuestion) -> EncodedQuestion:
        """Encodes one question with all of its options, or with the answer that an open-ended one is trained on.

        Raises:
            PromptError: A row longer than `max_length`, an option without tokens of its own, or letters that do not
                stand for one distinct token each.
        """
        prompt_text = render_prompt(question, self.config, self.tokenizer)
        prompt = self._ids(prompt_text)
        if isinstance(question, OpenQuestion):
            # A model that does not learn to end an answer goes on talking behind it.
            end = () if self.tokenizer.eos_token_id is None else (int(self.tokenizer.eos_token_id),)  # type: ignore[arg-type]
            said = self._continuation(question, prompt_text, prompt, question.answers[0])
            options: tuple[tuple[int, ...], ...] = (said + end,)
        else:
            letters = tuple(LETTERS[: len(question.choices)])
            answers = question.choices if self.config.scoring == "text" else letters
            options = tuple(self._continuation(question, prompt_text, prompt, answer) for answer in answers)
            if self.config.scoring == "letter":
                self._check_letters(question, options)
        longest = len(prompt) + max(len(option) for option in options)
        if longest > self.max_length:
            raise PromptError(
                f"question '{question.id}' is {longest} tokens long, data.max_length is {self.max_length}: "
                "raise it or drop the question"
            )
        answer = question.answer if isinstance(question, Question) else 0
        return EncodedQuestion(question.id, prompt, options, answer)

    def encode_all(self, questions: Sequence[AnyQuestion]) -> list[EncodedQuestion]:
        """Encodes questions in order."""
        return [self.encode(question) for question in questions]

    def _continuation(
        self, question: AnyQuestion, prompt_text: str, prompt: tuple[int, ...], answer: str
    ) -> tuple[int, ...]:
        whole = self._ids(prompt_text + self.config.delimiter + answer)
        if whole[: len(prompt)] != prompt:
            raise PromptError(
                f"question '{question.id}': the tokenizer joins the end of the prompt {prompt_text[-10:]!r} and the "
                f"start of the answer {(self.config.delimiter + answer)[:10]!r} into one token, so the answer has no "
                "probability of its own; end the prompt without a space and put the space into data.prompt.delimiter"
            )
        option = whole[len(prompt) :]
        if not option:
            raise PromptError(f"question '{question.id}': answer {answer!r} has no tokens of its own after the prompt")
        return option

    def _check_letters(self, question: Question, options: tuple[tuple[int, ...], ...]) -> None:
        if any(len(option) != 1 for option in options) or len(set(options)) != len(options):
            shown = ", ".join(f"{LETTERS[i]}={list(option)}" for i, option in enumerate(options))
            raise PromptError(
                f"question '{question.id}': letters need one distinct token each, the tokenizer gives {shown}; "
                "change data.prompt.delimiter or answer_prefix, or score by text"
            )
