"""A run folder as the registry sees it: what becomes a version, and the results that the gate reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config import RunConfig
from components.config_gate import CHAMPION
from components.config_generation import open_ended_sources
from components.errors import UsageError
from components.evaluation.metrics_file import read_metrics
from components.evaluation.predictions import read_predictions
from components.files import read_json, write_json
from components.registry.gate import Evaluated
from components.run_file import load_run_file

RUN_FILE = "config.resolved.yaml"
CHAMPION_NOTE = "version.json"
_METRICS, _PREDICTIONS = "metrics.json", "predictions.parquet"


@dataclass(frozen=True)
class Candidate:
    """One method of a finished run.

    Attributes:
        folder: The run folder.
        method: The method, `calm` or `sft+temperature`.
        config: The run.
        config_hash: SHA-256 of what decides the results.
        git: Commit and whether the code differed from it.
        data_hashes: Content hash by split.
    """

    folder: Path
    method: str
    config: RunConfig
    config_hash: str
    git: Mapping[str, Any]
    data_hashes: Mapping[str, str]

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.config.run

    @property
    def adapter(self) -> Path:
        """The adapter folder; a recalibrated method's is the one of the method below it."""
        return self.folder / self.method.partition("+")[0] / "adapter"

    @property
    def recalibration(self) -> Path | None:
        """The fitted temperature of a recalibrated method."""
        kind = self.method.partition("+")[2].partition("@")[0]
        return self.folder / self.method / f"{kind}.json" if kind else None

    @property
    def compared(self) -> list[str]:
        """The method and every other one that the gate's rules name, as far as the run has results of it."""
        rules = self.config.gate.rules if self.config.gate is not None else []
        names = dict.fromkeys([self.method, *(rule.reference for rule in rules if rule.reference is not None)])
        return [name for name in names if (self.folder / name / "evaluation").is_dir()]

    def results(self, name: str) -> Evaluated:
        """Results of one of the run's methods on the test splits."""
        return read_results(self.folder / name / "evaluation", name, self.test_splits)

    @property
    def test_splits(self) -> list[str]:
        """Splits that a gate may judge."""
        return ["id", *self.config.data.ood]


def read_candidate(folder: Path, method: str | None = None) -> Candidate:
    """Reads a run folder.

    Args:
        folder: The run folder.
        method: One of the run's methods; by default the one that the run file's gate names.

    Raises:
        UsageError: It is no run folder, it has open-ended rows, no method is named, or the method has no adapter there.
        CaltuneError: A file of it is damaged.
    """
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is not a run folder (it has no {RUN_FILE})")
    config = load_run_file(folder / RUN_FILE)
    if open_ended := open_ended_sources(config):
        raise UsageError(
            f"{folder}: the registry judges answers among options, and {open_ended[0]} has open-ended rows"
        )
    chosen = method or (config.gate.method if config.gate is not None else None)
    if chosen is None:
        raise UsageError(f"name a method of {folder} with --method: its run file has no section 'gate'")
    state = read_json(folder / "run.json", remedy="start the run anew")
    found = Candidate(
        folder,
        chosen,
        config,
        state["config_hash"],
        state["git"],
        state["stages"].get("prepare", {}).get("hashes", {}),
    )
    if not found.adapter.is_dir():
        raise UsageError(f"{found.adapter} does not exist: '{chosen}' has no adapter in this run")
    return found


def read_results(evaluation: Path, name: str, splits: list[str], version: str | None = None) -> Evaluated:
    """Metrics and predictions in `<evaluation>/<split>/`; a split without them is left out, which a gate notices.

    Raises:
        CaltuneError: A file is damaged.
    """
    metrics = {split: read_metrics(path) for split, path in _files(evaluation, splits, _METRICS)}
    predictions = {split: read_predictions(path) for split, path in _files(evaluation, splits, _PREDICTIONS)}
    return Evaluated(name, metrics, predictions, version)


def note_champion(folder: Path, registered_model: str, version: str) -> None:
    """Says in a run folder which version the results under `champion/evaluation` are of.

    With it, a gate compares the candidate with the champion's answers to this run's own test questions, paired, rather
    than with those that the champion was registered with.
    """
    write_json(folder / CHAMPION / CHAMPION_NOTE, {"registered_model": registered_model, "version": version})


def noted_champion(folder: Path, registered_model: str) -> str | None:
    """The version that `note_champion` wrote; None where there is none, or of another model."""
    path = folder / CHAMPION / CHAMPION_NOTE
    if not path.is_file():
        return None
    note = read_json(path, remedy="evaluate the champion again")
    return str(note["version"]) if note.get("registered_model") == registered_model else None


def _files(evaluation: Path, splits: list[str], name: str) -> Iterator[tuple[str, Path]]:
    return ((split, path) for split in splits if (path := evaluation / split / name).is_file())
