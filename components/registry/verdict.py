"""A gate's verdict: one row a rule with the figures behind it, as JSON, as Markdown and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

Outcome = Literal["pass", "fail", "skipped"]

_HEADINGS = ("rule", "value", "interval", "limit", "outcome", "reason")


@dataclass(frozen=True)
class RuleResult:
    """What became of one rule.

    Attributes:
        rule: What is judged, in words: `ece on id minus champion`.
        metric: The metric.
        split: The test split.
        source: The confidence source.
        against: Whom the candidate was compared with; None for an absolute rule.
        candidate: The candidate's figure; None where undefined or missing.
        reference: The figure of the other; None for an absolute rule or where undefined.
        value: What is judged: the candidate's figure, or its difference from (a share of) the other's.
        ci_low: Lower end of the interval of `value`.
        ci_high: Upper end.
        limit: What the interval is held against, `at most 0.100`.
        outcome: `pass`, `fail`, or `skipped` for a comparison with a champion that there is not.
        reason: Why, in words.
    """

    rule: str
    metric: str
    split: str
    source: str
    against: str | None
    candidate: float | None
    reference: float | None
    value: float | None
    ci_low: float | None
    ci_high: float | None
    limit: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The gate's answer on one candidate.

    Attributes:
        candidate: Name of the candidate.
        version: Its version in the registry; None for one that is not registered.
        champion: Version of the champion that it was compared with; None where there was none.
        rules: The rows, in the order of the run file.
    """

    candidate: str
    version: str | None
    champion: str | None
    rules: tuple[RuleResult, ...]

    @property
    def passed(self) -> bool:
        """Whether there are rules and none failed."""
        return bool(self.rules) and all(rule.outcome != "fail" for rule in self.rules)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the first failure in it."""
        failed = [rule for rule in self.rules if rule.outcome == "fail"]
        if not failed:
            return f"{self.candidate} passed the gate"
        more = f" ({len(failed)} of {len(self.rules)} rules failed)" if len(failed) > 1 else ""
        return f"{self.candidate} did not pass the gate: {failed[0].rule}: {failed[0].reason}{more}"

    def as_dict(self) -> dict[str, Any]:
        """Content of `verdict.json`."""
        return {
            "candidate": self.candidate,
            "version": self.version,
            "champion": self.champion,
            "passed": self.passed,
            "rules": [asdict(rule) for rule in self.rules],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Verdict:
        """The verdict that `as_dict` wrote; whether it passed follows from its rows."""
        rules = tuple(RuleResult(**rule) for rule in content["rules"])
        return cls(content["candidate"], content["version"], content["champion"], rules)

    def as_markdown(self) -> str:
        """A table for a report or a model card, the sentence above it."""
        lines = [f"{self.sentence}.", "", f"| {' | '.join(_HEADINGS)} |", f"|{' --- |' * len(_HEADINGS)}"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(rule))} |" for rule in self.rules]
        return "\n".join(lines) + "\n"

    def as_table(self) -> Table:
        """A table for the terminal; `notes` says what does not fit beside it."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, title=escape(self.candidate), title_justify="left")
        for heading in _HEADINGS[:-1]:
            table.add_column(heading, overflow="fold", justify="right" if heading in ("value", "interval") else "left")
        styles = {"pass": "green", "fail": "bold red", "skipped": "yellow"}
        for rule in self.rules:
            *cells, outcome = (escape(cell) for cell in _cells(rule)[:-1])
            table.add_row(*cells, f"[{styles[rule.outcome]}]{outcome}[/{styles[rule.outcome]}]")
        return table

    @property
    def notes(self) -> list[str]:
        """Why each rule that did not pass did not, and the verdict last; lines below the table."""
        why = [f"{rule.rule}: {rule.reason}" for rule in self.rules if rule.outcome != "pass"]
        return [*why, f"{self.candidate} {'passed' if self.passed else 'did not pass'} the gate"]


def _cells(rule: RuleResult) -> tuple[str, ...]:
    interval = "n/a" if rule.ci_low is None or rule.ci_high is None else f"[{rule.ci_low:.4f}, {rule.ci_high:.4f}]"
    value = "n/a" if rule.value is None else f"{rule.value:.4f}"
    return rule.rule, value, interval, rule.limit, rule.outcome, rule.reason
