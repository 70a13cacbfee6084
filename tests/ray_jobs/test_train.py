"""What the driver does around Ray Train: follows the trace, explains failures, refuses what cannot be had."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from components.config import ResourcesConfig
from components.errors import CaltuneError, UsageError
from ray_jobs.cluster import cpus_per_worker
from ray_jobs.train import TraceFollower, train


class TestTraceFollower:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        return tmp_path / "trace.jsonl"

    @staticmethod
    def append(trace: Path, *steps: int, tail: str = "") -> None:
        with trace.open("a") as file:
            file.write("".join(json.dumps({"step": step}) + "\n" for step in steps) + tail)

    def test_each_row_is_handed_over_once(self, trace):
        rows: list[dict] = []
        follower = TraceFollower(trace, rows.append)
        follower.read()
        self.append(trace, 0, 1)
        follower.read()
        follower.read()
        self.append(trace, 2)
        follower.read()
        assert rows == [{"step": 0}, {"step": 1}, {"step": 2}]

    def test_a_line_is_waited_for_until_it_is_whole(self, trace):
        rows: list[dict] = []
        follower = TraceFollower(trace, rows.append)
        self.append(trace, 0, tail='{"step": ')
        follower.read()
        assert rows == [{"step": 0}]
        self.append(trace, tail="1}\n")
        follower.read()
        assert rows == [{"step": 0}, {"step": 1}]

    def test_a_trace_begun_again_on_resume_repeats_nothing(self, trace):
        rows: list[dict] = []
        follower = TraceFollower(trace, rows.append)
        self.append(trace, 0, 1, 2, 3)
        follower.read()
        again = trace.with_name("again")
        self.append(again, 0, 1, 2)
        os.replace(again, trace)
        follower.read()
        self.append(trace, 3, 4)
        follower.read()
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]


@pytest.mark.distributed
@pytest.mark.timeout(300)
class TestOnRay:
    def test_a_failing_worker_is_explained_in_one_sentence(self, ray_here, make_job, tmp_path):
        job = replace(make_job("failing"), data=tmp_path / "nowhere")
        with pytest.raises(CaltuneError) as failed:
            train(job, resume=False, on_row=lambda row: None)
        log = job.folder / "error.log"
        message = str(failed.value)
        assert message.startswith("training failed on rank 0: ")
        assert "nowhere" in message
        assert "prepare the data again" in message
        assert str(log) in message
        assert "\n" not in message
        assert "Traceback" in log.read_text()
        assert "load_prepared" in log.read_text()
        assert failed.value.exit_code == 1

    def test_more_cores_than_there_are_is_refused_at_once(self, ray_here):
        with pytest.raises(UsageError, match="2 workers of 5000 CPU cores do not fit, Ray has room for 0; lower"):
            cpus_per_worker(ResourcesConfig(workers=2, cpus_per_worker=5000))
        with pytest.raises(UsageError, match="5000 workers of 1 CPU cores"):
            cpus_per_worker(ResourcesConfig(workers=5000))

    def test_gpus_that_are_not_there_are_refused_at_once(self, ray_here):
        import ray

        wanted = int(ray.cluster_resources().get("GPU", 0)) + 1
        if wanted > ray.cluster_resources()["CPU"]:
            pytest.skip("this machine has as many GPUs as cores, so no request is too large for its GPUs alone")
        with pytest.raises(UsageError, match=f"{wanted} workers of 1 CPU cores and a GPU do not fit"):
            cpus_per_worker(ResourcesConfig(workers=wanted, use_gpu=True))

    def test_cores_are_divided_evenly(self, ray_here):
        import ray

        cores = int(ray.cluster_resources()["CPU"])
        assert cpus_per_worker(ResourcesConfig(workers=1)) == cores
        assert cpus_per_worker(ResourcesConfig(workers=1, cpus_per_worker=1)) == 1
        if cores >= 2:
            assert cpus_per_worker(ResourcesConfig(workers=2)) == cores // 2
