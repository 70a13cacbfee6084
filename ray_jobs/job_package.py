"""What travels with a job: our three packages, the run file, and small data files. Measured before it is sent."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from components.config import RunConfig
from components.errors import UsageError
from components.run_file import GIT_RECORD, git_state, to_yaml
from ray_jobs.job_secrets import refuse_secrets
from ray_jobs.shipped_data import MANIFEST, local_files, ship

PACKAGES = ("components", "pipelines", "ray_jobs")
RUN_FILE = "run.yaml"
MIB = 2**20
UPLOAD_LIMIT_MIB, LARGEST_LIMIT_MIB = 100, 400
"""Ours unless told otherwise, and the most that may be asked for: Ray gives up at 500 MiB, after the upload."""
_SKIPPED = ("__pycache__",)
_NAMED_PATHS = 5
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")


@dataclass(frozen=True)
class Package:
    """What is sent.

    Attributes:
        config: The run as the cluster gets it.
        files: Where each file comes from, by its path in the package.
        texts: Content of the files made for this job.
        data: Where shipped data files will lie, by path in the package.
    """

    config: RunConfig
    files: dict[str, Path]
    texts: dict[str, str]
    data: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(path.stat().st_size for path in self.files.values()) + sum(map(len, self.texts.values()))

    def write(self, folder: Path) -> None:
        """Lays it out in an empty folder, Ray's `working_dir`."""
        for name, origin in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, target)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def make_package(config: RunConfig, *, data_on_cluster: bool, limit_mib: int = UPLOAD_LIMIT_MIB) -> Package:
    """Collects what a job needs.

    Args:
        config: The run, with all overrides.
        data_on_cluster: Leave data paths as they are; otherwise the files are sent.
        limit_mib: The most to send.

    Raises:
        UsageError: A path cannot work on a cluster, there is a secret in the run file, or it is too much.
    """
    _check_paths(config)
    files = code_files()
    if not data_on_cluster:
        check_size(files | {str(path): path for path in local_files(config)}, limit_mib)
        config, origins, targets = ship(config)
    else:
        check_size(files, limit_mib)
        origins, targets = {}, {}
    run_file = to_yaml(config)
    refuse_secrets("the run file", run_file)
    texts = {RUN_FILE: run_file, GIT_RECORD: json.dumps(git_state())}
    if targets:
        texts[MANIFEST] = json.dumps(targets)
    return Package(config, files | origins, texts, targets)


def check_size(files: dict[str, Path], limit_mib: int) -> None:
    """Refuses what is too large to send, before any of it is.

    Args:
        files: Origin by name.
        limit_mib: At most `LARGEST_LIMIT_MIB`.

    Raises:
        UsageError: Names the largest files.
    """
    if not 0 < limit_mib <= LARGEST_LIMIT_MIB:
        raise UsageError(f"--upload-limit {limit_mib}: choose 1 to {LARGEST_LIMIT_MIB} MiB")
    sizes = {path: path.stat().st_size for path in files.values()}
    total = sum(sizes.values())
    if total <= limit_mib * MIB:
        return
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_NAMED_PATHS]
    listed = "\n".join(f"  {size / MIB:8.1f} MiB  {path}" for path, size in largest)
    raise UsageError(
        f"{total / MIB:.1f} MiB to send, the limit is {limit_mib} MiB (--upload-limit); the largest files are\n"
        f"{listed}\n"
        "put large data where the cluster can read it, name that path in the run file and say --data-on-cluster"
    )


def code_files() -> dict[str, Path]:
    """Every file of our packages, by its path in the package."""
    found = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"the package '{package}' is not installed; install caltune again")
        root = Path(spec.submodule_search_locations[0])
        for path in sorted(root.rglob("*")):
            parts = path.relative_to(root).parts
            if path.is_file() and not any(part in _SKIPPED or part.startswith(".") for part in parts):
                found["/".join((package, *parts))] = path
    return found


def _check_paths(config: RunConfig) -> None:
    if not config.output_dir.is_absolute() and not _URL.match(str(config.output_dir)):
        raise UsageError(
            f"output_dir is '{config.output_dir}', which a job would write into its temporary folder and lose; name a "
            "folder that every node of the cluster sees, e.g. --set output_dir=/shared/outputs"
        )
    name = config.model.name
    if not Path(name).is_absolute() and (name.startswith((".", "~")) or Path(name).is_dir()):
        raise UsageError(
            f"model.name is '{name}', a folder beside you; models do not travel with a job: "
            "name one of the hub, or a folder on the cluster by its absolute path"
        )
