"""Starting a copy of a suspended RayJob, against a small API server that keeps RayJobs in a dictionary."""

from __future__ import annotations

import json
import threading
import urllib.parse
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from components.errors import JobError, UsageError
from pipelines import k8s_launch
from pipelines.k8s_api import ApiSilentError, RayJobs

NOW = datetime(2027, 1, 4, 3, 0, tzinfo=UTC)
PREFIX = "/apis/ray.io/v1/namespaces/caltune/rayjobs"


class ApiServer(ThreadingHTTPServer):
    """RayJobs by name; `statuses` are handed out one after the other for each job that was created."""

    def __init__(self, template):
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs = {template["metadata"]["name"]: template}
        self.statuses = []
        self.failures = []
        self.asked = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = urllib.parse.urlsplit(self.path)
        name = path.path.removeprefix(PREFIX).strip("/")
        if not name:
            key, value = urllib.parse.parse_qs(path.query)["labelSelector"][0].split("=")
            found = [j for j in self.server.jobs.values() if j["metadata"].get("labels", {}).get(key) == value]
            return self.answer(200, {"items": found})
        if name not in self.server.jobs:
            return self.answer(404, {"message": f'rayjobs.ray.io "{name}" not found'})
        job = self.server.jobs[name]
        if not job["spec"].get("suspend") and self.server.statuses:
            job["status"] = self.server.statuses.pop(0)
        return self.answer(200, job)

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.jobs[job["metadata"]["name"]] = job
        self.answer(201, job)

    def answer(self, code, content):
        self.server.asked.append((self.command, self.path, self.headers["Authorization"]))
        if self.server.failures:
            code, content = self.server.failures.pop(0)
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def template():
    return {
        "metadata": {
            "name": "weekly",
            "namespace": "caltune",
            "labels": {"caltune.io/run": "weekly"},
            "annotations": {"caltune.io/queue-name": "research"},
        },
        "spec": {
            "suspend": True,
            "entrypoint": "caltune run --config /etc/caltune/run.yaml --resume --set run=weekly",
            "metadata": {"caltune_run": "weekly", "caltune_folder": "/data/outputs/weekly"},
        },
    }


@pytest.fixture
def server(template, monkeypatch):
    monkeypatch.setattr(k8s_launch, "POLL_SECONDS", 0.01)
    found = ApiServer(template)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def jobs(server, tmp_path):
    (tmp_path / "token").write_text("first\n")
    return RayJobs(f"http://127.0.0.1:{server.server_port}", "caltune", tmp_path)


def test_a_copy_has_a_name_a_run_and_a_queue_of_its_own(template):
    owner = {"CALTUNE_OWNER_NAME": "weekly-29", "CALTUNE_OWNER_UID": "6d2f", "OTHER": "x"}
    made = k8s_launch.copy_of(template, NOW, owner)
    assert made["metadata"] == {
        "name": "weekly-20270104-0300",
        "namespace": "caltune",
        "labels": {"caltune.io/run": "weekly", "kueue.x-k8s.io/queue-name": "research"},
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "weekly-29", "uid": "6d2f"}],
    }
    assert made["spec"]["suspend"] is False
    assert made["spec"]["entrypoint"].endswith(" --set run=weekly-20270104-0300")
    assert made["spec"]["metadata"]["caltune_run"] == "weekly-20270104-0300"
    assert made["spec"]["metadata"]["caltune_folder"] == "/data/outputs/weekly-20270104-0300"
    assert template["spec"]["suspend"] is True, "the template stays as it is"
    assert "ownerReferences" not in k8s_launch.copy_of(template, NOW, {})["metadata"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("suspend", False, "is no template: it runs itself"),
        ("entrypoint", "caltune run --config a.yaml", "does not say --set run=weekly"),
        ("entrypoint", "caltune run --config a.yaml --set run=weekly-2", "does not say --set run=weekly"),
    ],
)
def test_what_is_no_template_is_refused(path, value, said, template):
    template["spec"][path] = value
    with pytest.raises(UsageError, match=said):
        k8s_launch.copy_of(template, NOW, {})


def test_a_name_that_would_be_too_long_is_refused(template):
    """34 characters and the 14 of a date are one more than 47."""
    template["metadata"]["name"] = "w" * 33
    template["spec"]["entrypoint"] = f"caltune run --set run={'w' * 33}"
    assert len(k8s_launch.copy_of(template, NOW, {})["metadata"]["name"]) == 47
    template["metadata"]["name"] = "w" * 34
    with pytest.raises(UsageError, match="48 characters"):
        k8s_launch.copy_of(template, NOW, {})


def test_it_starts_one_and_follows_it_to_its_end(server, jobs, capsys):
    server.statuses = [
        {},
        {"jobDeploymentStatus": "Initializing"},
        {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"},
        {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"},
        {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"},
    ]
    name = k8s_launch.launch(jobs, "weekly", {})
    assert k8s_launch.follow(jobs, name) == 0
    said = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["Initializing", "Running RUNNING", "Complete SUCCEEDED"]
    posts = [path for method, path, _ in server.asked if method == "POST"]
    assert posts == [f"{PREFIX}?fieldValidation=Strict"]


def test_none_is_started_while_another_is_at_work(server, jobs):
    first = k8s_launch.launch(jobs, "weekly", {})
    server.jobs[first]["metadata"]["name"] = "weekly-earlier"
    for status in ({}, {"jobDeploymentStatus": "Running"}, {"jobDeploymentStatus": "Suspended"}):
        server.jobs[first]["status"] = status
        with pytest.raises(UsageError, match="not started: RayJob weekly-earlier is still at work"):
            k8s_launch.launch(jobs, "weekly", {})
    server.jobs[first]["status"] = {"jobDeploymentStatus": "Failed"}
    k8s_launch.launch(jobs, "weekly", {})


def test_the_token_is_read_anew(server, jobs):
    jobs.get("weekly")
    (jobs.account / "token").write_text("second\n")
    jobs.get("weekly")
    assert [token for _, _, token in server.asked] == ["Bearer first", "Bearer second"]


def test_a_silent_api_server_is_asked_again(server, jobs, monkeypatch):
    name = k8s_launch.launch(jobs, "weekly", {})
    server.failures = [(503, {}), (429, {})]
    server.statuses = [{"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}] * 3
    assert k8s_launch.follow(jobs, name) == 0
    monkeypatch.setattr(k8s_launch, "PATIENCE_SECONDS", 0.05)
    server.failures = [(503, {})] * 1000
    with pytest.raises(JobError, match="no contact with the API server") as lost:
        k8s_launch.follow(jobs, name)
    assert lost.value.exit_code == 5


def test_a_refusal_is_final(server, jobs):
    server.failures = [(403, {"message": "rayjobs.ray.io is forbidden"})]
    with pytest.raises(JobError, match=r"the API server refuses: .* is forbidden"):
        k8s_launch.launch(jobs, "weekly", {})
    with pytest.raises(JobError, match='"gone" not found'):
        k8s_launch.follow(jobs, "gone")


def test_nobody_answers(tmp_path):
    (tmp_path / "token").write_text("x")
    with pytest.raises(ApiSilentError):
        RayJobs("http://127.0.0.1:9", "caltune", tmp_path).get("weekly")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, 0),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, 130),
        ({"jobDeploymentStatus": "Complete"}, 1),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed"}, 1),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "failed with exit code 3, logs"}, 3),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "failed with exit code 137"}, 1),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": "DeadlineExceeded"}, 4),
        ({"jobDeploymentStatus": "ValidationFailed", "message": "name too long"}, 2),
    ],
)
def test_only_success_is_success(status, code):
    assert k8s_launch.exit_code(status) == code


def test_outside_a_pod_it_says_so(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="works in a pod only"):
        RayJobs.here()
