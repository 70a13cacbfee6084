"""The command line: exit codes, what goes to stdout and stderr, and that commands agree with one another."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from components.run_file import json_schema, load_run_file
from pipelines import cli

HEAVY = ("torch", "ray", "transformers", "peft", "deepspeed", "mlflow", "datasets", "numpy", "pandas", "matplotlib")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def caltune(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Calls the command in this process; what is written to the file descriptors themselves is caught too."""

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["caltune", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        return Outcome(ended.value.code, captured.out, captured.err)

    yield call
    logging.getLogger("components").setLevel(logging.NOTSET)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("run: mine\ndata:\n  source: {kind: facts, domain: geography}\n")
    return path


class TestUsage:
    def test_version(self, caltune):
        assert caltune("--version") == Outcome(0, importlib.metadata.version("caltune") + "\n", "")

    @pytest.mark.parametrize(
        "arguments", [["fly"], ["run"], ["run", "--config"], ["run", "--speed", "3"], ["compare"], ["sync"]]
    )
    def test_a_wrong_command_line_is_2(self, caltune, arguments):
        found = caltune(*arguments)
        assert (found.code, found.out) == (2, "")
        assert "Error: " in found.err

    def test_an_unknown_key_names_file_line_and_what_was_meant(self, caltune, run_file):
        run_file.write_text(run_file.read_text() + "calm:\n  etta: 0.3\n")
        found = caltune("run", "--config", run_file)
        assert (found.code, found.out) == (2, "")
        assert f"{run_file}:5: calm.etta: unknown key, did you mean 'eta'?" in found.err

    def test_a_wrong_override_is_named(self, caltune, run_file):
        found = caltune("validate", "--config", run_file, "--set", "training.steps=many")
        assert found.code == 2
        assert "override 'training.steps=many': training.steps: expected a whole number" in found.err

    def test_a_missing_run_file_is_2(self, caltune, tmp_path):
        found = caltune("train", "--config", tmp_path / "none.yaml")
        assert found.code == 2
        assert "none.yaml" in found.err

    def test_resume_and_overwrite_exclude_each_other(self, caltune, run_file):
        found = caltune("run", "--config", run_file, "--resume", "--overwrite")
        assert found.code == 2
        assert "exclude each other" in found.err

    def test_nothing_to_train_is_2(self, caltune, run_file):
        found = caltune("train", "--config", run_file, "--set", 'methods=["base"]')
        assert found.code == 2
        assert "nothing to train" in found.err

    def test_failed_work_is_1_in_one_sentence(self, caltune, run_file, tmp_path):
        found = caltune(
            "evaluate", "--config", run_file, "--quiet",
            "--set", f"model.name={tmp_path / 'nowhere'}",
            "--set", f"output_dir={tmp_path / 'outputs'}",
            "--set", "tracking.enabled=false",
        )  # fmt: skip
        assert (found.code, found.out) == (1, "")
        assert found.err.startswith("caltune: model.name ")
        assert found.err.count("\n") == 1

    def test_diverged_work_is_1_in_one_sentence(self, caltune, run_file, monkeypatch):
        def diverge(*arguments: object, **options: object) -> None:
            raise FloatingPointError("the model scored 3 of 9 questions as NaN")

        monkeypatch.setattr("pipelines.run.evaluate_only", diverge)
        found = caltune("evaluate", "--config", run_file)
        assert found == Outcome(1, "", "caltune: the model scored 3 of 9 questions as NaN\n")

    def test_an_interruption_is_130(self, caltune, run_file, monkeypatch):
        def interrupt(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("pipelines.run.train_only", interrupt)
        found = caltune("train", "--config", run_file)
        assert found == Outcome(130, "", "caltune: interrupted; go on with --resume\n")

    @pytest.mark.parametrize("arguments", [[], ["--help"], ["validate", "--schema"]])
    def test_nothing_heavy_is_imported_to_help(self, arguments):
        code = (
            "import sys\n"
            "from pipelines import cli\n"
            f"sys.argv[1:] = {arguments}\n"
            "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
            f"print(*(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"
        )
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert found.stderr.splitlines()[-1] == ""


class TestValidate:
    def test_schema_is_valid_and_describes_every_key(self, caltune):
        found = caltune("validate", "--schema")
        schema = json.loads(found.out)
        assert (found.code, found.err, schema) == (0, "", json_schema())
        jsonschema.Draft202012Validator.check_schema(schema)
        sections = {"RunConfig": schema} | schema["$defs"]
        silent = [
            f"{section}.{key}"
            for section, of in sections.items()
            for key, entry in of.get("properties", {}).items()
            if "description" not in entry and "$ref" not in json.dumps(entry)
        ]
        assert silent == []
        assert [section for section, of in sections.items() if "description" not in of] == []

    def test_the_schema_judges_as_the_loader_does(self, run_file):
        good = {"run": "mine", "data": {"source": {"kind": "facts", "domain": "geography"}}}
        validator = jsonschema.Draft202012Validator(json_schema())
        assert validator.is_valid(good)
        assert not validator.is_valid(good | {"sed": 1})
        assert not validator.is_valid(good | {"calm": {"eta": 0}})

    def test_what_is_printed_can_be_loaded(self, caltune, run_file, tmp_path):
        found = caltune("validate", "--config", run_file, "--set", "calm.eta=1e-1")
        assert (found.code, found.err) == (0, "")
        printed = tmp_path / "printed.yaml"
        printed.write_text(found.out)
        assert load_run_file(printed) == load_run_file(run_file, ["calm.eta=0.1"])
        assert load_run_file(printed).calm.eta == 0.1

    def test_nothing_to_validate_is_2(self, caltune):
        assert caltune("validate").code == 2


class TestDoctor:
    def test_findings_are_json_and_decide_the_exit_code(self, caltune, run_file):
        found = caltune("doctor", "--config", run_file, "--json")
        findings = json.loads(found.out)
        assert all(finding.keys() == {"what", "found", "ok"} for finding in findings)
        assert {"python", "torch", "memory and disk", "Ray", "run file", "tracking", "resources"} <= {
            finding["what"] for finding in findings
        }
        assert found.code == (0 if all(finding["ok"] for finding in findings) else 1)

    def test_what_stands_in_the_way_is_said_and_is_1(self, caltune, run_file):
        run_file.write_text(run_file.read_text() + "training: {batch_size: 5000}\nresources: {workers: 5000}\n")
        found = caltune("doctor", "--config", run_file)
        assert found.code == 1
        assert "FIX  resources: 5000 workers, 5000 CPU cores at least" in found.out


class TestWithoutARun:
    def test_sync(self, caltune, tmp_path):
        found = caltune("sync", tmp_path)
        assert (found.code, found.out) == (2, "")
        assert f"no tracked run in {tmp_path}" in found.err

    def test_compare(self, caltune, tmp_path):
        found = caltune("compare", tmp_path)
        assert (found.code, found.out) == (2, "")
        assert "is not a run folder" in found.err


@pytest.mark.distributed
@pytest.mark.timeout(900)
class TestOnAFinishedRun:
    def test_results_go_to_stdout_and_progress_to_stderr(self, finished):
        out, err = finished.output.stdout, finished.output.stderr
        for method in finished.summary["methods"]:
            assert method in out
        assert "data: train 48, calibration 16" in err
        assert "train calm: 6/6 in " in err
        assert f"report: {finished.folder / 'report' / 'index.html'}" in err.replace("\n", "")
        assert "MLflow: mlflow server --backend-store-uri sqlite:///" in err

    def test_others_chatter_reaches_nobody(self, finished):
        ours = ("data: ", "INFO components.models.base: base model ", "evaluate ", "train ", "report: ", "MLflow: ")
        strangers = [line for line in finished.output.stderr.splitlines() if not line.startswith(ours)]
        assert [line for line in strangers if not line.startswith("/")] == []  # a long path may stand on its own line
        for word in ("WARNING", "DeepSpeed", "Setting accelerator", "FutureWarning", "alembic", "it/s"):
            assert word not in finished.output.stdout + finished.output.stderr

    def test_json_on_stdout_is_pure(self, caltune, finished):
        found = caltune("run", "--config", finished.run_file, "--resume", "--json")
        assert (found.code, found.err) == (0, "")
        assert json.loads(found.out) == finished.summary

    def test_a_folder_in_use_is_2(self, caltune, finished):
        found = caltune("run", "--config", finished.run_file)
        assert found.code == 2
        assert "--resume" in found.err
        assert "--overwrite" in found.err

    def test_evaluate_of_the_adapter_gives_the_runs_figures(self, caltune, finished, tmp_path):
        arguments = [
            "evaluate", "--config", finished.run_file, "--json", "--adapter", finished.folder / "calm" / "adapter",
            "--set", f"output_dir={tmp_path}", "--set", "tracking.enabled=false",
        ]  # fmt: skip
        found = caltune(*arguments)
        assert (found.code, found.err) == (0, "")
        assert json.loads(found.out)["methods"] == {"calm": finished.summary["methods"]["calm"]}

        assert caltune(*arguments, "--resume").code == 0
        other = tmp_path / "other"
        shutil.copytree(finished.folder / "calm" / "adapter", other)
        metadata = json.loads((other / "caltune.json").read_text())
        (other / "caltune.json").write_text(json.dumps(metadata | {"details": {"seed": 9}}))
        arguments[arguments.index("--adapter") + 1] = other
        refused = caltune(*arguments, "--resume")
        assert refused.code == 2
        assert "another adapter" in refused.err

    def test_compare_sets_the_methods_side_by_side(self, caltune, finished):
        found = caltune("compare", finished.folder, "--json")
        assert (found.code, found.err) == (0, "")
        assert json.loads(found.out)["methods"] == finished.summary["methods"]
        table = caltune("compare", finished.folder)
        assert table.code == 0
        assert "calm" in table.out

    def test_sync_finds_everything_delivered(self, caltune, finished):
        found = caltune("sync", finished.folder, "--json")
        assert (found.code, found.err) == (0, "")
        report = json.loads(found.out)[str(finished.folder)]
        assert (report["missing"], report["refused"]) == ([], [])
        assert report["before"] > 20
