"""All rules for a manifest in one place, used by `caltune render k8s` and by the tests of `k8s/`."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components.errors import UsageError
from pipelines.k8s_entrypoints import entrypoint_problems
from pipelines.k8s_pod_rules import pod_problems
from pipelines.k8s_ray_rules import LONGEST_NAME, ray_problems

Document = Mapping[str, Any]

_LONGEST_CRONJOB = 52  # the controller appends a time to it
_LONGEST_CONFIG = 2**20
_CRON_FIELD = re.compile(r"[\d*,/A-Za-z-]+")


def problems(documents: Sequence[Document], *, digests: bool = False) -> list[str]:
    """What is wrong with some manifests, beyond what their schemas say.

    Args:
        documents: The manifests.
        digests: Images have to be named by digest.

    Returns:
        One sentence each, beginning with kind and name; empty where all is well.
    """
    found = []
    for document in documents:
        who = f"{document.get('kind')} {(document.get('metadata') or {}).get('name')}"
        found += [f"{who}: {problem}" for problem in _document(document, digests)]
    return found


def refuse_problems(documents: Sequence[Document]) -> None:
    """Raises if anything is wrong.

    Raises:
        UsageError: Names every problem, one a line.
    """
    found = problems(documents)
    if found:
        raise UsageError("\n".join(found))


def _document(document: Document, digests: bool) -> Iterator[str]:
    kind, spec = document.get("kind"), document.get("spec") or {}
    if kind in LONGEST_NAME:
        yield from ray_problems(document)
    if kind in ("CronJob", "RayCronJob"):
        yield from (f"spec: {problem}" for problem in _schedule(spec))
    if kind == "CronJob":
        yield from _cron_job(document)
    if kind == "Secret":
        yield "a Secret does not belong into a manifest; create it on the cluster and refer to it"
    if kind == "ConfigMap" and sum(map(len, (document.get("data") or {}).values())) > _LONGEST_CONFIG:
        yield "a ConfigMap holds 1 MiB at most"
    yield from pod_problems(document, digests=digests)
    yield from entrypoint_problems(document)


def _schedule(spec: Document) -> Iterator[str]:
    schedule, zone = str(spec.get("schedule", "")), spec.get("timeZone")
    fields = schedule.split()
    if "TZ=" in schedule:
        yield f"schedule '{schedule}' names a time zone; use timeZone"
    elif len(fields) != 5 or not all(_CRON_FIELD.fullmatch(field) for field in fields):
        yield f"schedule '{schedule}' must have five fields: minute, hour, day of month, month, day of week"
    if zone is None:
        yield "timeZone is missing: the cluster's own would be taken, whichever that is"
    elif zone not in zoneinfo.available_timezones():
        yield f"timeZone '{zone}' is unknown"


def _cron_job(document: Document) -> Iterator[str]:
    name, spec = str((document.get("metadata") or {}).get("name")), document.get("spec") or {}
    if len(name) > _LONGEST_CRONJOB:
        yield f"the name has {len(name)} characters; a CronJob may have {_LONGEST_CRONJOB}"
    if spec.get("concurrencyPolicy") != "Forbid":
        yield "spec: concurrencyPolicy must be Forbid"
    for key in ("startingDeadlineSeconds", "successfulJobsHistoryLimit", "failedJobsHistoryLimit"):
        if key not in spec:
            yield f"spec: {key} is missing"
    if "backoffLimit" not in ((spec.get("jobTemplate") or {}).get("spec") or {}):
        yield "spec.jobTemplate.spec: backoffLimit is missing"
