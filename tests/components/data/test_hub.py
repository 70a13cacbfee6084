"""Presets, on hand-made rows of the hub tables' shapes, and loading through `datasets` from a local folder."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config_data import ColumnMapping, SourceConfig
from components.data.hub import hub_rows_to_open_questions, hub_rows_to_questions, read_hub_open_questions
from components.data.hub import read_hub_questions as read
from components.data.presets import PRESETS, preset
from components.errors import DataError

ARC_ROW = {
    "id": "Mercury_7175875",
    "question": "Which is a gas?",
    "choices": {"text": ["iron", "helium", "salt"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
ROWS = {
    "arc_easy": ARC_ROW,
    "arc_challenge": {**ARC_ROW, "choices": {"text": ["iron", "helium"], "label": ["A", "B"]}, "answerKey": "B"},
    "openbookqa": {
        "id": "7-980",
        "question_stem": "The sun is",
        "choices": {"text": ["cold", "a star", "a moon", "flat"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    "mmlu": {"question": "2 + 2?", "subject": "machine_learning", "choices": ["3", "4", "5", "6"], "answer": 1},
    "medmcqa": {
        "id": "e9ad821a",
        "question": "Vitamin of sunlight?",
        "opa": "C",
        "opb": "D",
        "opc": "K",
        "opd": "A",
        "cop": 1,
        "choice_type": "single",
        "exp": None,
        "subject_name": "Biochemistry",
        "topic_name": None,
    },
    "climaqa": {
        "Question": "Which clouds warm?",
        "Options": "a) Stratus\n--------------------\nb) Cirrus (high, thin)\n--------------------\nc) None",
        "Answer": "b",
        "Complexity": "BASE",
        "Validation": True,
    },
}
OPEN_ROWS = {
    "truthful_qa": (
        {
            "type": "Adversarial",
            "category": "Misconceptions",
            "question": "What if you eat seeds?",
            "best_answer": "Nothing",
            "correct_answers": ["Nothing", "They pass"],
            "incorrect_answers": ["They grow"],
            "source": "",
        },
        ("Nothing", "They pass"),
    ),
    "trivia_qa": (
        {
            "question": "Capital of Norway?",
            "question_id": "tc_1",
            "answer": {"aliases": ["Oslo", "Christiania"], "value": "Oslo"},
        },
        ("Oslo", "Christiania"),
    ),
    "popqa": (
        {"id": 4222362, "subj": "X", "prop": "occupation", "question": "Job of X?", "possible_answers": '["a", "b"]'},
        ("a", "b"),
    ),
    "alpaca": (
        {"instruction": "Translate.", "input": "chat", "output": "cat", "text": "Below is …"},
        ("cat",),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_multiple_choice_presets_convert_their_rows(name: str) -> None:
    (question,) = hub_rows_to_questions([ROWS[name]], name, preset(name))
    assert question.answer == 1
    assert (
        question.choices[1]
        == {
            "arc_easy": "helium",
            "arc_challenge": "helium",
            "openbookqa": "a star",
            "mmlu": "4",
            "medmcqa": "D",
            "climaqa": "Cirrus (high, thin)",
        }[name]
    )
    assert question.group == {"mmlu": "machine_learning", "medmcqa": "Biochemistry"}.get(name)
    assert question.id == ROWS[name].get("id", f"{name}-0")


@pytest.mark.parametrize("name", OPEN_ROWS)
def test_open_presets_convert_their_rows(name: str) -> None:
    row, answers = OPEN_ROWS[name]
    (question,) = hub_rows_to_open_questions([row], name, preset(name))
    assert question.answers == answers
    assert question.question == {"alpaca": "Translate.\n\nchat"}.get(name, row.get("question"))


def test_every_preset_is_tried_here() -> None:
    assert set(PRESETS) == set(ROWS) | set(OPEN_ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_missing_column_is_named(name: str) -> None:
    declared = preset(name).columns.question
    row = {key: value for key, value in ROWS[name].items() if key != declared}
    with pytest.raises(DataError, match=rf"{name}:1: field '{declared}': the column is missing"):
        hub_rows_to_questions([row], name, preset(name))


def test_bad_labels_and_unlabelled_rows_are_errors() -> None:
    with pytest.raises(DataError, match="field 'answerKey': 'E' is not one of the labels"):
        hub_rows_to_questions([{**ARC_ROW, "answerKey": "E"}], "arc", preset("arc_easy"))
    short = {**ARC_ROW, "choices": {"text": ["a", "b", "c"], "label": ["1", "2"]}}
    with pytest.raises(DataError, match="2 labels for 3 choices"):
        hub_rows_to_questions([short], "arc", preset("arc_easy"))
    with pytest.raises(DataError, match="-1 is out of range"):
        hub_rows_to_questions([{**ROWS["medmcqa"], "cop": -1}], "medmcqa", preset("medmcqa"))


def test_climaqa_leaves_out_what_experts_rejected() -> None:
    rows = [{**ROWS["climaqa"], "Validation": False}, {**ROWS["climaqa"], "Question": "Kept?"}]
    assert [q.question for q in hub_rows_to_questions(rows, "climaqa", preset("climaqa"))] == ["Kept?"]


def test_splits_are_declared() -> None:
    assert preset("climaqa").place("climaqa", "test") == ("Gold", "mcq")
    assert preset("arc_easy").place("arc_easy", None) == ("ARC-Easy", "train")
    assert preset("popqa").place("popqa", None) == (None, "test")
    with pytest.raises(DataError, match=r"no split 'test' .*labels of its test split are not published"):
        preset("medmcqa").place("medmcqa", "test")
    with pytest.raises(DataError, match="no such preset"):
        preset("arc")


def test_the_wrong_kind_is_refused() -> None:
    with pytest.raises(DataError, match="kind 'open', without choices"):
        read(SourceConfig(kind="hub", preset="popqa"), "x")
    with pytest.raises(DataError, match="multiple-choice, not open-ended"):
        read_hub_open_questions(SourceConfig(kind="hub", preset="mmlu"))


def test_loading_a_repository_of_hub_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder laid out like a hub data set goes through the same `load_dataset` call."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "quiz"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([ARC_ROW]), folder / "train.parquet")
    columns = ColumnMapping(question="question", choices="choices.text", labels="choices.label", answer="answerKey")
    config = SourceConfig(kind="hub", repository=str(folder), split="train", columns=columns)
    (question,) = read(config, "x")
    assert question.choices == ("iron", "helium", "salt")
    with pytest.raises(DataError, match=r"cannot be loaded: .*local file"):
        read(config.model_copy(update={"split": "nowhere"}), "x")
    with pytest.raises(DataError, match="needs 'split'"):
        read(config.model_copy(update={"split": None}), "x")


def test_without_a_hub_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set.*kind 'file'"):
        read(SourceConfig(kind="hub", preset="arc_easy"), "x")


def test_rows_survive_json() -> None:
    """Presets see what `datasets` yields, which is plain JSON data; nothing here depends on more."""
    for name, row in ROWS.items():
        again = json.loads(json.dumps(row))
        assert hub_rows_to_questions([again], name, preset(name)) == hub_rows_to_questions([row], name, preset(name))
