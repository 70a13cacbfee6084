"""The suite file's schema: run files, each with several methods and seeds, as one job that can be broken off."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from components.config import MethodName
from components.config_base import Strict

NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"


class SuiteRun(Strict):
    """A run file of the suite."""

    file: Path
    """Run file; a relative path starts at the suite file's folder."""
    name: str | None = Field(None, pattern=NAME)
    """What it is called in tables and folders: lower-case letters, digits, hyphens, at most 40; null takes the run
    file's `run`. Two entries may name one run file, with other values in `set` and other names."""
    methods: Annotated[list[MethodName], Field(min_length=1)] | None = None
    """Methods of this run file alone; null takes the suite's."""
    set: list[str] = []
    """Keys of this run file to override, each `section.key=value` as on the command line."""


class SuiteConfig(Strict):
    """What a suite file holds."""

    suite: str = Field(pattern=NAME)
    """Name of the suite and of its folder: lower-case letters, digits, hyphens, at most 40 characters."""
    output_dir: Path = Path("outputs")
    """Parent of the suite's folder. Relative paths start at the current folder."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0, 1, 2]
    """Seeds of every run file (3: UQ4CT's number is unknown, BLoB's code has 1 to 3)."""
    methods: Annotated[list[MethodName], Field(min_length=1)] | None = None
    """Methods of every run file; null takes each file's own. `recalibrate` entries of other methods are left out."""
    set: list[str] = []
    """Keys to override in every run file, each `section.key=value` as on the command line."""
    runs: Annotated[list[SuiteRun], Field(min_length=1)]
    """The run files."""

    @model_validator(mode="after")
    def _nothing_twice(self) -> SuiteConfig:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("a seed stands twice in 'seeds'")
        for methods in (self.methods, *(run.methods for run in self.runs)):
            if methods is not None and len(set(methods)) != len(methods):
                raise ValueError("a method stands twice in 'methods'")
        return self

    @property
    def folder(self) -> Path:
        """Where everything of this suite goes."""
        return self.output_dir / self.suite
