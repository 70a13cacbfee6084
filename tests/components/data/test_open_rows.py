"""Open-ended rows from file to tokens, beside multiple-choice ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from components.config import RunConfig
from components.config_data import PromptConfig
from components.data.prepare import load_prepared, prepare
from components.data.prompts import PromptEncoder, PromptError
from components.data.schema import OpenQuestion
from components.errors import DataError

ROWS = [{"id": f"o{i}", "question": f"Who wrote book {i}?", "answers": [f"Ann {i}", f"A. {i}"]} for i in range(40)]
SPLITS = {"train": 12, "calibration": 4, "validation": 4, "test": 8}
FACTS = {"kind": "facts", "domain": "geography"}


def config(path: Path, **data: object) -> RunConfig:
    source = {"kind": "file", "path": str(path), "rows": "open"}
    sections = {"source": source, "splits": SPLITS, **data}
    return RunConfig.model_validate({"run": "r", "methods": ["sft"], "data": sections})


def test_all_open(write_rows, tmp_path: Path) -> None:
    prepared = prepare(config(write_rows(ROWS)), tmp_path / "data", tmp_path)
    loaded = load_prepared(tmp_path / "data")
    assert {name: len(split) for name, split in loaded.splits.items()} == {
        "train": 12,
        "calibration": 4,
        "validation": 4,
        "id": 8,
    }
    for name, split in loaded.splits.items():
        assert split.open_ended
        assert split.questions == prepared.splits[name].questions
        assert split.with_choices == ()
        assert split.without_choices == split.questions


def test_open_out_of_domain_beside_choices(write_rows, tmp_path: Path) -> None:
    """Row o0 stands twice in the file, with other spaces: an oddity, as it is among choices."""
    rows = [*ROWS, {"id": "again", "question": "Who  wrote book 0?", "answers": ["Ann 0"]}]
    source = {"kind": "file", "path": str(write_rows(rows)), "rows": "open"}
    run = config(tmp_path, source=FACTS, ood={"books": source}, splits={**SPLITS, "test": 41})
    splits = prepare(run, tmp_path / "data", tmp_path).splits
    assert splits["books"].open_ended
    assert not splits["id"].open_ended
    assert splits["books"].oddities == {"repeated question": 1}
    assert load_prepared(tmp_path / "data").manifest["splits"]["books"]["rows"] == "open"
    assert "rows" not in load_prepared(tmp_path / "data").manifest["splits"]["id"]


def test_overlap_by_answers(write_rows, tmp_path: Path) -> None:
    again = [{**ROWS[0], "answers": ["Ann 0", "a. 0"]}, {**ROWS[1], "answers": ["Bob"]}]
    other = {"kind": "file", "path": str(write_rows(again, "other.jsonl")), "rows": "open"}
    everything = {"train": 30, "calibration": 1, "validation": 1, "test": 2}
    run = config(write_rows(ROWS), ood={"other": other}, test_source=other, splits=everything)
    (found,) = [o for o in prepare(run, tmp_path / "data", tmp_path).overlaps if (o.first, o.second) == ("id", "other")]
    assert (found.questions, found.same_choices) == (2, 2)


def test_rows_of_the_other_kind_are_refused(write_rows, tmp_path: Path) -> None:
    choices = [{"question": "?", "choices": ["a", "b"], "answer": 0}]
    with pytest.raises(DataError, match="answers"):
        prepare(config(write_rows(choices)), tmp_path / "data", tmp_path)


def test_the_answer_trained_on_has_an_end(tiny_tokenizer) -> None:
    """The first accepted answer behind the prompt, and the end-of-sequence token, id 2."""
    encoder = PromptEncoder(tiny_tokenizer, PromptConfig(style="plain", delimiter=" "), 64)
    question = OpenQuestion("q", "What is the capital of Peru?", ("Lima", "Ciudad de los Reyes"))
    encoded = encoder.encode(question)
    assert encoded.answer == 0
    (option,) = encoded.options
    assert option[-1] == tiny_tokenizer.eos_token_id == 2
    assert tiny_tokenizer.decode(option[:-1]) == " Lima"
    listed = PromptConfig(style="plain", template="{question} {options}")
    with pytest.raises(PromptError, match="'q' is open-ended"):
        PromptEncoder(tiny_tokenizer, listed, 64).encode(question)


MATCH = {"entropy_over": "vocabulary", "stop": {"rule": "match"}}
OPEN = {"kind": "file", "path": "x.jsonl", "rows": "open"}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"source": {**FACTS, "rows": "open"}}}, "facts are multiple-choice"),
        ({"data": {"source": FACTS, "ood": {"o": OPEN}}, "recalibrate": {"sft": ["temperature"]}}, "data.ood.o has no"),
        ({"data": {"source": FACTS, "test_source": OPEN}, "evaluation": {"actors": 2}}, "evaluation.actors is 2"),
        ({"data": {"source": OPEN, "prompt": {"template": "{question} {options}"}}}, "template lists options"),
        ({"data": {"source": OPEN, "test_source": FACTS}}, "needs them too"),
        ({"data": {"source": OPEN}, "methods": ["calm"]}, "entropy_over"),
        ({"data": {"source": OPEN}, "methods": ["calm"], "calm": MATCH}, "'budget'"),
        ({"data": {"source": OPEN}, "methods": ["uq4ct"]}, "uq4ct.correctness"),
        ({"data": {"source": FACTS}, "generation": {"clusterer": "nli"}}, "nli_model"),
        ({"data": {"source": FACTS}, "generation": {"nli_model": "some/model"}}, "nli_model"),
        ({"data": {"source": FACTS}, "generation": {"samples": 1}}, "samples"),
    ],
)  # fmt: skip
def test_what_open_rows_cannot_do_is_said_beforehand(sections: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RunConfig.model_validate({"run": "r", "methods": ["sft"], **sections})
