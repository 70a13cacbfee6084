"""Suite files: which runs they ask for, and what is said of a bad one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from components.errors import RunFileError
from components.suite_file import load_suite_file

RUN = """\
run: {name}
methods: [base, sft, calm]
recalibrate: {{base: [temperature], sft: [temperature]}}
data:
  source: {{kind: facts, domain: geography}}
tune: {{method: calm, space: {{calm.eta: {{uniform: [0.1, 1.0]}}}}}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a suite file beside the run files a.yaml and b.yaml."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(RUN.format(name=f"run-{name}"))

    def put(text: str) -> Path:
        (tmp_path / "suite.yaml").write_text(text)
        return tmp_path / "suite.yaml"

    return put


def test_every_run_file_has_a_run_for_every_seed(write, tmp_path):
    plan = load_suite_file(
        write("suite: s\nseeds: [3, 1]\nruns: [{file: a.yaml}, {file: b.yaml, name: other}]"), [], tmp_path / "out"
    )
    assert [(run.name, run.config.run, run.config.seed) for run in plan.runs] == [
        ("run-a", "run-a-s3", 3),
        ("other", "other-s3", 3),
        ("run-a", "run-a-s1", 1),
        ("other", "other-s1", 1),
    ]
    assert {run.config.folder.parent for run in plan.runs} == {tmp_path / "out" / "s"}
    assert plan.runs[0].config.methods == ["base", "sft", "calm"]
    assert plan.runs[0].config.tune is None


def test_methods_of_the_entry_win_over_the_suites_and_take_their_recalibrations_along(write):
    plan = load_suite_file(
        write("suite: s\nseeds: [0]\nmethods: [base]\nruns: [{file: a.yaml}, {file: b.yaml, methods: [sft, uq4ct]}]")
    )
    first, second = (run.config for run in plan.runs)
    assert (first.methods, first.recalibrate) == (["base"], {"base": ["temperature"]})
    assert (second.methods, second.recalibrate) == (["sft", "uq4ct"], {"sft": ["temperature"]})


def test_overrides_win_from_the_outside_in(write):
    path = write(
        "suite: s\nseeds: [0]\nset: [training.steps=5, training.batch_size=8, calm.eta=2]\n"
        "runs: [{file: a.yaml, set: [training.steps=6, training.batch_size=4]}]"
    )
    config = load_suite_file(path, ["training.steps=7"]).runs[0].config
    assert (config.training.steps, config.training.batch_size, config.calm.eta) == (7, 4, 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("suite: s\nruns: []", "runs"),
        ("suite: S\nruns: [{file: a.yaml}]", "suite.yaml:1: suite"),
        ("suite: s\nrnus: [{file: a.yaml}]", "did you mean 'runs'"),
        ("suite: s\nseeds: [1, 1]\nruns: [{file: a.yaml}]", "a seed stands twice"),
        ("suite: s\nmethods: [base, base]\nruns: [{file: a.yaml}]", "a method stands twice"),
        ("suite: s\nmethods: [magic]\nruns: [{file: a.yaml}]", "suite.yaml:2: methods.0: must be"),
        ("suite: s\nruns: [{file: a.yaml}, {file: a.yaml}]", "'run-a' is the name of runs.0 too"),
        ("suite: s\nruns: [{file: gone.yaml}]", "gone.yaml: no such run file"),
        ("suite: s\nset: [calm.etta=1]\nruns: [{file: a.yaml}]", "calm.etta: unknown key, did you mean 'eta'"),
    ],
)
def test_what_is_wrong_is_said(write, text, said):
    with pytest.raises(RunFileError) as problem:
        load_suite_file(write(text))
    assert said in str(problem.value)


def test_problems_of_all_run_files_are_told_together(write):
    path = write("suite: s\nruns: [{file: gone.yaml}, {file: a.yaml, set: [seeds=1]}]")
    with pytest.raises(RunFileError) as problem:
        load_suite_file(path)
    assert "gone.yaml" in str(problem.value)
    assert "seeds" in str(problem.value)
