"""A caltune adapter as a model of lm-evaluation-harness: its calibration head applied, its experts at work.

    lm_eval --model caltune --model_args adapter=DIR --tasks arc_easy

A harness that looks for plugins finds the class by the entry point `lm_eval.models`. Version 0.4.13 looks for none:
there `caltune-lm-eval` (`python -m components.export.harness_command`) takes the place of `lm_eval`, arguments and all.

Options of one question have one context: they are scored side by side in one row, as in caltune's own evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig

from components.data.batching import batches_by_length, collate
from components.data.prompts import EncodedQuestion, adds_bos
from components.errors import ModelError, UsageError
from components.export.source import open_source, require_one_pass
from components.models.calibrated_logits import calibrated_logits
from components.models.scoring import ScoringModel, apply_head, token_log_probs

log = logging.getLogger(__name__)

MAX_NEW_TOKENS = 256
"""Of `generate_until` where the task names none, as in the harness's own models."""
OWN_SETTINGS = ("until", "max_gen_toks")
SAMPLING = {"do_sample", "temperature", "top_p", "top_k", "min_p"}
"""Generation settings that act after the calibration head and are passed on."""

Ids = tuple[int, ...]


@register_model("caltune")
class CaltuneLM(TemplateLM):
    """An adapter folder, with its base model and its calibration head.

    Args:
        adapter: The adapter folder; not of a method that answers by several passes.
        base_model: Where the base model is, if not where the folder says.
        device: Where the model goes; by default a GPU where there is one.
        batch_tokens: Token budget of a batch, padding included.
        batch_size: Answers generated side by side.
        max_length: Longest context with its continuation, in tokens; by default the model's positions.
        max_batch_size: The harness hands it to every model; there is nothing to set by it.

    Raises:
        ModelError: The folder or the base model is damaged, or the method answers by several passes.
        UsageError: `batch_size` is not a number.
    """

    def __init__(
        self,
        adapter: str,
        base_model: str | None = None,
        device: str | None = None,
        batch_tokens: int = 2048,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UsageError(f"batch_size is {batch_size!r}; give a number, batch_tokens is the budget for scoring")
        source = open_source(Path(adapter), base_model)
        require_one_pass(source, "the harness")
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, head = source.load()
        self.head = None if head is None else head.to(where)
        self.model = ScoringModel(model).to(where).eval()
        self.tokenizer: Any = source.tokenizer()
        self.batch_tokens, self.rows = int(batch_tokens), int(batch_size)
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._causal_lm, self._device = base, where
        positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = int(max_length or positions or self.tokenizer.model_max_length)
        self._bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        own = self.tokenizer.bos_token_id
        return self.eot_token_id if own is None else int(own)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, beginning with exactly one BOS where the tokenizer uses one, unless told otherwise."""
        ids = list(self.tokenizer(string, add_special_tokens=False).input_ids)
        wanted = bool(self._bos) if add_special_tokens is None else add_special_tokens and bool(self._bos)
        return self._bos + ids if wanted and ids[:1] != self._bos else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one, in the order of the requests."""
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        found: dict[int, tuple[float, bool]] = {}
        questions = _side_by_side(pairs, self.batch_tokens)
        encoded = [EncodedQuestion("", pairs[own[0]][0], tuple(pairs[i][1] for i in own), 0) for own in questions]
        for group in batches_by_length(encoded, self.batch_tokens):
            sums, greedy = self._score([encoded[i] for i in group])
            for row, number in enumerate(group):
                for slot, request in enumerate(questions[number]):
                    found[request] = (float(sums[row, slot]), bool(greedy[row, slot]))
        answers = [found[i] for i in range(len(pairs))]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    @torch.no_grad()
    def _score(self, questions: Sequence[EncodedQuestion]) -> tuple[Tensor, Tensor]:
        """Log-probabilities, and whether every token is the most probable one, [R, K] each."""
        batch = collate(questions, int(self.tokenizer.pad_token_id)).to(self._device)
        logits = apply_head(self.head, self.model(batch))
        values = token_log_probs(logits, batch)
        if torch.isnan(values).any():
            raise FloatingPointError("the model gave a token the log-probability NaN")
        missed = (logits.argmax(dim=-1)[batch.entry_position] != batch.entry_token).long()
        shape = batch.option_mask.shape
        sums = torch.zeros(batch.option_mask.numel(), device=logits.device).index_add(0, batch.entry_slot, values)
        misses = torch.zeros_like(sums, dtype=torch.long).index_add(0, batch.entry_slot, missed)
        return sums.view(shape).cpu(), (misses == 0).view(shape).cpu()

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[Ids, Ids]:
        """Both as they go into the model; a context that is too long loses its beginning, as in the harness."""
        room = self.max_length + 1 - len(continuation)  # the last token is predicted and not read
        if not continuation or room < 1:
            raise ModelError(
                f"a continuation of {len(continuation)} tokens cannot be scored (max_length {self.max_length})"
            )
        if len(context) > room:
            log.warning("a context of %d tokens is cut to its last %d", len(context), room)
        return tuple(context[-room:]), tuple(continuation)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows in which every token is predicted once."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(value for value, _ in self._loglikelihood_tokens(parts))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations under the calibrated distribution, each cut before the first of its stop texts.

        Raises:
            UsageError: A task asks for a setting that changes logits before the calibration head, or is not known.
        """
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(number)
        for members in groups.values():
            order = sorted(members, key=lambda i: -len(requests[i].args[0]))
            for start in range(0, len(order), self.rows):
                chunk = order[start : start + self.rows]
                wanted = dict(requests[chunk[0]].args[1])
                found = self._generate([requests[i].args[0] for i in chunk], wanted)
                texts |= dict(zip(chunk, found, strict=True))
        answers = [texts[i] for i in range(len(requests))]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _generate(self, contexts: Sequence[str], wanted: dict[str, Any]) -> list[str]:
        stated = wanted.get("until") or []
        until = [stop for stop in ([stated] if isinstance(stated, str) else stated) if stop]
        new = int(wanted.get("max_gen_toks", MAX_NEW_TOKENS))
        if new >= self.max_length:
            raise UsageError(f"max_gen_toks {new} leaves no room for a context (max_length {self.max_length})")
        ids = [self.tok_encode(context)[-(self.max_length - new) :] for context in contexts]
        width, pad = max(map(len, ids)), int(self.tokenizer.pad_token_id)
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=self._device)
        with calibrated_logits(self.model.model, self.head) as processors, self._settings(wanted, new):
            sequences = self.model.model.generate(  # type: ignore[operator]
                input_ids=tokens,
                attention_mask=mask,
                logits_processor=processors,
                **({"stop_strings": until, "tokenizer": self.tokenizer} if until else {}),
            )
        found = self.tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)
        return [_cut(text, until) for text in found]

    @contextmanager
    def _settings(self, wanted: dict[str, Any], new: int) -> Iterator[None]:
        """Puts the task's settings in the place of the model's own, which may hold penalties and a temperature."""
        if strange := sorted(wanted.keys() - SAMPLING - {*OWN_SETTINGS}):
            raise UsageError(
                f"generation setting '{strange[0]}' is not supported; there are {', '.join(sorted(SAMPLING))}"
            )
        sampling = {name: value for name, value in wanted.items() if name in SAMPLING and value is not None}
        if not sampling.get("do_sample"):
            sampling = {"do_sample": False}  # tasks write temperature 0 for greedy
        before = self._causal_lm.generation_config
        self._causal_lm.generation_config = GenerationConfig(
            max_new_tokens=new, pad_token_id=self.tokenizer.pad_token_id, eos_token_id=self.eot_token_id, **sampling
        )
        try:
            yield
        finally:
            self._causal_lm.generation_config = before


def _side_by_side(pairs: Sequence[tuple[Ids, Ids]], budget: int) -> list[list[int]]:
    """Requests of one context together, as far as a row of `budget` tokens holds them."""
    rows: list[list[int]] = []
    open_rows: dict[Ids, tuple[int, int]] = {}
    for number, (context, continuation) in enumerate(pairs):
        row, length = open_rows.get(context, (-1, budget + 1))
        if length + len(continuation) - 1 > budget:
            row, length = len(rows), len(context)
            rows.append([])
        rows[row].append(number)
        open_rows[context] = (row, length + len(continuation) - 1)
    return rows


def _cut(text: str, until: Sequence[str]) -> str:
    """A text before the first of its stop texts."""
    ends = [place for stop in until if (place := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]
