"""The real files, against the counts in the README that lies beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from components.data.files import read_open_questions, read_questions
from components.data.splits import find_overlaps


@pytest.mark.parametrize(
    ("file", "rows", "oddities", "positions"),
    [
        ("arc_easy/train.jsonl.gz", 2251, {"3 choices": 6, "5 choices": 4}, [548, 588, 578, 535, 2]),
        (
            "arc_easy/test.jsonl.gz",
            2376,
            {"3 choices": 7, "5 choices": 4, "choices equal up to case and spaces": 1},
            [596, 585, 633, 561, 1],
        ),
        (
            "arc_challenge/train.jsonl",
            1119,
            {
                "3 choices": 1,
                "5 choices": 1,
                "choices equal up to case and spaces": 2,
                "right choice has an equal twin": 2,
                "repeated row": 1,
            },
            [239, 296, 291, 293],
        ),
        (
            "arc_challenge/test.jsonl",
            1172,
            {
                "3 choices": 4,
                "5 choices": 3,
                "choices equal up to case and spaces": 1,
                "right choice has an equal twin": 1,
            },
            [266, 311, 310, 285],
        ),
        (
            "openbookqa/train.jsonl.gz",
            4957,
            {"exactly equal choices": 3, "choices equal up to case and spaces": 3, "repeated row": 5},
            [1378, 1212, 1146, 1221],
        ),
        ("openbookqa/test.jsonl", 500, {}, [138, 126, 132, 104]),
        ("mmlu/dev.jsonl", 75, {"outer spaces": 9}, [16, 19, 19, 21]),
        (
            "mmlu/test.jsonl.gz",
            3860,
            {
                "exactly equal choices": 2,
                "choices equal up to case and spaces": 2,
                "right choice has an equal twin": 1,
                "outer spaces": 310,
                "repeated row": 78,
            },
            [937, 958, 991, 974],
        ),
    ],
)
def test_multiple_choice_files(
    real_data: Path, file: str, rows: int, oddities: dict[str, int], positions: list[int]
) -> None:
    questions = read_questions(real_data / file, None, "x")
    assert len(questions) == rows
    assert questions.oddities == oddities
    assert [count for _, count in sorted(Counter(q.answer for q in questions).items())] == positions


@pytest.mark.parametrize(
    ("file", "rows", "most"),
    [
        ("truthfulqa/test.jsonl.gz", 817, 12),
        ("triviaqa/dev.jsonl.gz", 6000, 372),
        ("triviaqa/test.jsonl.gz", 6000, 211),
        ("popqa/dev.jsonl", 1000, 45),
        ("popqa/test.jsonl", 1000, 35),
        ("popqa_props/test.jsonl", 1000, 46),
    ],
)
def test_open_ended_files(real_data: Path, file: str, rows: int, most: int) -> None:
    questions = read_open_questions(real_data / file, None, "x")
    assert len(questions) == rows
    assert max(len(q.answers) for q in questions) == most


@pytest.mark.parametrize(
    ("folder", "train", "texts", "same_choices"),
    [
        ("openbookqa", "train.jsonl.gz", 23, 14),
        ("arc_easy", "train.jsonl.gz", 7, 3),
        ("arc_challenge", "train.jsonl", 6, 0),
    ],
)
def test_questions_in_train_and_test_are_found(
    real_data: Path, folder: str, train: str, texts: int, same_choices: int
) -> None:
    test = next((real_data / folder).glob("test.jsonl*"))
    sets = {
        "train": read_questions(real_data / folder / train, None, "train"),
        "test": read_questions(test, None, "test"),
    }
    (overlap,) = find_overlaps(sets)
    assert (overlap.first, overlap.second) == ("train", "test")
    assert (overlap.questions, overlap.same_choices) == (texts, same_choices)
