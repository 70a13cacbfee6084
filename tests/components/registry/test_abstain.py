"""`caltune abstain`: the policy in the adapter folder, what it achieves on every split, and what cannot be chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from components.evaluation.predictions import read_predictions
from components.evaluation.selective import naive_threshold, threshold_for_coverage, threshold_for_risk
from components.models.adapter_checks import verify_adapter
from components.models.adapter_extras import add_file, fingerprint
from pipelines.cli import app

SPLITS = ("validation", "id", "ood")


@pytest.fixture
def run(make_run, simulate) -> Path:
    """A run whose method `calm` knows less out of domain than in it; `sft` has no adapter folder here."""
    found = {split: simulate(200, seed=i, wrong=0.4 * (split == "ood"), flc=0.6) for i, split in enumerate(SPLITS)}
    return make_run({"calm": found, "sft": {"id": found["id"]}})


@pytest.fixture
def abstain(run: Path) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["abstain", str(run), *arguments], env={"COLUMNS": "80"})
        return result.exit_code, result.stdout, str(result.exception)

    return call


def policies(run: Path) -> dict:
    return json.loads((run / "calm" / "adapter" / "abstention.json").read_text())


def test_a_policy_is_kept_with_the_adapter(run, abstain) -> None:
    code, output, _ = abstain("--method", "calm", "--risk", "0.2", "--json")
    assert code == 0
    found = read_predictions(run / "calm" / "evaluation" / "validation" / "predictions.parquet")
    expected = threshold_for_risk(found.confidence(), found.correct, 0.2, 0.1)
    kept = policies(run)
    own = kept["policies"]["risk_0.2"]
    assert (kept["format"], kept["default"]) == (1, "risk_0.2")
    assert own["threshold"] == expected
    assert expected is not None
    assert (own["source"], own["delta"], own["n"], own["fitted_on"]) == ("softmax", 0.1, 200, "validation")
    assert own["target"] == {"kind": "risk", "value": 0.2}
    assert "abstention.json" in verify_adapter(run / "calm" / "adapter")["files"]
    result = json.loads(output)
    assert list(result["splits"]) == list(SPLITS)
    for split, figures in result["splits"].items():
        of_split = read_predictions(run / "calm" / "evaluation" / split / "predictions.parquet")
        answered = of_split.confidence() >= expected
        assert figures["chosen"]["coverage"] == answered.mean()
        assert figures["chosen"]["risk"] == pytest.approx(1 - of_split.correct[answered].mean())
        naive = of_split.confidence() >= naive_threshold(found.confidence(), found.correct, 0.2)
        assert figures["naive"]["risk"] == pytest.approx(1 - of_split.correct[naive].mean())
        assert figures["naive"]["coverage"] == naive.mean() > figures["chosen"]["coverage"]
    beside = run / "calm" / "abstention"
    assert json.loads((beside / "risk_0.2.json").read_text()) == result
    assert (beside / "risk_0.2.png").read_bytes().startswith(b"\x89PNG")


def test_several_policies_the_last_is_the_default(run, abstain) -> None:
    assert abstain("--method", "calm", "--risk", "0.3", "--delta", "0.05")[0] == 0
    assert abstain("--method", "calm", "--coverage", "0.7", "--source", "flc")[0] == 0
    assert abstain("--method", "calm", "--coverage", "0.9", "--name", "mine", "--fitted-on", "id")[0] == 0
    kept = policies(run)
    assert list(kept["policies"]) == ["risk_0.3", "coverage_0.7_flc", "mine"]
    assert kept["default"] == "mine"
    assert kept["policies"]["risk_0.3"]["delta"] == 0.05
    assert kept["policies"]["coverage_0.7_flc"]["delta"] is None
    found = read_predictions(run / "calm" / "evaluation" / "id" / "predictions.parquet")
    assert kept["policies"]["mine"]["threshold"] == threshold_for_coverage(found.confidence(), 0.9)


def test_a_policy_leaves_the_adapter_what_it_is(run, abstain) -> None:
    """An evaluation goes by the fingerprint: with a policy it must stay the same, with another file it must not."""
    folder = run / "calm" / "adapter"
    before = fingerprint(folder)
    abstain("--method", "calm", "--risk", "0.3")
    abstain("--method", "calm", "--risk", "0.2")
    assert fingerprint(folder) == before
    add_file(folder, "posterior.json", lambda path: path.write_text("{}"))
    assert fingerprint(folder) != before


def test_nothing_can_be_guaranteed(run, abstain) -> None:
    code, output, _ = abstain("--method", "calm", "--risk", "0.001")
    assert code == 0
    assert policies(run)["policies"]["risk_0.001"]["threshold"] is None
    words = " ".join(output.split())
    assert "never answer" in words
    assert "no threshold could be shown" in words


def test_the_table_says_what_is_guaranteed_and_where(run, abstain) -> None:
    output = abstain("--method", "calm", "--risk", "0.3")[1]
    words = " ".join(output.split())
    assert "with probability 90% over the draw" in words
    assert "out of domain above all, nothing is guaranteed" in words
    assert "…" not in output, "it fits 80 columns"
    assert [line.split()[0] for line in output.splitlines() if line.startswith(SPLITS, 1)] == list(SPLITS)


def test_damaged_policies_are_not_overwritten(run, abstain) -> None:
    abstain("--method", "calm", "--risk", "0.3")
    path = run / "calm" / "adapter" / "abstention.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    code, _, problem = abstain("--method", "calm", "--risk", "0.2")
    assert code != 0
    assert "format 1" in problem


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--method", "calm"], "either --risk or --coverage"),
        (["--method", "calm", "--risk", "0.1", "--coverage", "0.8"], "either --risk or --coverage"),
        (["--method", "calm", "--coverage", "0.8", "--delta", "0.1"], "--delta belongs to --risk"),
        (["--method", "calm", "--risk", "1.5"], "risk is 1.5"),
        (["--method", "calm", "--coverage", "0"], "coverage is 0"),
        (["--method", "calm", "--risk", "0.1", "--source", "sequence"], "no confidence source 'sequence'"),
        (["--method", "calm", "--risk", "0.1", "--fitted-on", "train"], "evaluated splits: id, ood, validation"),
        (["--method", "sft", "--risk", "0.1"], "'sft' has no adapter folder to keep a policy in; there is: calm"),
    ],
)
def test_what_cannot_be_chosen(run, abstain, arguments: Sequence[str], reason: str) -> None:
    code, _, problem = abstain(*arguments)
    assert code != 0
    assert reason in problem
    assert not (run / "calm" / "adapter" / "abstention.json").exists()


def test_a_folder_that_is_no_run(tmp_path) -> None:
    result = CliRunner().invoke(app, ["abstain", str(tmp_path), "--method", "calm", "--risk", "0.1"])
    assert "is not a run folder" in str(result.exception)


def test_out_of_domain_the_target_is_missed_and_shown(run, abstain) -> None:
    """40 % of the scores are turned upside down there: the table must show it, whatever was guaranteed in domain."""
    result = json.loads(abstain("--method", "calm", "--risk", "0.2", "--json")[1])
    figures = {split: found["chosen"] for split, found in result["splits"].items()}
    assert figures["ood"]["risk_low"] > 0.2
    assert figures["id"]["risk_low"] < 0.2
    assert np.isfinite([figures[split]["risk_high"] for split in SPLITS]).all()
