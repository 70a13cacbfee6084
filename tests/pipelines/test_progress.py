"""Progress: lines at intervals where nobody looks at a terminal, bars where somebody does, nothing when quiet."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipelines import progress
from pipelines.progress import Reporter


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def reporter(terminal: bool, quiet: bool = False) -> tuple[Reporter, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=150, highlight=False)
    return Reporter(console, quiet=quiet), written


def test_without_a_terminal_one_line_each_interval_and_one_at_the_end(clock):
    """100 units at one a second: at 15, 30, ... 90 s with what is left, then the end."""
    said, written = reporter(terminal=False)
    with said.task("train sft", 100) as advance:
        for _ in range(100):
            clock.now += 1.0
            advance(1, "loss 1.000")
    lines = written.getvalue().splitlines()
    assert lines[0] == "train sft: 15/100 15 s, about 85 s left  loss 1.000"
    assert lines[5] == "train sft: 90/100 90 s, about 10 s left  loss 1.000"
    assert lines[6:] == ["train sft: 100/100 in 100 s  loss 1.000"]


def test_short_work_is_one_line(clock):
    said, written = reporter(terminal=False)
    with said.task("evaluate base", 3) as advance:
        for _ in range(3):
            clock.now += 0.5
            advance(1, "")
    assert written.getvalue() == "evaluate base: 3/3 in 2 s\n"


def test_on_a_terminal_a_bar_shows_amount_time_left_and_note():
    said, written = reporter(terminal=True)
    with said.task("train calm", 4) as advance:
        advance(1, "g 0.500")
        advance(3, "g 0.250")
    shown = written.getvalue()
    assert "train calm" in shown
    assert "4/4" in shown
    assert "left" in shown
    assert "g 0.250" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_says_nothing(clock, terminal):
    said, written = reporter(terminal, quiet=True)
    said.say("data: train 48")
    with said.task("train sft", 2) as advance:
        clock.now += 60
        advance(2, "")
    assert written.getvalue() == ""


def test_sentences_go_to_stderr(capsys):
    Reporter().say("data: train 48")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "data: train 48\n")
