"""What is sent to a cluster, and what is refused before: too much, secrets, paths that cannot work there."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from components.config import RunConfig
from components.errors import UsageError
from components.run_file import config_hash, git_state, load_run_file
from pipelines.jobs import submit as submit_command
from ray_jobs.job_package import MIB, RUN_FILE, UPLOAD_LIMIT_MIB, check_size, make_package
from ray_jobs.job_secrets import RESERVED, is_secret, job_environment, refuse_secrets
from ray_jobs.job_server import check_version
from ray_jobs.shipped_data import put_in_place
from ray_jobs.submit import make_request

ROW = '{"id": "a", "question": "?", "choices": ["x", "y"], "answer": 0}\n'
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path):
    """A run whose data lie in `here/`; keyword arguments replace sections."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "rows.jsonl").write_text(ROW)
    (here / "ood.jsonl").write_text(ROW * 2)

    def build(**sections: object) -> RunConfig:
        tree = {
            "run": "small",
            "output_dir": str(tmp_path / "shared"),
            "data": {
                "source": {"kind": "file", "path": str(here / "rows.jsonl")},
                "ood": {"far": {"kind": "file", "path": str(here / "ood.jsonl")}},
            },
        }
        return RunConfig.model_validate(tree | sections)

    return build


def test_only_the_three_packages_the_run_file_and_its_data_travel(run):
    package = make_package(run(), data_on_cluster=False)
    tops = {name.split("/")[0] for name in [*package.files, *package.texts]}
    assert tops == {"components", "pipelines", "ray_jobs", "data", RUN_FILE, "git_state.json", "shipped.json"}
    assert "pipelines/cli.py" in package.files
    assert "components/evaluation/templates/report.html.j2" in package.files
    assert [name for name in package.files if "__pycache__" in name or "/." in name] == []
    assert package.size < 5 * MIB


def test_data_arrive_where_the_sent_run_file_looks_for_them(run, tmp_path):
    package = make_package(run(), data_on_cluster=False)
    folder = tmp_path / "working_dir"
    package.write(folder)
    put_in_place(folder)
    put_in_place(folder)  # a second job finds them there
    sent = load_run_file(folder / RUN_FILE)
    assert sent == package.config
    assert Path(sent.data.source.path).read_text() == ROW
    assert Path(sent.data.ood["far"].path).read_text() == ROW * 2
    assert Path(sent.data.source.path).is_relative_to(tmp_path / "shared"), "stays when the job's folder is gone"
    assert not Path(sent.data.source.path).is_relative_to(folder)


def test_the_same_run_sent_again_has_the_same_hash_and_other_data_another(run, tmp_path):
    """Else `--resume` on a new cluster would be refused."""
    first = make_package(run(), data_on_cluster=False).config
    assert config_hash(make_package(run(), data_on_cluster=False).config) == config_hash(first)
    (tmp_path / "here" / "rows.jsonl").write_text(ROW * 3)
    assert config_hash(make_package(run(), data_on_cluster=False).config) != config_hash(first)


def test_data_on_the_cluster_are_left_alone(run):
    config = run(data={"source": {"kind": "file", "path": "/on/the/cluster.parquet"}})
    package = make_package(config, data_on_cluster=True)
    assert (package.config, package.data) == (config, {})
    assert "shipped_data" not in make_request("run", config, data_on_cluster=True).entrypoint
    with pytest.raises(UsageError, match=r"/on/the/cluster.parquet: no such data file here.*--data-on-cluster"):
        make_package(config, data_on_cluster=False)


def test_too_much_is_refused_naming_the_largest(run, tmp_path):
    large = tmp_path / "here" / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(101 * MIB)  # sparse; it is never read
    config = run(data={"source": {"kind": "file", "path": str(large)}})
    with pytest.raises(UsageError, match="the limit is 100 MiB") as refusal:
        make_package(config, data_on_cluster=False)
    assert f"101.0 MiB  {large}" in str(refusal.value).splitlines()[1]
    make_package(config, data_on_cluster=True)
    with pytest.raises(UsageError, match="choose 1 to 400 MiB"):
        check_size({}, 500)


def test_the_limit_in_the_help_is_the_limit():
    assert inspect.signature(submit_command).parameters["upload_limit"].default == UPLOAD_LIMIT_MIB


def test_a_relative_output_folder_would_be_lost(run):
    with pytest.raises(UsageError, match="--set output_dir=/shared/outputs"):
        make_package(run(output_dir="outputs"), data_on_cluster=False)


def test_a_model_beside_the_command_is_not_sent(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for name in ("tiny", "./elsewhere", "~/model"):
        with pytest.raises(UsageError, match=r"model.name is .* by its absolute path"):
            make_package(run(model={"name": name}), data_on_cluster=False)


def test_the_request_names_what_made_it(run):
    request = make_request("train", run(), ["--method", "sft", "--resume"], env=["A=b c"])
    assert request.entrypoint == (
        "python -m ray_jobs.shipped_data && exec python -m pipelines.cli train --config run.yaml --method sft --resume"
    )
    git = git_state(ROOT)
    assert request.tags["caltune_config_hash"] == config_hash(request.package.config)
    assert request.tags["git_commit"] == (git["commit"] or "unknown")
    assert json.loads(request.package.texts["git_state.json"]) == git
    assert request.environment["A"] == "b c"
    assert all(isinstance(value, str) for value in request.tags.values())
    assert request.job_id != make_request("train", run()).job_id


def test_the_commit_is_known_where_the_code_was_sent(run, tmp_path):
    folder = tmp_path / "working_dir"
    make_package(run(), data_on_cluster=True).write(folder)
    assert git_state(folder) == git_state(ROOT)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "RAY_AUTH_TOKEN",
        "OPENAI_API_KEY",
        "DB_PWD",
        "github_pat",
    ],
)
def test_secret_names_are_refused(name):
    assert is_secret(name)
    for text in (name, f"{name}=x"):
        with pytest.raises(UsageError, match=f"--env {name} looks like a secret"):
            job_environment([text], {name: "x"})


@pytest.mark.parametrize(
    "name", ["MAX_TOKENS", "HF_HOME", "MLFLOW_TRACKING_URI", "AWS_REGION", "KEYBOARD", "COMPASS", "PWD"]
)
def test_other_names_are_not(name):
    assert job_environment([name], {name: "x"})[name] == "x"


def test_secret_values_are_refused_and_not_repeated(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("OWN_PASSWORD", "short")  # would be found in ordinary text
    for text in ("NAME=hf_abcdefgh", "NAME=x:hf_abcdefgh"):
        with pytest.raises(UsageError, match="value of HF_TOKEN") as refusal:
            job_environment([text])
        assert "hf_abcdefgh" not in str(refusal.value)
    job_environment(["NAME=short"])
    with pytest.raises(UsageError, match="the run file contains the value of HF_TOKEN"):
        make_package(run(tracking={"experiment": "hf_abcdefgh"}), data_on_cluster=False)
    with pytest.raises(UsageError, match="the run file has a password in a URL"):
        make_package(run(tracking={"uri": "http://me:word@mlflow:5000"}), data_on_cluster=False)
    with pytest.raises(UsageError, match="the command contains the value of HF_TOKEN"):
        make_request("evaluate", run(), ["--adapter", "/a/hf_abcdefgh"])
    refuse_secrets("text", "http://mlflow:5000/path postgresql://db/x s3://bucket/a:b@c")


def test_what_is_set_here_does_not_travel(run, monkeypatch):
    names = ("HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY")
    for name in names:
        monkeypatch.setenv(name, f"secret-of-{name}")
    request = make_request("run", run())
    sent = " ".join([request.entrypoint, str(request.environment), str(request.tags), *request.package.texts.values()])
    assert "secret-of" not in sent


def test_the_job_sets_no_variable_that_its_workers_get(monkeypatch):
    """Ray refuses `ray.init` in a job when both environments have a name (E27)."""
    import torch

    from ray_jobs.worker import quiet_environment

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = set(quiet_environment())
    assert names <= RESERVED
    assert names.isdisjoint(job_environment([]))
    for name in names:
        with pytest.raises(UsageError, match="the job sets it itself"):
            job_environment([f"{name}=x"])


@pytest.mark.parametrize("text", ["", "=x", "A B=x", "NOT_SET_ANYWHERE"])
def test_variables_have_a_name_and_a_value(text):
    with pytest.raises(UsageError, match="--env"):
        job_environment([text], {})


def test_another_ray_is_refused():
    check_version("2.60.0")
    check_version("2.61.1", ">=2.60,<3")
    for server in ("2.9.3", "3.0.0"):
        with pytest.raises(UsageError, match=rf"the cluster runs Ray {server}, this caltune needs ray.*2\.60"):
            check_version(server)
