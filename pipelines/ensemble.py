"""Training an ensemble: its members one after the other, each a stage of its own, then the folder that holds them all.

A run that is broken off keeps the members that are done, and goes on with the one in progress from its newest
checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from components.models.ensemble import member_name, save_ensemble
from components.storage import joined
from components.tracking.logger import ending

if TYPE_CHECKING:
    from components.training.job import TrainingJob
    from pipelines.calibrate import Calibration


def train_members(stages: Calibration, job: TrainingJob, resume: bool) -> None:
    """Trains the members that are not done yet, and writes `adapter/` when all are.

    Args:
        stages: The run.
        job: The ensemble's method.
        resume: Go on with the member in progress from its newest checkpoint.
    """
    from components.training.result import EVALUATION, evaluation_settings

    folder, jobs = stages.folder, member_jobs(job)
    for name, of_member in jobs.items():
        if not folder.is_done(f"train/{name}"):
            stages.train_adapter(of_member, f"train/{name}", name, resume)
    logger = stages.logger.child(f"train-{job.method}", {"stage": "train", "method": job.method})
    with folder.stage(f"train/{job.method}") as notes, ending(logger):
        done = [folder.notes(f"train/{name}") for name in jobs]
        notes.update({key: min(int(each[key]) for each in done) for key in ("kept_step", "last_step")})
        save_ensemble(
            job.folder / "adapter",
            [of_member.folder / "adapter" for of_member in jobs.values()],
            method=job.method,
            resolved=job.resolved,
            details={
                **job.details,
                "last_step": notes["last_step"],
                EVALUATION: evaluation_settings(job.config, job.method),
            },
        )
        logger.log_artifact(job.folder / "adapter")


def member_jobs(job: TrainingJob) -> dict[str, TrainingJob]:
    """The members' trainings by name, `<method>/member-<i>`; each has a folder, and a place in shared storage."""
    jobs = {}
    for number in range(job.config.ensemble.members):
        name = member_name(number)
        storage = None if job.storage is None else joined(job.storage, name)
        jobs[f"{job.method}/{name}"] = replace(
            job, folder=job.folder / "members" / name, storage=storage, member=number
        )
    return jobs
