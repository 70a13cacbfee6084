"""Starts a RayJob from a suspended one and stays until it has ended: what the CronJob's pod runs.

`python -m pipelines.k8s_launch caltune-retrain` copies the RayJob of that name, which never runs itself, as `kubectl
create job --from=cronjob/...` does for Jobs. So kustomize reaches everything that will run, images included; the
CronJob's `Forbid` covers the whole job, because its pod stays; and the CronJob's history limits cover RayJobs too,
because each copy belongs to the Job that made it.

Exit codes: 0 done, 1 the work failed, 2 not started, 3 gate not passed, 4 timed out, 5 contact lost, 130 stopped.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from components.errors import CaltuneError, JobError, UsageError
from pipelines.k8s_api import ApiSilentError, RayJobs
from pipelines.k8s_job import RUN_LABEL
from pipelines.k8s_ray_rules import QUEUE_LABEL, name_problems
from ray_jobs.job_states import CONTACT_LOST, FAILED, FOLDER, INTERRUPTED, PASSED_ON, RUN, TIMED_OUT

QUEUE_ANNOTATION = "caltune.io/queue-name"
"""On the RayJob that is copied: the copies' Kueue queue. Its own label would make Kueue start it."""
OWNER_NAME, OWNER_UID = "CALTUNE_OWNER_NAME", "CALTUNE_OWNER_UID"
"""Variables with the name and uid of the Job that this pod belongs to."""
POLL_SECONDS = 15.0
PATIENCE_SECONDS = 900.0
_ENDED = ("Complete", "Failed", "ValidationFailed")
_EXIT_CODE = re.compile(r"exit code (\d+)")


def copy_of(template: dict[str, Any], now: datetime, owner: Mapping[str, str]) -> dict[str, Any]:
    """A RayJob that runs what a suspended one describes, under a name and a run of its own.

    Args:
        template: The suspended RayJob.
        now: Becomes part of the name.
        owner: Environment with `OWNER_NAME` and `OWNER_UID`; without them the copy belongs to nobody.

    Raises:
        UsageError: It is not suspended, its entrypoint does not say `--set run=<its name>`, or its name is too long.
    """
    metadata, spec = template["metadata"], copy.deepcopy(template["spec"])
    old = metadata["name"]
    new = f"{old}-{now:%Y%m%d-%H%M}"
    for problem in name_problems("RayJob", new):
        raise UsageError(problem)
    if not spec.get("suspend"):
        raise UsageError(f"RayJob {old} is not suspended, so it is no template: it runs itself")
    words = spec["entrypoint"].split(" ")
    if f"run={old}" not in words:
        raise UsageError(f"the entrypoint of RayJob {old} does not say --set run={old}, so every copy would be one run")
    spec["entrypoint"] = " ".join(f"run={new}" if word == f"run={old}" else word for word in words)
    spec["suspend"] = False
    tags = spec.setdefault("metadata", {})
    tags[RUN] = new
    if FOLDER in tags:
        tags[FOLDER] = str(PurePosixPath(tags[FOLDER]).with_name(new))
    queue = (metadata.get("annotations") or {}).get(QUEUE_ANNOTATION)
    labels = {**(metadata.get("labels") or {}), RUN_LABEL: old} | ({QUEUE_LABEL: queue} if queue else {})
    made: dict[str, Any] = {"name": new, "namespace": metadata["namespace"], "labels": labels}
    if owner.get(OWNER_NAME) and owner.get(OWNER_UID):
        made["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": owner[OWNER_NAME], "uid": owner[OWNER_UID]}
        ]
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": made, "spec": spec}


def launch(jobs: RayJobs, template: str, owner: Mapping[str, str]) -> str:
    """Starts a copy, unless an earlier one is at work.

    Args:
        jobs: The namespace's RayJobs.
        template: Name of the suspended RayJob.
        owner: See `copy_of`.

    Returns:
        The copy's name.

    Raises:
        UsageError: An earlier copy is at work.
        JobError: The API server refuses.
        ApiSilentError: It does not answer.
    """
    made = copy_of(jobs.get(template), datetime.now(UTC), owner)
    for other in jobs.with_label(RUN_LABEL, template):
        status, name = other.get("status") or {}, other["metadata"]["name"]
        if name != template and status.get("jobDeploymentStatus") not in _ENDED:
            stands = status.get("jobDeploymentStatus") or "new"
            raise UsageError(f"not started: RayJob {name} is still at work ({stands})")
    return str(jobs.create(made)["metadata"]["name"])


def follow(jobs: RayJobs, name: str) -> int:
    """Waits for a RayJob's end; says each change of its state.

    Args:
        jobs: The namespace's RayJobs.
        name: The RayJob's name.

    Returns:
        The exit code that its end means.

    Raises:
        JobError: The API server has kept silent for too long, or the RayJob has been deleted.
    """
    said, silent_since = "", None
    while True:
        try:
            status = jobs.get(name).get("status") or {}
            silent_since = None
        except ApiSilentError as problem:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise JobError(f"no contact with the API server: {problem}; {name} goes on", CONTACT_LOST) from None
            time.sleep(POLL_SECONDS)
            continue
        stands = " ".join(filter(None, (status.get("jobDeploymentStatus"), status.get("jobStatus"))))
        if stands != said:
            said = stands
            print(f"{datetime.now(UTC):%H:%M:%S} {name}: {stands or 'new'} {_reason(status)}".rstrip(), flush=True)
        if status.get("jobDeploymentStatus") in _ENDED:
            return exit_code(status)
        time.sleep(POLL_SECONDS)


def exit_code(status: Mapping[str, Any]) -> int:
    """What the end of a RayJob means; 0 only for success.

    Args:
        status: The RayJob's status, of one that has ended.
    """
    if "DeadlineExceeded" in str(status.get("reason")):
        return TIMED_OUT
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return UsageError.exit_code
    if status.get("jobStatus") == "STOPPED":
        return INTERRUPTED
    if status.get("jobDeploymentStatus") == "Complete" and status.get("jobStatus") == "SUCCEEDED":
        return 0
    found = _EXIT_CODE.search(str(status.get("message")))
    code = int(found.group(1)) if found else FAILED
    return code if code in PASSED_ON else FAILED


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Start a RayJob from a suspended one and wait for its end.")
    parser.add_argument("template", help="name of the suspended RayJob")
    template = parser.parse_args().template
    try:
        jobs = RayJobs.here()
        code = follow(jobs, launch(jobs, template, os.environ))
    except CaltuneError as problem:
        print(f"caltune: {problem}", file=sys.stderr)
        code = problem.exit_code
    except ApiSilentError as problem:
        print(f"caltune: not started: {problem}", file=sys.stderr)
        code = CONTACT_LOST
    sys.exit(code)


def _reason(status: Mapping[str, Any]) -> str:
    return " ".join(str(status[key]).splitlines()[0] for key in ("reason", "message") if status.get(key))


if __name__ == "__main__":
    main()
