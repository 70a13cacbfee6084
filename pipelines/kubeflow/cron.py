"""Five-field cron expressions for Kubeflow, which wants six, the seconds first, and reads them in UTC.

Its scheduled-workflow controller parses with robfig/cron v1 (`cron.Parse(...)`, `time.Unix(...).UTC()` in
`cron_schedule.go`). That library, Kubernetes' CronJob (robfig/cron v3) and Unix cron agree on most expressions; the few
on which they do not are refused or written differently here, so that one expression means one thing everywhere.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import islice

from cronsim import CronSim, CronSimError

from components.errors import UsageError

FIELDS = ("minute", "hour", "day of month", "month", "day of week")
_PLAIN = re.compile(r"[0-9*,/-]+")
_NAMED = re.compile(r"[0-9A-Za-z*,/-]+")
_EVERY = re.compile(r"\*(/[0-9]+)?")


def six_fields(expression: str) -> str:
    """The expression that Kubeflow takes.

    Sunday as 7, which its parser does not know, becomes 0; names of days become numbers on the way.

    Args:
        expression: Minute, hour, day of month, month, day of week.

    Raises:
        UsageError: It is none, never comes true, or is read differently by different programs.
    """
    return " ".join(("0", *_checked(expression)))


def next_runs(expression: str, after: datetime, count: int = 5) -> list[datetime]:
    """The next times at which an expression comes true, in UTC.

    Args:
        expression: Five fields.
        after: With a time zone; the first time is later than it.
        count: How many.

    Raises:
        UsageError: See `six_fields`.
    """
    return list(islice(CronSim(" ".join(_checked(expression)), after.astimezone(UTC)), count))


def shown(moment: datetime) -> str:
    """A time in UTC, and in this machine's own time zone where that is another."""
    here = moment.astimezone()
    text = f"{moment.astimezone(UTC):%a %Y-%m-%d %H:%M} UTC"
    return text if here.utcoffset() == moment.astimezone(UTC).utcoffset() else f"{text} ({here:%a %H:%M %Z})"


def _checked(expression: str) -> list[str]:
    fields = expression.split()
    if len(fields) != len(FIELDS):
        raise UsageError(f"cron '{expression}' has {len(fields)} fields; expected {len(FIELDS)}: {', '.join(FIELDS)}")
    for name, field in zip(FIELDS, fields, strict=True):
        allowed = _NAMED if name in ("month", "day of week") else _PLAIN
        if not allowed.fullmatch(field) or "L" in field.upper().replace("JUL", ""):
            raise UsageError(
                f"cron '{expression}': {name} '{field}' is not in the common form: numbers, names, * , - /"
            )
        if "*" in field and not _EVERY.fullmatch(field):
            raise UsageError(f"cron '{expression}': {name} '{field}': a star stands alone, or before a step")
        if re.search(r"(^|,)(\w+)(-\2)?/", field):  # to some, 5-5/10 goes on to the end of the hour as 5/10 does
            raise UsageError(f"cron '{expression}': {name} '{field}': write the range, such as 5-59/10 for 5/10")
    days, weekdays = fields[2], fields[4]
    if any(field.startswith("*/") for field in (days, weekdays)) and "*" not in (days, weekdays):
        raise UsageError(
            f"cron '{expression}': a step in one day field beside a restriction in the other means 'and' to some "
            "programs and 'or' to others; list the days"
        )
    try:
        parsed = CronSim(expression, datetime(2024, 1, 1, tzinfo=UTC))
        next(parsed)
    except (CronSimError, StopIteration) as problem:
        raise UsageError(f"cron '{expression}': {problem or 'never comes true'}") from None
    if not weekdays.startswith("*"):
        numbers = {day % 7 for day in parsed.weekdays if isinstance(day, int)}  # the others were refused above
        fields[4] = ",".join(map(str, sorted(numbers)))
    return fields
