"""`caltune plan` as a user meets it, on a model that is nothing but a `config.json`."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from components.config import RunConfig
from components.errors import UsageError
from components.planning.run_plan import Machine, Plan, as_dict, make_plan, rows_of
from components.run_file import load_run_file, to_yaml
from pipelines.cli import app
from pipelines.plan_tables import print_plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "plan.md"
EXAMPLE = ROOT / "tests" / "components" / "planning" / "llama-3.1-8b" / "run.yaml"

SmallRun = Callable[..., RunConfig]


@pytest.fixture
def described(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model's `config.json`, alone in a folder."""
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_model_folder / "config.json").read_text())
    return folder


@pytest.fixture
def invoke(small_run: SmallRun, described: Path, tmp_path: Path) -> Callable[..., Result]:
    """Runs the command on a run file with the tiny model's description."""

    def call(*arguments: str, **sections: Any) -> Result:
        config = small_run(tmp_path, model={"name": str(described)}, **sections)
        path = tmp_path / "run.yaml"
        path.write_text(to_yaml(config))
        return CliRunner().invoke(app, ["plan", "--config", str(path), *arguments])

    return call


def as_text(plan: Plan) -> str:
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=80, highlight=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_json_holds_every_layout_of_every_trained_method(invoke: Callable[..., Result]) -> None:
    result = invoke("--json", "--max-gpus", "8", methods=["base", "sft", "calm"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert list(plan["methods"]) == ["sft", "calm"]
    layouts = plan["methods"]["calm"]["layouts"]
    assert {(x["gpus"], x["stage"], x["gradient_checkpointing"]) for x in layouts} == {
        (gpus, stage, again) for gpus in (1, 2, 4) for stage in (None, 0, 1, 2, 3) for again in (False, True)
    }  # a batch of 4 cannot be divided among 8
    assert all(x["total"] == pytest.approx(sum(x["parts"].values())) for x in layouts)
    assert plan["cheapest_for_all"] == {"gpus": 1, "stage": None, "gradient_checkpointing": False}
    flops = plan["methods"]["calm"]["flops_per_step"]["without gradient checkpointing"]
    assert flops > 2 * plan["methods"]["sft"]["flops_per_step"]["without gradient checkpointing"]


def test_tables_fit_80_columns_and_say_what_was_left_out(invoke: Callable[..., Result]) -> None:
    result = invoke("--max-gpus", "8", methods=["sft"], recalibrate={})
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if re.match(r"\s*\d+ +(none|[0-3]) ", line)]
    assert len(table) == 15
    assert max(map(len, table)) <= 80
    assert "cheapest: 1 GPU, plain PyTorch" in result.stdout
    assert "left out: 8 GPUs, among which training.batch_size 4 cannot be divided" in result.stdout
    assert "assumed: rows of 512 tokens, 4 options of 8 tokens" in result.stdout


def test_says_why_nothing_fits(small_run: SmallRun, described: Path, tmp_path: Path) -> None:
    config = small_run(tmp_path, methods=["calm"], recalibrate={}, model={"name": str(described)})
    plan = make_plan(config, Machine(0.001, 4, 100.0), rows_of(config, None, None, 4), lambda _: None)
    assert as_dict(plan)["cheapest_for_all"] is None
    assert re.search(r"nothing fits; .*, the nearest, lacks [\d.]+ GiB in the phase", as_text(plan))


def test_more_memory_needs_no_more_gpus(small_run: SmallRun, described: Path, tmp_path: Path) -> None:
    config = small_run(tmp_path, methods=["sft"], recalibrate={}, model={"name": str(described)})
    rows = rows_of(config, None, None, 4)

    def fewest(gib: float) -> int:
        found = as_dict(make_plan(config, Machine(gib, 4, 100.0), rows, lambda _: None))["cheapest_for_all"]
        return 99 if found is None else found["gpus"]

    counts = [fewest(gib) for gib in (0.001, 0.006, 0.008, 0.012, 0.1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 99
    assert counts[-1] == 1


@pytest.mark.parametrize(
    ("arguments", "sections", "message"),
    [
        (["--tokens", "20"], {}, "does not hold a prompt"),
        (["--gpu-memory", "0"], {}, "must be above 0"),
        ([], {"methods": ["base"]}, "none of the methods base trains anything"),
    ],
)
def test_what_cannot_be_planned_is_bad_usage(
    invoke: Callable[..., Result], arguments: list[str], sections: dict[str, Any], message: str
) -> None:
    result = invoke(*arguments, **({"methods": ["sft"]} | sections | {"recalibrate": {}}))
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_rows_follow_the_way_of_scoring(small_run: SmallRun, tmp_path: Path) -> None:
    config = small_run(tmp_path)
    by_text = rows_of(config, None, None, 4)
    assert (by_text.tokens, by_text.answer_tokens) == (config.data.max_length, 8)
    data = config.data.model_dump(mode="json")
    data["prompt"] |= {"scoring": "letter", "template": "{question}\n{options}"}
    assert rows_of(small_run(tmp_path, data=data), 100, None, 5).answer_tokens == 1


def test_the_documented_table_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/plan.md shows the 8B model with CALM at T = 5 on 1 to 8 GPUs of 80 GiB; its model is found from the root."""
    monkeypatch.chdir(ROOT)
    config = load_run_file(EXAMPLE)
    assert config.calm.inner_steps == 5
    plan = make_plan(config, Machine(80.0, 8, 150.0), rows_of(config, None, None, 4), lambda _: None)
    assert as_text(plan).strip() in DOCS.read_text()


def test_several_adapters_take_their_time_and_blob_its_own_layout(invoke: Callable[..., Result]) -> None:
    """Three members take three times the steps of one; blob's second step goes past DeepSpeed, so it has no stages."""
    methods = ["sft", "mc_dropout", "ensemble", "blob"]
    result = invoke("--json", "--max-gpus", "1", methods=methods, recalibrate={}, ensemble={"members": 3})
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["methods"]
    hours = {name: plans[name]["gpu_hours"]["without gradient checkpointing"] for name in methods}
    assert hours["ensemble"] == pytest.approx(3 * hours["sft"])
    assert hours["mc_dropout"] == pytest.approx(hours["sft"])
    assert hours["sft"] < hours["blob"] < 1.5 * hours["sft"], "one more product of low rank"
    assert {layout["stage"] for layout in plans["blob"]["layouts"]} == {None}
    assert {layout["stage"] for layout in plans["ensemble"]["layouts"]} == {None, 0, 1, 2, 3}
    # A and its standard deviations beside B: between once and twice as many.
    assert plans["sft"]["sizes"]["theta_count"] < plans["blob"]["sizes"]["theta_count"]
