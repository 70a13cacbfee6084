"""Loading run files: every error names its place, nothing is guessed, and what is saved loads back equal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.config import RunConfig
from components.errors import RunFileError
from components.run_file import config_hash, git_state, json_schema, load_run_file, save_resolved

MINIMAL = """\
run: demo
data:
  source:
    kind: facts
    domain: geography
"""


@pytest.fixture
def run_file(tmp_path):
    """Writes a run file, by default the smallest valid one, and returns its path."""

    def write(text: str = MINIMAL) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    """The error's lines, with the file's name in the place of its whole path."""
    with pytest.raises(RunFileError) as caught:
        load_run_file(path, overrides)
    return str(caught.value).replace(str(path), path.name).splitlines()


def test_smallest_run_file_gets_the_defaults(run_file):
    config = load_run_file(run_file())
    assert config.run == "demo"
    assert config.training.learning_rate == 5e-4
    assert config == RunConfig(run="demo", data={"source": {"kind": "facts", "domain": "geography"}})


@pytest.mark.parametrize(("written", "value"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("2e3", 2000.0), ("7", 7.0)])
def test_numbers_in_scientific_notation_are_numbers(run_file, written, value):
    """PyYAML, which reads YAML 1.1, makes the text '1e-5' of the first."""
    config = load_run_file(run_file(MINIMAL + f"training: {{learning_rate: {written}}}\n"))
    assert config.training.learning_rate == value
    assert type(config.training.learning_rate) is float


def test_no_is_text_not_false(run_file):
    config = load_run_file(run_file(MINIMAL + "  ood:\n    no: {kind: facts, domain: chemistry}\n"))
    assert list(config.data.ood) == ["no"]


def test_every_problem_is_reported_with_its_line(run_file):
    text = """\
run: Not A Name
seed: true
learning_rate: 1e-5
data:
  source:
    kind: factz
  ood:
    other: {kind: facts}
model:
  adapter:
    target_modules: [q_proj, 3]
methods: [sftt]
resources:
  cpus_per_worker: many
calm: {etta: 1, inner_steps: 0}
training:
"""
    assert sorted(problems(run_file(text))) == sorted(
        [
            "run.yaml:1: run: got 'Not A Name'. Name of the run and of its folder: lower-case letters, digits, "
            "hyphens, at most 47 characters.",
            "run.yaml:2: seed: expected a whole number, got true",
            "run.yaml:3: learning_rate: unknown key, did you mean 'training.learning_rate'?",
            "run.yaml:6: data.source.kind: must be 'facts', 'file', 'hub' or 'mixture', "
            "got 'factz', did you mean 'facts'?",
            "run.yaml:8: data.ood.other: kind 'facts' needs 'domain' (geography or chemistry)",
            "run.yaml:11: model.adapter.target_modules: expected text or a list of texts, got ['q_proj', 3]",
            "run.yaml:12: methods.0: must be " + methods_in_words() + ", got 'sftt', did you mean 'sft'?",
            "run.yaml:14: resources.cpus_per_worker: expected a whole number or null, got 'many'",
            "run.yaml:15: calm.etta: unknown key, did you mean 'eta'?",
            "run.yaml:15: calm.inner_steps: should be greater than or equal to 1, got 0",
            "run.yaml:16: training: expected a section, got null",
        ]
    )


def methods_in_words() -> str:
    """`'base', 'sft' or 'calm'`, whichever methods there are."""
    names = RunConfig.model_json_schema()["properties"]["methods"]["items"]["enum"]
    return ", ".join(repr(name) for name in names[:-1]) + f" or {names[-1]!r}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "seed: 1\nseed: 2\n", "run.yaml:7: this section already has the key"),
        (MINIMAL + "model: [a\nseed: 1\n", "run.yaml:7: not valid YAML"),
        (MINIMAL + "\tseed: 1\n", "run.yaml:6: not valid YAML"),
        (MINIMAL + "---\nseed: 1\n", "run.yaml:6: not valid YAML"),
        (MINIMAL + "seed: !!python/object:os.system x\n", "run.yaml:6: seed: YAML tags"),
        ("- run: demo\n", "run.yaml:1: holds no sections"),
        ("# nothing\n", "run.yaml:1: is empty"),
        ("run: demo\n", "run.yaml:1: data: is required (a section)"),
        (MINIMAL + "recalibrate: {sft: [temperature]}\nmethods: [base]\n", "run.yaml:1: run file: 'recalibrate' names"),
        (
            MINIMAL + "recalibrate: {sft: [temperature, flc_temperature]}\n",
            "run.yaml:1: run file: 'recalibrate' asks for 'flc_temperature' of 'sft', whose model has no routers to "
            "take a confidence from; ask for it of uq4ct or calm_uq4ct, or use 'temperature'",
        ),
        (MINIMAL + "recalibrate: {sfd: [temperature]}\n", "run.yaml:6: recalibrate.sfd: must be"),
        (MINIMAL + "3: x\n", "run.yaml:6: 3:"),
    ],
)
def test_broken_files_name_the_line(run_file, text, expected):
    assert problems(run_file(text))[0].startswith(expected)


@pytest.mark.parametrize("method", ["uq4ct", "calm_uq4ct"])
def test_methods_with_routers_may_be_tempered_by_them(run_file, method):
    text = MINIMAL + f"methods: [{method}]\ncalm: {{stop: {{split: validation}}}}\n"
    config = load_run_file(run_file(text + f"recalibrate: {{{method}: [flc_temperature]}}\n"))
    assert config.recalibrate == {method: ["flc_temperature"]}


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(RunFileError, match="no such run file"):
        load_run_file(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunFileError, match="cannot be read"):
        load_run_file(tmp_path / "binary.yaml")


def test_overrides_are_yaml_scalars_and_lists(run_file):
    config = load_run_file(
        run_file(MINIMAL + "calm: {eta: 0.9}\n"),
        [
            "calm.eta=0.3",
            "methods=[base, sft]",
            "training.learning_rate=1e-5",
            "resources.deepspeed.stage=3",
            "tracking.uri=null",
            "data.prompt.answer_prefix=Answer:",
            'data.prompt.system="1"',
            "data.ood={far: {kind: facts, domain: chemistry}}",
        ],
    )
    assert config.calm.eta == 0.3
    assert config.methods == ["base", "sft"]
    assert config.training.learning_rate == 1e-5
    assert config.resources.deepspeed is not None
    assert config.resources.deepspeed.stage == 3
    assert config.tracking.uri is None
    assert config.data.prompt.answer_prefix == "Answer:"
    assert config.data.prompt.system == "1"
    assert config.data.ood["far"].domain == "chemistry"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("calm.etta=0.3", "override 'calm.etta=0.3': calm.etta: unknown key, did you mean 'eta'?"),
        ("clam.eta=0.3", "override 'clam.eta=0.3': clam: unknown key, did you mean 'calm'?"),
        ("calm.eta=fast", "override 'calm.eta=fast': calm.eta: expected a number, got 'fast'"),
        ("calm.eta", "override 'calm.eta': expected section.key=value"),
        ("calm..eta=1", "override 'calm..eta=1': expected section.key=value"),
        ("calm.eta=", "override 'calm.eta=': calm.eta: has no value; write null, or '\"\"' for no text"),
        ("methods.0=sft", "override 'methods.0=sft': methods is a list; give all of it: methods=[...]"),
        ("run.name=a", "override 'run.name=a': run is not a section"),
        ("methods=[base", "override 'methods=[base': methods: not valid YAML"),
        ("data.source.domain=null", "run.yaml:3: data.source: kind 'facts' needs 'domain'"),
    ],
)
def test_wrong_overrides_are_named(run_file, override, expected):
    (problem,) = problems(run_file(MINIMAL + "methods: [base]\n"), override)
    assert problem.startswith(expected)


def test_an_overridden_line_is_no_longer_blamed(run_file):
    (problem,) = problems(run_file(MINIMAL + "calm: {eta: 0.9}\n"), "calm={eta: -1}")
    assert problem == "override 'calm={eta: -1}': calm.eta: should be greater than 0, got -1"


def test_data_paths_start_at_the_run_file(run_file, tmp_path, monkeypatch):
    """Wherever the command is called from, overridden paths included; the resolved file then works from anywhere."""
    path = run_file(
        "run: demo\ndata:\n  source: {kind: file, path: a.jsonl}\n  test_source: {kind: file, path: ../b.csv}\n"
        "  ood:\n    far: {kind: file, path: /abs/c.parquet}\n    near: {kind: file, path: d.jsonl}\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    data = load_run_file(f"../{path.name}", ["data.ood.near.path=sub/e.jsonl"]).data
    assert data.source.path == tmp_path / "a.jsonl"
    assert data.test_source is not None
    assert data.test_source.path == tmp_path.parent / "b.csv"
    assert data.ood["far"].path == Path("/abs/c.parquet")
    assert data.ood["near"].path == tmp_path / "sub" / "e.jsonl"


AWKWARD = st.one_of(
    st.sampled_from(
        ["1e-5", "no", "null", "~", "", " x ", "a: b", "#c", "- d", "'", '"', "é\n\tz", "2024-01-01", "0x1F"]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Cc"])),
)


@settings(max_examples=40, deadline=None)
@given(system=AWKWARD, rate=st.floats(1e-300, 1e300), seed=st.integers(0, 2**40), names=st.sets(AWKWARD, max_size=3))
def test_resolved_file_loads_back_equal(tmp_path_factory, system, rate, seed, names):
    folder = tmp_path_factory.mktemp("resolved")
    facts = {"kind": "facts", "domain": "chemistry"}
    config = RunConfig.model_validate(
        {
            "run": "demo",
            "seed": seed,
            "data": {"source": facts, "ood": dict.fromkeys(names, facts), "prompt": {"system": system}},
            "training": {"learning_rate": rate},
        }
    )
    save_resolved(config, folder / "config.resolved.yaml")
    loaded = load_run_file(folder / "config.resolved.yaml")
    assert loaded == config
    assert config_hash(loaded) == config_hash(config)
    assert [path.name for path in folder.iterdir()] == ["config.resolved.yaml"]


def test_hash_depends_on_what_decides_results_alone(run_file):
    """A default and the same value written out, as 16 or 16.0, are one configuration."""
    path = run_file()
    plain = config_hash(load_run_file(path))
    assert len(plain) == 64
    same = ["output_dir=/elsewhere", "tracking.uri=http://x", "tracking.enabled=false", "model.adapter.alpha=16.0"]
    same += ["resources.workers=2", "resources.deepspeed={stage: 3}", "evaluation.actors=2"]
    for override in same:
        assert config_hash(load_run_file(path, [override])) == plain, override
    for override in ("seed=1", "run=other", "model.adapter.alpha=16.5", "methods=[sft, base, calm]"):
        assert config_hash(load_run_file(path, [override])) != plain, override
    other = load_run_file(path, ["calm.eta=0.7"])
    assert config_hash(other, without=["calm.eta"]) == config_hash(load_run_file(path), without=["calm.eta"])


def test_schema_describes_every_key():
    schema = json_schema()
    json.dumps(schema)
    assert schema["$defs"]["CalmConfig"]["properties"]["eta"]["description"].startswith("Strength of the descent")
    assert schema["additionalProperties"] is False


def test_git_state_tells_commit_and_dirt(tmp_path):
    assert git_state(tmp_path) == {"commit": None, "dirty": None}

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    tracked = tmp_path / "a.txt"
    tracked.write_text("1")
    git("add", "a.txt")
    git("commit", "-m", "one")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "untracked.txt").write_text("")
    assert git_state(tmp_path)["dirty"] is False
    tracked.write_text("2")
    assert git_state(tmp_path)["dirty"] is True
    inner = tmp_path / "site-packages"
    inner.mkdir()
    assert git_state(inner) == {"commit": None, "dirty": None}, "somebody else's checkout around an installed package"
