"""A predictor gives the numbers of the evaluation, from wherever its adapter comes, and refuses by name of the row."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.config import RunConfig
from components.data.prepare import PreparedData
from components.data.rows import Place, to_questions
from components.data.schema import QuestionSet
from components.errors import DataError, ModelError, RegistryError, UsageError
from components.evaluation.predictions import write_predictions
from components.models.adapter_extras import add_file
from components.models.base import resolve_model
from components.registry import load
from components.registry.abstention_policy import AbstentionPolicy, read_policies
from components.registry.client import Connection
from components.registry.prediction import Prediction, Refusal
from components.registry.registry import Registry

ADAPTERS = ("calm", "uq4ct")
QUICKSTART = Path(os.environ.get("CALTUNE_QUICKSTART", Path(__file__).parents[3] / "outputs" / "quickstart"))
"""The folder that `make run` leaves."""


def policies(**thresholds):
    entries = {
        name: {"source": source, "threshold": threshold, "target": {"kind": "risk", "value": 0.1}, "delta": 0.05}
        for name, (source, threshold) in thresholds.items()
    }
    return {"format": 1, "policies": entries, "default": next(iter(entries), None)}


def with_policies(folder: Path, target: Path, **thresholds) -> Path:
    shutil.copytree(folder, target)
    add_file(target, "abstention.json", lambda path: path.write_text(json.dumps(policies(**thresholds))))
    return target


def evaluation(adapter: Path, rows: list[dict], folder: Path) -> dict[str, dict]:
    """What `caltune evaluate` leaves of these rows: `predictions.parquet`, by id."""
    from ray_jobs.evaluate import EvaluationJob, evaluate

    own = json.loads((adapter / "caltune.json").read_text())
    kept = own["details"]["evaluation"]
    config = RunConfig.model_validate(
        {
            "run": "a",
            "seed": own["details"]["seed"],
            "model": {"name": own["base_model"]["public_id"]},
            "data": {
                "source": {"kind": "facts", "domain": "geography"},
                "prompt": own["prompt"],
                "max_length": kept["max_length"],
            },
            "evaluation": {"batch_tokens": kept["batch_tokens"]},
            "mc_dropout": kept.get("mc_dropout", {}),
        }
    )
    questions = to_questions([(Place("rows", i + 1), row) for i, row in enumerate(rows)], None, "rows")
    data = PreparedData({"id": QuestionSet("id", questions)}, (), {})
    job = EvaluationJob(config, data, resolve_model(config.model), adapter, ["id"])
    write_predictions(folder / "predictions.parquet", evaluate(job, lambda amount: None)["id"])  # type: ignore[arg-type]
    return {row["id"]: row for row in pq.read_table(folder / "predictions.parquet").to_pylist()}


def difference(found: list[Prediction], table: dict[str, dict]) -> float:
    """The largest difference of any probability or confidence, once answers and columns are the same."""
    largest = 0.0
    for prediction in found:
        row, told = table[prediction.id], prediction.as_row()
        assert prediction.answer_index == row["answer"]
        columns = {name for name in row if name.startswith("confidence_")}
        assert {name for name in told if name.startswith("confidence_")} == columns
        assert len(told["probabilities"]) == len(row["probabilities"])
        differences = np.abs(np.subtract(told["probabilities"], row["probabilities"]))
        largest = max(largest, *differences, *(abs(told[name] - row[name]) for name in columns))
    return float(largest)


@pytest.mark.parametrize("method", [*ADAPTERS, "mc_dropout"])
def test_a_predictor_gives_the_evaluations_numbers(method, tiny_adapter, asked_rows, tmp_path):
    """Its prompt, limits and passes come from the folder alone."""
    table = evaluation(tiny_adapter(method), asked_rows, tmp_path)
    found = load(tiny_adapter(method)).predict(asked_rows)
    assert [p.id for p in found] == [row["id"] for row in asked_rows]
    assert [p.answer for p in found] == [row["choices"][table[row["id"]]["answer"]] for row in asked_rows]
    assert difference(found, table) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("method", ADAPTERS)
def test_a_real_adapter_gives_its_evaluations_numbers(method, smollm2_folder):
    """On 200 questions of a test split of 300: batches differ, so equal up to rounding."""
    folder = QUICKSTART / method
    if not (folder / "adapter").is_dir():
        pytest.skip(f"{folder} has no adapter: make run trains it, CALTUNE_QUICKSTART names another folder")
    rows = [json.loads(line) for line in (QUICKSTART / "data" / "id.jsonl").read_text().splitlines()][:200]
    table = {row["id"]: row for row in pq.read_table(folder / "evaluation/id/predictions.parquet").to_pylist()}
    assert difference(load(folder / "adapter").predict(rows), table) < 1e-5


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_company_that_a_question_keeps_does_not_change_its_numbers(method, tiny_adapter, asked_rows):
    predictor = load(tiny_adapter(method))
    alone = [predictor.predict([row])[0].as_row() for row in asked_rows[:6]]
    table = {row["id"]: {**row, "answer": row["answer_index"]} for row in alone}
    assert difference(predictor.predict(asked_rows)[:6], table) < 1e-5


def test_a_recalibrated_version_answers_recalibrated(tiny_adapter, asked_rows, tmp_path):
    """Softmax at temperature 2 is p^(1/2), normalised."""
    plain = load(tiny_adapter("uq4ct")).predict(asked_rows)
    folder = shutil.copytree(tiny_adapter("uq4ct"), tmp_path / "version")
    fitted = {"value": 2.0, "nll_before": 1.0, "nll_after": 0.9, "n": 9, "iterations": 3, "converged": True}
    (folder / "temperature.json").write_text(json.dumps(fitted))
    for before, after in zip(plain, load(folder).predict(asked_rows), strict=True):
        roots = np.sqrt(before.probabilities)
        np.testing.assert_allclose(after.probabilities, roots / roots.sum(), atol=1e-7)
        assert set(after.confidence) == {"softmax"}


def test_abstention_by_the_folders_policies_or_an_own_one(tiny_adapter, asked_rows, tmp_path):
    plain = load(tiny_adapter("uq4ct")).predict(asked_rows)
    assert {p.abstained for p in plain} == {None}
    middle = {source: sorted(p.confidence[source] for p in plain)[20] for source in ("softmax", "flc")}
    chosen = {"low": ("softmax", middle["softmax"]), "routers": ("flc", middle["flc"]), "never": ("softmax", None)}
    predictor = load(with_policies(tiny_adapter("uq4ct"), tmp_path / "a", **chosen))
    for name, (source, threshold) in (chosen | {"never": ("softmax", 2.0)}).items():
        found = predictor.predict(asked_rows, name)
        assert [p.abstained for p in found] == [p.confidence[source] < threshold for p in found]
    assert predictor.predict(asked_rows) == predictor.predict(asked_rows, "low"), "the default one"
    assert len({p.abstained for p in predictor.predict(asked_rows)}) == 2
    assert all(p.abstained for p in predictor.predict(asked_rows, AbstentionPolicy("softmax", 1.01)))
    with pytest.raises(UsageError, match=r"no abstention policy 'other'; there is: low, never, routers"):
        predictor.predict(asked_rows, "other")
    with pytest.raises(UsageError, match="confidence 'flc', which is not stated"):
        load(tiny_adapter("calm")).predict(asked_rows, AbstentionPolicy("flc", 0.5))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"format": 2}, "format 2"),
        ({"format": 1, "policies": {}, "default": "a"}, "'default' is 'a'"),
        ({"format": 1, "policies": {"a": {"source": "softmax"}}, "default": "a"}, "policy 'a' lacks"),
        ({**policies(a=("softmax", "high"))}, "'threshold' is 'high'"),
    ],
)
def test_damaged_policies_are_refused(content, problem, tmp_path):
    (tmp_path / "abstention.json").write_text(json.dumps(content))
    with pytest.raises(Exception, match=problem):
        read_policies(tmp_path)


LONG = {"question": "word " * 300, "choices": ["a", "b"]}
BAD = [
    ("text", "is str, not an object"),
    ({"choices": ["a", "b"]}, "field 'question'"),
    ({"question": "Q", "choices": ["a"]}, "field 'choices': has 1 choices"),
    ({"question": "Q", "choices": "ab"}, "field 'choices': is text, not a list"),
    ({"question": "Q", "choices": ["a", 3]}, r"choices\[1\]"),
    ({"question": " ", "choices": ["a", "b"]}, "is empty"),
    ({"id": 0.5, "question": "Q", "choices": ["a", "b"]}, "field 'id'"),
    (LONG, r"field 'question': is \d+ tokens long with its longest choice \(at most 200 are possible\)"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_question_is_named_and_spoils_no_other(bad, reason, tiny_adapter, asked_rows):
    predictor = load(tiny_adapter("calm"))
    rows = [asked_rows[0], bad, asked_rows[1]]
    with pytest.raises(DataError, match=rf"questions:2: .*{reason}"):
        predictor.predict(rows)
    first, refused, last = predictor.predict_each(rows)
    assert isinstance(refused, Refusal)
    assert refused.reason.startswith("questions:2:")
    assert [first, last] == predictor.predict([rows[0], rows[2]])


def test_a_question_that_scores_nan_spoils_no_other(tiny_adapter, asked_rows):
    predictor = load(tiny_adapter("calm"))
    model = predictor._scorer.model.model.get_base_model()
    tokenizer = predictor._encoder.tokenizer
    unseen = tokenizer("#", add_special_tokens=False).input_ids[0]
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.masked_fill((inputs[0] == unseen)[..., None], float("nan"))
    )
    rows = [*asked_rows[:3], {"question": "Is # here?", "choices": ["yes", "no"]}]
    found = predictor.predict_each(rows)
    assert [isinstance(one, Refusal) for one in found] == [False, False, False, True]
    assert "NaN" in found[3].reason
    with pytest.raises(FloatingPointError):
        predictor.predict(rows)


def test_ids_may_be_missing_or_repeated(tiny_adapter, asked_rows):
    rows = [{k: v for k, v in asked_rows[i].items() if k != "id"} for i in range(2)] + [asked_rows[0]] * 2
    found = load(tiny_adapter("calm")).predict(rows)
    assert [p.id for p in found] == ["question-0", "question-1", "q0", "q0"]
    assert load(tiny_adapter("calm")).predict([]) == []


def test_open_ended_questions_are_answered_greedily(tiny_adapter, asked_rows):
    rows = [{"question": "What is iron?"}, asked_rows[0], {"question": "And tin?", "choices": None}]
    found = load(tiny_adapter("uq4ct")).predict(rows)
    for one in (found[0], found[2]):
        row = one.as_row()
        assert "answer_index" not in row
        assert 0 < row["confidence_sequence_sum"] <= row["confidence_sequence"] <= 1
        assert 0 <= row["confidence_flc"] <= 1
    assert found[1] == load(tiny_adapter("uq4ct")).predict([asked_rows[0]])[0]
    with pytest.raises(DataError, match="'mc_dropout' averages over options; give the question choices"):
        load(tiny_adapter("mc_dropout")).predict(rows)


def test_from_a_registered_version_and_a_runs_artifact(tiny_adapter, asked_rows, tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    connection = Connection(uri)
    with connection.requests() as client:
        experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
        run = client.create_run(experiment).info
        client.log_artifacts(run.run_id, str(tiny_adapter("calm")), "model")
        client.create_registered_model("m")
        made = client.create_model_version("m", f"{run.artifact_uri}/model", run_id=run.run_id)
        client.set_registered_model_alias("m", "champion", made.version)
    assert Registry(connection).champion("m") is not None
    expected = load(tiny_adapter("calm")).predict(asked_rows)
    assert load("models:/m@champion", tracking_uri=uri).predict(asked_rows) == expected
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_URI"):
        load("models:/m/1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name in ("models:/m/1", f"runs:/{run.run_id}/model"):
        assert load(name).predict(asked_rows[:3]) == load(tiny_adapter("calm")).predict(asked_rows[:3])
    for name, error, words in (
        ("models:/m@other", RegistryError, "alias 'other'"),
        ("models:/m/Production", UsageError, "names no model"),
        ("models:/m/7", RegistryError, "tracking server"),
        (f"runs:/{run.run_id}/nothing", RegistryError, "nothing"),
    ):
        with pytest.raises(error, match=words):
            load(name)


def test_what_is_no_model(tiny_adapter, tmp_path):
    with pytest.raises(ModelError, match="is not a folder; name a folder, runs:/"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match="not a complete adapter folder"):
        load(tmp_path)
    with pytest.raises(UsageError, match="max_length is 4000, but the model has 256 positions"):
        load(tiny_adapter("calm"), max_length=4000)
    moved = shutil.copytree(tiny_adapter("calm"), tmp_path / "moved")
    content = json.loads((moved / "caltune.json").read_text())
    base, content["base_model"]["public_id"] = content["base_model"]["public_id"], str(tmp_path / "gone")
    (moved / "caltune.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"its base model: .*gone.*base_model names another place"):
        load(moved)
    assert load(moved, base_model=base).method == "calm"
