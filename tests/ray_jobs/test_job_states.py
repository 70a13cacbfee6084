"""Every state of a job becomes an exit code, and only success becomes 0."""

from __future__ import annotations

import pytest

from components.errors import UsageError
from ray_jobs.job_states import ENDED, EXIT_CODES, FOLDER, HASH, RUN, Job, find_job, find_twin

TAGS = {RUN: "small", "caltune_command": "train", FOLDER: "/shared/small", HASH: "ab"}


def job(status: str, code: int | None = None, **changes: object) -> Job:
    return Job(**({"id": "j", "status": status, "tags": TAGS, "driver_exit_code": code} | changes))


def test_every_status_of_ray_has_an_exit_code():
    from ray.job_submission import JobStatus

    assert set(EXIT_CODES) == {status.value for status in JobStatus}
    assert set(ENDED) == {status.value for status in JobStatus if status.is_terminal()}
    assert [status for status, code in EXIT_CODES.items() if code == 0] == ["SUCCEEDED"]


@pytest.mark.parametrize(
    ("status", "driver", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 1, 1),
        ("FAILED", 2, 2),
        ("FAILED", 3, 3),
        ("FAILED", 4, 4),
        ("FAILED", 130, 130),
        ("FAILED", -9, 1),
        ("FAILED", 137, 1),
        ("FAILED", 0, 1),
        ("FAILED", None, 1),
        ("STOPPED", None, 130),
        ("STOPPED", 0, 130),  # a command that saved its work after SIGTERM and left with 0 was stopped all the same
        ("RUNNING", None, 4),
        ("PENDING", None, 4),
    ],
)
def test_exit_code(status, driver, expected):
    assert job(status, driver).exit_code == expected


def test_a_job_that_never_ran_says_why():
    ending = job("FAILED", message="runtime_env setup failed: no space left").ending()
    assert ending == "job j failed: runtime_env setup failed: no space left"
    assert "out of memory" in job("FAILED", 137).ending()


def test_ray_details_are_taken_over():
    from ray.job_submission import JobDetails, JobStatus

    details = JobDetails(
        type="SUBMISSION", submission_id="x", status=JobStatus.FAILED, entrypoint="e", driver_exit_code=2,
        metadata=TAGS, start_time=1000, end_time=3500, message="m",
    )  # fmt: skip
    found = Job.of(details)
    assert found == Job("x", "FAILED", TAGS, started=1.0, ended=3.5, driver_exit_code=2, message="m")
    assert found.as_dict()["exit_code"] == 2
    assert job("RUNNING").as_dict()["exit_code"] is None


def test_find_job_takes_an_id_then_a_run_then_the_newest():
    jobs = [job("FAILED", id="old", started=1.0), job("RUNNING", id="new", started=2.0)]
    jobs.append(job("RUNNING", id="other", started=3.0, tags={RUN: "old"}))
    assert find_job(jobs, "old").id == "old", "an id goes before the run of that name"
    assert find_job(jobs, "small").id == "new"
    assert find_job(jobs, None).id == "other"
    with pytest.raises(UsageError, match="'smal'; the newest jobs are other, new, old"):
        find_job(jobs, "smal")
    with pytest.raises(UsageError, match="no job of caltune"):
        find_job([], None)


@pytest.mark.parametrize(
    ("status", "tags", "twins"),
    [
        ("RUNNING", {}, True),
        ("PENDING", {}, True),
        ("SUCCEEDED", {}, False),
        ("STOPPED", {}, False),
        ("RUNNING", {HASH: "cd"}, True),  # the same folder with other settings
        ("RUNNING", {"caltune_command": "evaluate"}, True),  # the same folder again
        ("RUNNING", {FOLDER: "/else/small"}, True),  # the same work twice
        ("RUNNING", {FOLDER: "/else/small", "caltune_command": "evaluate"}, False),
        ("RUNNING", {FOLDER: "/else/small", HASH: "cd"}, False),
    ],
)
def test_twins(status, tags, twins):
    assert (find_twin([job(status, tags=TAGS | tags)], TAGS) is not None) is twins
