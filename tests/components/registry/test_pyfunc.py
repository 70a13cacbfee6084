"""An adapter folder as an MLflow model: what the Predictor says, through MLflow's loader, command line and server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlflow.pyfunc
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from components.models.adapter_checks import verify_adapter
from components.models.adapter_extras import add_file
from components.registry import load
from components.registry.candidate import read_candidate
from components.registry.client import Connection
from components.registry.pyfunc import EXAMPLE, add_model_files
from components.registry.registry import Registry

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def servable(tiny_adapter, tmp_path_factory) -> Path:
    """`uq4ct` with a policy, as an MLflow model."""
    folder = shutil.copytree(tiny_adapter("uq4ct"), tmp_path_factory.mktemp("servable") / "model")
    entry = {"source": "flc", "threshold": 0.5}
    content = {"format": 1, "policies": {"half": entry, "never": {**entry, "threshold": None}}, "default": "half"}
    add_file(folder, "abstention.json", lambda path: path.write_text(json.dumps(content)))
    add_model_files(folder, routed=True)
    return folder


def asked(rows: list[dict]) -> list[dict]:
    """Without the label, which the signature does not have."""
    return [{key: row[key] for key in ("id", "question", "choices")} for row in rows]


def test_it_says_what_the_predictor_says(servable, asked_rows):
    found = mlflow.pyfunc.load_model(str(servable)).predict(pd.DataFrame(asked(asked_rows)))
    expected = [p.as_row() for p in load(servable).predict(asked_rows)]
    assert found.to_dict(orient="records") == expected
    assert list(found.columns) == list(expected[0])
    assert [str(kind) for kind in found.dtypes[2:5]] == ["int64", "float64", "float64"]


def test_the_folder_is_an_adapter_folder_still_and_says_what_it_takes(servable):
    assert verify_adapter(servable)["method"] == "uq4ct"
    model = mlflow.pyfunc.load_model(str(servable))
    pinned = (servable / "requirements.txt").read_text().split()
    assert {line.partition("==")[0] for line in pinned} >= {"caltune", "torch", "transformers", "peft"}
    assert all("==" in line and "+" not in line for line in pinned)
    outputs = {column.name: column for column in model.metadata.signature.outputs}
    told = model.predict(model.input_example)
    assert list(told.columns) == list(outputs)
    assert told["id"].tolist() == [row["id"] for row in EXAMPLE]


def test_a_policy_is_named_by_parameter(servable, asked_rows):
    model, table = mlflow.pyfunc.load_model(str(servable)), pd.DataFrame(asked(asked_rows))
    default = model.predict(table)
    assert (default["abstained"] == (default["confidence_flc"] < 0.5)).all()
    assert model.predict(table, params={"policy": "never"})["abstained"].all()
    with pytest.raises(MlflowException, match="no abstention policy 'x'"):
        model.predict(table, params={"policy": "x"})


def test_ids_may_be_missing_and_questions_open_ended(tiny_adapter, tmp_path):
    folder = shutil.copytree(tiny_adapter("calm"), tmp_path / "model")
    add_model_files(folder, routed=False)
    model = mlflow.pyfunc.load_model(str(folder))
    rows = [{"question": "What is tin?", "choices": None}, {"question": "Tin?", "choices": ["yes", "no"]}]
    told = model.predict(pd.DataFrame(rows)).to_dict(orient="records")
    assert [row["id"] for row in told] == ["question-0", "question-1"]
    assert (told[0]["answer_index"], told[0]["confidence_softmax"], told[0]["probabilities"]) == (None, None, None)
    assert 0 < told[0]["confidence_sequence"] <= 1
    assert told[1]["confidence_sequence"] is None
    alone = model.predict(pd.DataFrame([{"question": "What is tin?"}]))
    assert alone["answer"].tolist() == [told[0]["answer"]]


def test_a_bad_question_is_a_bad_request_that_names_it(servable):
    model = mlflow.pyfunc.load_model(str(servable))
    rows = [*asked(EXAMPLE), {"id": "3", "question": "Q", "choices": ["a"]}]
    with pytest.raises(MlflowException, match="questions:3: field 'choices': has 1 choices") as refused:
        model.predict(pd.DataFrame(rows))
    assert refused.value.get_http_status_code() == 400


@pytest.fixture
def registered(make_run, simulate, tmp_path) -> tuple[str, Path]:
    """A registered version `m@challenger`: the server's URI, and the adapter it was registered from."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    connection = Connection(uri)
    with connection.requests() as client:
        experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
        run_id = client.create_run(experiment).info.run_id
    folder = make_run({"calm": {"id": simulate(50)}})
    Registry(connection).register("m", read_candidate(folder, "calm"), run_id)
    return uri, folder / "calm" / "adapter"


def mlflow_command(uri: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {"MLFLOW_TRACKING_URI": uri, "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "mlflow", "models", *arguments, "-m", "models:/m@challenger"]
    return [*command, "--env-manager", "local"], environment


@pytest.mark.slow
def test_mlflow_models_predict_on_a_registered_version(registered, asked_rows, tmp_path):
    uri, adapter = registered
    (tmp_path / "in.json").write_text(json.dumps({"dataframe_records": asked(asked_rows)}))
    command, environment = mlflow_command(uri, "predict", "-i", "in.json", "-o", "out.json", "-t", "json")
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())["predictions"]
    for row, prediction in zip(found, load(adapter).predict(asked_rows), strict=True):
        expected = prediction.as_row()
        assert row.keys() == expected.keys()
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)
        assert (row["answer"], row["answer_index"]) == (expected["answer"], expected["answer_index"])


@pytest.mark.slow
def test_mlflow_models_serve_on_a_registered_version(registered, asked_rows, tmp_path, free_port):
    uri, adapter = registered
    command, environment = mlflow_command(uri, "serve", "-p", str(free_port), "-h", "127.0.0.1")
    address = f"http://127.0.0.1:{free_port}"

    def post(content: object) -> tuple[int, dict]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/invocations", json.dumps(content).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/ping", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        status, told = post({"dataframe_records": asked(asked_rows)})
        expected = [p.as_row() for p in load(adapter).predict(asked_rows)]
        assert status == 200
        for row, wanted in zip(told["predictions"], expected, strict=True):
            assert row["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-5)
            assert row["confidence_softmax"] == pytest.approx(wanted["confidence_softmax"], abs=1e-5)
        status, told = post({"dataframe_records": [{"question": "Q", "choices": ["a"]}]})
        assert (status, "questions:1: field 'choices'" in json.dumps(told)) == (400, True)
    finally:
        server.terminate()
        server.wait(timeout=30)
