"""Runs small enough for tests: the real pipeline, Ray and MLflow on a tiny random model and built-in facts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from components.config import RunConfig
from components.run_file import to_yaml

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


@dataclass(frozen=True)
class Finished:
    """A run that went to its end through the command line.

    Attributes:
        config: Its configuration.
        run_file: The file it was started with.
        output: What the command wrote, standard output and error.
    """

    config: RunConfig
    run_file: Path
    output: subprocess.CompletedProcess[str]
    folder: Path = field(init=False)
    summary: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.config.folder)
        summary = json.loads((self.folder / "report" / "summary.json").read_text())
        object.__setattr__(self, "summary", summary)


@pytest.fixture(scope="session")
def small_run(tiny_model_folder: Path) -> Callable[..., RunConfig]:
    """Builds a run's configuration; keyword arguments replace whole sections."""

    def build(output_dir: Path, **sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "run": "small",
            "output_dir": str(output_dir),
            "methods": ["base", "sft", "calm"],
            "recalibrate": {"base": ["temperature"], "sft": ["temperature"]},
            "model": {"name": str(tiny_model_folder), "adapter": {"r": 4, "alpha": 8}},
            "data": {
                "source": {"kind": "facts", "domain": "geography"},
                "splits": {"train": 48, "calibration": 16, "validation": 16, "test": 24},
                "heldout_groups": ["currency"],
                "ood": {"ood": {"kind": "facts", "domain": "chemistry"}},
                "prompt": {"style": "plain", "template": "Question: {question}\nAnswer:", "delimiter": " "},
            },
            "training": {"steps": 6, "batch_size": 4, "evaluate_every": 3, "checkpoint_every": 2},
            "calm": {"inner_steps": 2, "stop": {"rule": "keep_best", "split": "both"}},
            "evaluation": {"bootstrap": 100},
        }
        return RunConfig.model_validate(tree | sections)

    return build


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `caltune` as leader of a process group of its own, writing `<name>.out` and `.err` into a folder."""
    begun: list[subprocess.Popen[str]] = []

    def begin(
        folder: Path, *arguments: str | Path, name: str = "caltune", env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
                cwd=ROOT,
                env={key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "RAY_"))}
                # At Ray's 15 a test's workers wait for whatever else is going on; and Ray must not end them because
                # something else takes the memory.
                | {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
                | (env or {}),
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    small_run: Callable[..., RunConfig],
    start: Callable[..., subprocess.Popen[str]],
) -> Finished:
    """One run to the end, looked at by many tests; they leave its folder as it is."""
    folder = tmp_path_factory.mktemp("finished")
    config, run_file = small_run(folder / "outputs"), folder / "small.yaml"
    run_file.write_text(to_yaml(config))
    process = start(folder, "run", "--config", run_file)
    code = process.wait(TIMEOUT_S)
    out, err = (folder / "caltune.out").read_text(), (folder / "caltune.err").read_text()
    assert code == 0, err
    return Finished(config, run_file, subprocess.CompletedProcess(process.args, code, out, err))
