"""Following a job whose server breaks off, goes silent or forgets. The server is a fake that misbehaves on demand."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator

import pytest

import ray_jobs.job_follow
from components.errors import JobError
from ray_jobs.job_follow import follow
from ray_jobs.job_server import JobGoneError, ServerUnreachableError
from ray_jobs.job_states import Job

LOG = "".join(f"line {i}\n" for i in range(9))


class FakeServer:
    """A job that ends with `status` once its state was asked for `polls` times; its log breaks off after each piece."""

    def __init__(self, polls: int = 4, status: str = "SUCCEEDED", silent: int = 0, gone: bool = False) -> None:
        self.polls, self.status, self.silent, self.gone = polls, status, silent, gone
        self.asked = self.connections = 0

    def job(self, job_id: str) -> Job:
        self.asked += 1
        if self.gone:
            raise JobGoneError("gone")
        if self.asked <= self.silent:
            raise ServerUnreachableError("connection refused")
        return Job(job_id, self.status if self.asked > self.polls else "RUNNING", {})

    def log(self, job_id: str) -> str:
        return LOG

    async def tail(self, job_id: str) -> AsyncIterator[str]:
        self.connections += 1
        # Each connection gets further, in pieces across lines, none to the end.
        for start in range(0, min(10 * self.connections, len(LOG) - 10), 5):
            yield LOG[start : start + 5]
        if self.connections % 2:
            raise ServerUnreachableError("broken off")

    def command(self, *words: str) -> str:
        return " ".join(["caltune", *words])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ray_jobs.job_follow, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(ray_jobs.job_follow, "RECONNECT_SECONDS", 0.01)
    monkeypatch.setattr(ray_jobs.job_follow, "PATIENCE_SECONDS", 0.3)


def test_a_log_that_breaks_off_is_shown_whole_and_once():
    server, shown, said = FakeServer(polls=5), [], []
    assert follow(server, "j", write=shown.append, say=said.append).status == "SUCCEEDED"
    assert server.connections >= 2
    assert "".join(shown) == LOG
    assert said == []


def test_the_state_decides_not_the_end_of_the_log():
    server = FakeServer(polls=12)
    assert follow(server, "j", write=lambda text: None, say=print).status == "SUCCEEDED"
    assert server.asked == 13


def test_a_short_silence_is_borne():
    said = []
    assert follow(FakeServer(silent=3), "j", write=None, say=said.append).status == "SUCCEEDED"
    assert len(said) == 2
    assert said[1] == "the cluster answers again"


def test_a_long_silence_is_contact_lost():
    with pytest.raises(JobError, match="may still be at work: caltune status j") as lost:
        follow(FakeServer(silent=10**6), "j", write=None, say=lambda text: None)
    assert lost.value.exit_code == 5


def test_a_forgotten_job_is_contact_lost():
    with pytest.raises(JobError, match="no longer knows the job j") as lost:
        follow(FakeServer(gone=True), "j", write=None, say=print)
    assert lost.value.exit_code == 5


def test_time_runs_out():
    with pytest.raises(JobError, match=r"timed out; the job j goes on(.|\n)*caltune stop j") as late:
        follow(FakeServer(polls=10**6), "j", write=None, say=print, timeout=0.1)
    assert late.value.exit_code == 4


def test_ctrl_c_leaves_the_job_alone():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(JobError, match=r"no longer following; the job j goes on(.|\n)*caltune stop j") as broken:
        follow(FakeServer(polls=10**6), "j", write=lambda text: None, say=print)
    assert broken.value.exit_code == 130
