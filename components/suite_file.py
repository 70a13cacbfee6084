"""From a suite file to the configurations of its runs, one for each run file and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from components.config import RunConfig
from components.config_suite import SuiteConfig, SuiteRun
from components.errors import RunFileError
from components.run_file import config_of
from components.run_file_errors import boolean_errors, describe_errors
from components.run_file_source import Source, read_source


@dataclass(frozen=True)
class PlannedRun:
    """One run of a suite: a run file with one seed and all of its methods.

    Attributes:
        name: The data set's name in tables; runs of several seeds share it.
        config: Its `run` is `<name>-s<seed>`, its `output_dir` the suite's folder.
    """

    name: str
    config: RunConfig


@dataclass(frozen=True)
class SuitePlan:
    """A suite file with every run file checked.

    Attributes:
        config: The suite file.
        runs: Seed by seed, and for each seed the run files in order, so that a suite that is broken off has whole
            seeds.
    """

    config: SuiteConfig
    runs: tuple[PlannedRun, ...]


def load_suite_file(path: Path, overrides: Sequence[str] = (), output_dir: Path | None = None) -> SuitePlan:
    """Read and check a suite file and every run file in it.

    Args:
        path: YAML 1.2.
        overrides: Each `section.key=value`, for every run file; they win over the suite file's `set`.
        output_dir: Instead of the file's.

    Raises:
        RunFileError: Names every problem at once, one a line, with file, line and field.
    """
    source = read_source(path)
    problems = boolean_errors(SuiteConfig, source)
    try:
        suite = SuiteConfig.model_validate(source.data)
    except ValidationError as error:
        problems += describe_errors(SuiteConfig, source, error.errors())
    if problems:
        raise RunFileError("\n".join(problems))
    if output_dir is not None:
        suite = suite.model_copy(update={"output_dir": output_dir})
    return SuitePlan(suite, _runs(suite, source, overrides))


def _runs(suite: SuiteConfig, source: Source, overrides: Sequence[str]) -> tuple[PlannedRun, ...]:
    """All runs; problems of all run files are told together."""
    planned: list[PlannedRun] = []
    problems: list[str] = []
    named: dict[str, int] = {}
    for index, entry in enumerate(suite.runs):
        file = source.file.parent / entry.file.expanduser()
        try:
            name = entry.name or str(read_source(file).data.get("run"))
            if name in named:
                problems.append(
                    f"{source.where(('runs', index))}: runs.{index}: '{name}' is the name of runs.{named[name]} too; "
                    "give one of them a 'name' of its own"
                )
            named[name] = index
            planned += [
                PlannedRun(name, _config(suite, entry, file, name, seed, [*suite.set, *entry.set, *overrides]))
                for seed in suite.seeds
            ]
        except RunFileError as error:
            problems.append(str(error))
    if problems:
        raise RunFileError("\n".join(problems))
    return tuple(run for seed in suite.seeds for run in planned if run.config.seed == seed)


def _config(
    suite: SuiteConfig, entry: SuiteRun, file: Path, name: str, seed: int, overrides: Sequence[str]
) -> RunConfig:
    source = read_source(file, overrides)
    source.data |= {"run": f"{name}-s{seed}", "seed": seed, "output_dir": str(suite.folder)}
    source.data.pop("tune", None)  # a suite does not search
    methods = entry.methods or suite.methods
    if methods is not None:
        source.data["methods"] = list(methods)
        recalibrate = source.data.get("recalibrate")
        if isinstance(recalibrate, dict):
            source.data["recalibrate"] = {m: kinds for m, kinds in recalibrate.items() if m in methods}
    return config_of(source)
