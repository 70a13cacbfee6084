"""A pipeline on this machine: the same steps in the same order, each a process of its own, by Kubeflow's runner."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.config import RunConfig
from components.errors import CaltuneError
from components.files import read_json
from pipelines.kubeflow.dags import Which, build
from pipelines.kubeflow.settings import Settings
from pipelines.kubeflow.shipping import OUTCOME
from pipelines.kubeflow.steps import run_name


@dataclass(frozen=True)
class Ended:
    """How a pipeline ended.

    Attributes:
        outcome: `stopped`, `refused`, `registered` or `promoted`.
        reason: Why, in words.
        folder: The run folder.
    """

    outcome: str
    reason: str
    folder: Path


def run_locally(which: Which, config: RunConfig, settings: Settings) -> Ended:
    """Runs a pipeline to its end. What its steps write goes to stderr.

    Args:
        which: The pipeline.
        config: The run; each execution adds a time to its name.
        settings: Where training happens. Image and resources mean nothing here.

    Raises:
        CaltuneError: A step failed.
        UsageError: The run file cannot be run by this pipeline.
    """
    from kfp import local

    job = time.strftime("%d%H%M%S")
    pipeline: Any = build(which, config, replace(settings, job=job))
    folder = config.output_dir.resolve() / run_name(config.run, job)
    artifacts = folder.with_name(f"{folder.name}.artifacts")
    logging.getLogger("kfp").setLevel(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.filterwarnings("ignore", module="kfp")  # that the image is not used here
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(artifacts), raise_on_error=True)
        try:
            pipeline()
        except RuntimeError as problem:
            if not (folder / OUTCOME).is_file():
                raise CaltuneError(f"{problem}; what was done is in {folder}") from None
    found = read_json(folder / OUTCOME, remedy="start the pipeline anew")
    return Ended(found["outcome"], found["reason"], folder)
