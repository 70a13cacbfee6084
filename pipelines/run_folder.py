"""The run folder: who may write into it, which stages are done, and what they were made from."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from components.config import RunConfig
from components.errors import UsageError
from components.files import write_json
from components.run_file import config_hash, git_state, load_run_file, save_resolved
from pipelines.signals import sigterm_interrupts

RUN_FILE, STATE = "config.resolved.yaml", "run.json"
PACKAGES = ("caltune", "torch", "transformers", "peft", "deepspeed", "ray", "mlflow", "datasets")

METHODS_ALONE = ("methods", "recalibrate")
"""Keys that say which methods a run has, and nothing of how any of them is made."""

OnExisting = Literal["refuse", "resume", "overwrite", "extend"]
"""What to do with a folder that has something in it. `extend` goes on with the run and may add methods to it."""


class RunFolder:
    """A run's folder and the state of its stages (`run.json`).

    Use `open_run_folder`; a folder is held by one process at a time.

    Args:
        path: The folder.
        state: Content of `run.json`.
    """

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self.path, self.state = path, state

    def is_done(self, stage: str) -> bool:
        """Whether a stage ended well, now or in the run that is resumed."""
        return bool(self.state["stages"].get(stage, {}).get("state") == "done")

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Runs a stage: marks it as running, then done, failed or interrupted. The dict yielded is kept with it."""
        notes: dict[str, Any] = {}
        self._mark(name, "running", {})
        try:
            yield notes
        except BaseException as problem:
            how = "failed" if isinstance(problem, Exception) else "interrupted"
            with suppress(OSError):  # a full disk; the problem itself is what has to be heard of
                self._mark(name, how, {"reason": str(problem) or type(problem).__name__})
            raise
        self._mark(name, "done", notes)

    def notes(self, stage: str) -> dict[str, Any]:
        """What a stage left with its mark."""
        return dict(self.state["stages"].get(stage, {}))

    def method(self, name: str) -> Path:
        """Folder of one method."""
        return self.path / name

    def _mark(self, stage: str, state: str, notes: dict[str, Any]) -> None:
        self.state["stages"][stage] = {"state": state, "at": _now(), **notes}
        write_json(self.path / STATE, self.state)


@contextmanager
def open_run_folder(config: RunConfig, on_existing: OnExisting) -> Iterator[RunFolder]:
    """Takes hold of the run's folder.

    Args:
        config: The run.
        on_existing: What to do with a folder that has something in it.

    Yields:
        The folder; `config.resolved.yaml` and `run.json` are in it. Within it SIGTERM raises `Interrupted`.

    Raises:
        UsageError: Another process holds the folder; it is not empty and neither resume nor overwrite was asked for;
            what is there is no run; or the run to be resumed was started with other settings.
    """
    path = config.folder
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.parent / f".{path.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{path}: another process is working on this run") from None
    try:
        state = _existing_state(config, path, on_existing) or _new_state(config)
        path.mkdir(exist_ok=True)
        # The state first: a folder without one is taken for somebody else's.
        write_json(path / STATE, state)
        save_resolved(config, path / RUN_FILE)
        with sigterm_interrupts():
            yield RunFolder(path, state)
    finally:
        lock.release()


def _existing_state(config: RunConfig, path: Path, on_existing: OnExisting) -> dict[str, Any] | None:
    if not path.exists() or not any(path.iterdir()):
        return None
    if on_existing == "refuse":
        raise UsageError(f"{path} is not empty: use --resume to go on with this run or --overwrite to start it anew")
    if not (path / STATE).is_file():
        raise UsageError(f"{path} is not a run of caltune (it has no {STATE}); choose another output_dir or run name")
    if on_existing == "overwrite":
        shutil.rmtree(path)
        return None
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    if on_existing == "extend":
        return _extended(state, config, path)
    if state["config_hash"] != config_hash(config):
        raise UsageError(
            f"{path} was started with other settings; resume with {path / RUN_FILE}, or start anew with --overwrite"
        )
    return state


def _extended(state: dict[str, Any], config: RunConfig, path: Path) -> dict[str, Any] | None:
    """The state under a configuration that may have other methods; None where the run had not begun."""
    if not (path / RUN_FILE).is_file():
        return None  # it ended between its state and its run file, which are written one after the other
    refuse_other_settings(config, path)
    return state | {"config_hash": config_hash(config)}


def refuse_other_settings(config: RunConfig, path: Path) -> None:
    """Checks that the run in a folder differs from `config` in its methods at most.

    Raises:
        UsageError: It differs in something else.
    """
    before = load_run_file(path / RUN_FILE)
    if config_hash(before, METHODS_ALONE) != config_hash(config, METHODS_ALONE):
        raise UsageError(
            f"{path} was started with other settings than its methods; compare {path / RUN_FILE}, and delete the "
            "folder or choose another output folder"
        )


def _new_state(config: RunConfig) -> dict[str, Any]:
    return {
        "run": config.run,
        "created": _now(),
        "config_hash": config_hash(config),
        "git": git_state(),
        "versions": {name: _version(name) for name in PACKAGES},
        "stages": {},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
