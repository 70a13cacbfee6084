"""The model class for lm-evaluation-harness on the tiny model, asked as the harness asks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.config import MixLoraConfig
from components.errors import ModelError, UsageError

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[parity]'")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from components.export.harness import CaltuneLM, _side_by_side
from components.export.source import open_source

PROMPT = "Question: What is the capital of Peru?\nAnswer:"


def asked(kind: str, *arguments) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=i) for i, pair in enumerate(arguments)]


def by_hand(folder: Path, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-probability of a continuation, and whether it is the greedy one, by one plain forward pass."""
    model, head = open_source(folder).load()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + continuation])).logits[0].float()
        logits = (logits if head is None else head(logits))[len(context) - 1 : -1]
    values = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return float(values.sum()), logits.argmax(-1).tolist() == continuation


def test_it_is_registered_by_name_and_by_entry_point():
    assert get_model("caltune") is CaltuneLM
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"]["caltune"] == f"{CaltuneLM.__module__}:{CaltuneLM.__name__}"


@pytest.mark.parametrize("method", ["calm", "uq4ct"])
def test_scores_are_those_of_a_plain_pass(method, make_adapter, random_head):
    spec = {} if method == "calm" else {"spec": MixLoraConfig(r=2, alpha=4, num_experts=4)}
    adapter = make_adapter(method=method, head=random_head() if method == "calm" else None, **spec)
    model = CaltuneLM(str(adapter), device="cpu")
    pairs = [(PROMPT, " Lima"), ("Which metal?", " iron"), (PROMPT, " Paris, France"), ("", "Lima is a city")]
    found = model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        # The tokenizer puts <s> (1) in front; an empty context is <s> alone.
        prompt = [1, *model.tokenizer(context, add_special_tokens=False).input_ids] if context else [1]
        whole = [1, *model.tokenizer(context + continuation, add_special_tokens=False).input_ids]
        expected, is_greedy = by_hand(adapter, prompt, whole[len(prompt) :])
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy is is_greedy


def test_the_greedy_continuation_is_told(make_adapter, random_head):
    model = CaltuneLM(str(make_adapter(head=random_head())), device="cpu", batch_size=2)
    contexts = [(PROMPT, {"until": [], "max_gen_toks": 6}), ("Which metal?", {"until": [], "max_gen_toks": 6})]
    texts = model.generate_until(asked("generate_until", *contexts), disable_tqdm=True)
    alone = [model.generate_until(asked("generate_until", one), disable_tqdm=True)[0] for one in contexts]
    assert texts == alone, "an answer depends on what is generated beside it"
    ids = model.tok_encode(PROMPT)
    with torch.no_grad():
        for _ in range(6):  # greedy under the head, token by token
            logits = model.model.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            ids.append(int(model.head(logits).argmax()))
    tokens = ids[-6:]
    assert model.tokenizer.decode(tokens, skip_special_tokens=True) == texts[0]
    ((_, greedy),) = model._loglikelihood_tokens([(None, ids[:-6], tokens)])
    assert greedy
    ((_, greedy),) = model._loglikelihood_tokens([(None, ids[:-6], [*tokens[:-1], (tokens[-1] + 1) % 320])])
    assert not greedy
    stop = texts[0][2:4]
    ((cut),) = model.generate_until(asked("generate_until", (PROMPT, {"until": [stop], "max_gen_toks": 6})), True)
    assert cut == texts[0][: texts[0].index(stop)]


def test_a_long_text_is_scored_once_in_windows(make_adapter):
    adapter = make_adapter(method="sft")
    model = CaltuneLM(str(adapter), device="cpu", max_length=24)
    text = "What is the capital of Peru? The capital of Peru is Lima. Kenya lies in Africa."
    ids = model.tok_encode(text)
    assert len(ids) > 24
    (total,) = model.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    first, _ = by_hand(adapter, [1], ids[:24])
    rest = len(ids) - 24
    last, _ = by_hand(adapter, ids[-25:-rest], ids[-rest:])
    assert total == pytest.approx(first + last, abs=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(make_adapter):
    adapter = make_adapter(method="sft")
    model = CaltuneLM(str(adapter), device="cpu", max_length=10)
    ids = model.tok_encode(PROMPT)
    ((value, _),) = model._loglikelihood_tokens([(None, ids, [40, 41, 42])])
    assert value == pytest.approx(by_hand(adapter, ids[-8:], [40, 41, 42])[0], abs=1e-4)
    with pytest.raises(ModelError, match="continuation of 11 tokens"):
        model._loglikelihood_tokens([(None, ids, list(range(40, 51)))])


def test_what_would_be_another_distribution_is_refused(make_adapter):
    with pytest.raises(ModelError, match="mc_dropout"):
        CaltuneLM(str(make_adapter(method="mc_dropout")))
    adapter = str(make_adapter(method="sft"))
    with pytest.raises(UsageError, match="batch_size"):
        CaltuneLM(adapter, batch_size="auto")
    model = CaltuneLM(adapter, device="cpu")
    with pytest.raises(UsageError, match="repetition_penalty"):
        model.generate_until(asked("generate_until", (PROMPT, {"max_gen_toks": 4, "repetition_penalty": 1.2})))


@given(st.lists(st.tuples(st.sampled_from([(1,), (1, 2), (1, 2, 3)]), st.integers(1, 5)), max_size=20))
def test_requests_share_rows_by_context_alone(drawn):
    pairs = [(context, (9,) * length) for context, length in drawn]
    rows = _side_by_side(pairs, budget=8)
    assert sorted(number for row in rows for number in row) == list(range(len(pairs)))
    for row in rows:
        (context,) = {pairs[number][0] for number in row}
        assert len(row) == 1 or len(context) + sum(len(pairs[number][1]) - 1 for number in row) <= 8
