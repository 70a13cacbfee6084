"""Progress for people: bars with time left on a terminal, one line per interval elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_SECONDS = 15.0

Advance = Callable[[int, str], None]
"""Called with the amount done since the last call and a few words on how it stands (may be empty)."""


class Reporter:
    """Says what is going on.

    Args:
        console: Where to; stderr unless told otherwise.
        quiet: Say nothing but errors.
    """

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet

    def say(self, text: str) -> None:
        """One line."""
        if not self.quiet:
            self.console.print(text, soft_wrap=True)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Advance]:
        """Shows the progress of a piece of work.

        Args:
            title: What is being done.
            total: Units of work.

        Yields:
            A function to call with what has been done.
        """
        if self.quiet:
            yield lambda amount, note: None
        elif self.console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(title, total=total, note="")
                yield lambda amount, note: bar.update(task, advance=amount, note=note)
        else:
            yield _Lines(self.console, title, total).advance

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )


class _Lines:
    """Progress where bars would fill a log: a line at the start of long work, each interval, and the end."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self.console, self.title, self.total = console, title, total
        self.done, self.begun = 0, time.monotonic()
        self.said = self.begun

    def advance(self, amount: int, note: str) -> None:
        self.done += amount
        now = time.monotonic()
        finished = self.done >= self.total
        if now - self.said < LINE_EVERY_SECONDS and not finished:
            return
        self.said = now
        elapsed = now - self.begun
        tail = f"in {elapsed:.0f} s" if finished else f"{elapsed:.0f} s"
        if self.done and not finished:
            tail += f", about {elapsed / self.done * (self.total - self.done):.0f} s left"
        line = f"{self.title}: {self.done}/{self.total} {tail}{'  ' + note if note else ''}"
        self.console.print(line, soft_wrap=True)


def stdout_console() -> Console:
    """Where results go."""
    return Console(file=sys.stdout, highlight=False)
