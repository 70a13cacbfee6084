"""An ensemble's training that is broken off: what is done stays done, and the outcome is the uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from components.data.prepare import prepare
from components.models.adapter_checks import verify_adapter
from components.models.base import resolve_model
from components.tracking.logger import NullLogger
from components.training.job import Process, TrainingJob
from pipelines.ensemble import member_jobs, train_members
from pipelines.run_folder import RunFolder, open_run_folder
from ray_jobs.worker import run_session


class Killed(BaseException):
    """Stands for the process's end."""


class Here:
    """What `train_members` asks of a run, with the training in this process instead of Ray's workers."""

    def __init__(self, folder: RunFolder, kill: tuple[str, int] | None = None) -> None:
        self.folder, self.logger, self.kill = folder, NullLogger(), kill
        self.steps: dict[str, list[int]] = {}

    def train_adapter(self, job: TrainingJob, stage: str, name: str, resume: bool) -> None:
        def report(step: int, values: Mapping[str, float], checkpoint: Path | None) -> None:
            self.steps.setdefault(name, []).append(step)
            if (name, step) == self.kill:
                raise Killed

        with self.folder.stage(stage) as notes:
            run_session(job, Process(), report=report)
            notes.update({"kept_step": 6, "last_step": 6})


def ensemble_job(config: Any, folder: RunFolder) -> TrainingJob:
    data = folder.path / "data"
    if not data.exists():
        prepare(config, data, Path())
    return TrainingJob(config, "ensemble", data, folder.method("ensemble"), resolve_model(config.model))


def test_a_killed_ensemble_loses_at_most_the_member_in_progress(small_run, tmp_path):
    """Killed in the second member after 4 steps: the first is not trained again, the second goes on from step 4."""
    outcomes = {}
    for name, kill in (("whole", None), ("broken", ("ensemble/member-1", 4))):
        config = small_run(tmp_path / name, methods=["ensemble"], recalibrate={}, ensemble={"members": 2})
        with open_run_folder(config, "refuse") as folder:
            job, here = ensemble_job(config, folder), Here(folder, kill)
            if kill is not None:
                with pytest.raises(Killed):
                    train_members(here, job, resume=False)
                assert not (job.folder / "adapter").exists(), "there is no ensemble before all of it is trained"
                here = Here(folder)
                train_members(here, job, resume=True)
                assert here.steps == {"ensemble/member-1": [6]}
            else:
                train_members(here, job, resume=False)
                assert here.steps["ensemble/member-0"] == here.steps["ensemble/member-1"] == [0, 2, 3, 4, 6]
            assert folder.is_done("train/ensemble")
            assert folder.notes("train/ensemble")["kept_step"] == 6
        metadata = verify_adapter(job.folder / "adapter")
        assert (metadata["method"], metadata["steps"], len(metadata["members"])) == ("ensemble", 6, 2)
        outcomes[name] = [
            load_file(job.folder / "adapter" / member / "adapter_model.safetensors") for member in metadata["members"]
        ]
    for whole, broken in zip(*outcomes.values(), strict=True):
        assert all(value.equal(broken[key]) for key, value in whole.items())
    assert not all(value.equal(outcomes["whole"][1][key]) for key, value in outcomes["whole"][0].items())


def test_members_have_folders_storage_and_numbers_of_their_own(small_run, tmp_path):
    config = small_run(tmp_path, methods=["ensemble"], recalibrate={}, ensemble={"members": 3})
    job = TrainingJob(config, "ensemble", tmp_path / "data", tmp_path / "ensemble", None, storage="s3://b/run/ensemble")
    jobs = member_jobs(job)
    assert list(jobs) == ["ensemble/member-0", "ensemble/member-1", "ensemble/member-2"]
    assert [each.member for each in jobs.values()] == [0, 1, 2]
    assert [each.storage for each in jobs.values()] == [f"s3://b/run/ensemble/member-{i}" for i in range(3)]
    assert len({each.folder for each in jobs.values()}) == 3
    assert [each.storage for each in member_jobs(replace(job, storage=None)).values()] == [None] * 3
