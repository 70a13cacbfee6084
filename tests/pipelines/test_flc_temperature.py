"""Stages `evaluate` and `recalibrate` of a method with routers: which splits are scored, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from components.config import MixLoraConfig
from components.data.prompts import PromptEncoder
from components.evaluation.predictions import read_predictions
from components.models.adapter import adapter_state, attach_adapter
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.base import load_model, load_tokenizer
from components.models.score_questions import score_questions
from components.models.scoring import ScoringModel
from components.posthoc.flc_temperature import FlcTemperature
from components.tracking.logger import NullLogger
from pipelines.calibrate import Calibration
from pipelines.compare import compare_runs
from pipelines.progress import Reporter
from pipelines.run import _flc_temperatures
from pipelines.run_folder import open_run_folder

SPEC = MixLoraConfig(r=2, num_experts=4, flc_over="last")
"""Trained over the prompt's last token, while the run files below say nothing, which means all of the prompt."""


@pytest.fixture
def config(small_run, tmp_path):
    return small_run(
        tmp_path / "outputs",
        methods=["uq4ct"],
        recalibrate={"uq4ct": ["flc_temperature"]},
        data={
            "source": {"kind": "facts", "domain": "geography"},
            "splits": {"train": 8, "calibration": 9, "validation": 6, "test": 5},
        },
    )


def save_untrained(folder: Path, config, resolved):
    model = attach_adapter(load_model(resolved, config.model), SPEC, seed=1)
    state = adapter_state(model)
    for name, value in state.items():
        if ".router." in name:
            value.mul_(50)  # routers that tell inputs apart
    save_adapter(
        folder,
        model=model,
        state=state,
        head=None,
        tokenizer=load_tokenizer(resolved, config.model),
        config=config.model,
        adapter=SPEC,
        resolved=resolved,
        record=AdapterRecord("uq4ct", 0, config.data.prompt, balance_weight=0.01),
    )
    model.load_state_dict(state, strict=False)
    return model.eval()


def test_calibration_is_scored_without_metrics_and_gives_the_temperatures(config, tmp_path):
    adapter = tmp_path / "adapter"
    with open_run_folder(config, "refuse") as folder:
        stages = Calibration(config, folder, tmp_path, NullLogger(), Reporter(quiet=True))
        data, resolved = stages.prepare(), stages.resolve()
        model = save_untrained(adapter, config, resolved)
        found = stages.evaluate("uq4ct", data, resolved, adapter)
        resumed = stages.evaluate("uq4ct", data, resolved, adapter)
        results = stages.recalibrate("uq4ct", found, data)
    name = "uq4ct+flc_temperature"
    assert list(results) == [name]
    assert list(found) == list(resumed) == ["calibration", "validation", "id"]
    result = results[name]

    for method, by_split in (("uq4ct", found), (name, result.predictions)):
        places = {split: config.folder / method / "evaluation" / split for split in by_split}
        written = {split: read_predictions(place / "predictions.parquet") for split, place in places.items()}
        assert {split: len(predictions) for split, predictions in written.items()} == {
            "calibration": 9,
            "validation": 6,
            "id": 5,
        }
        assert [split for split, place in places.items() if (place / "metrics.json").exists()] == ["validation", "id"]
    assert {method: list(splits) for method, splits in compare_runs([config.folder])["methods"].items()} == {
        "uq4ct": ["id"],
        name: ["id"],
    }

    stored = json.loads((config.folder / name / "flc_temperature.json").read_text())
    assert stored.pop("fitted_on") == ["calibration", "validation"]
    assert FlcTemperature(**stored) == result.fitted
    assert result.fitted.n == 9 + 6
    expected = found["id"].tempered(result.fitted.of(found["id"].flc)).option_log_probs
    np.testing.assert_array_equal(result.predictions["id"].option_log_probs, expected)
    (note,) = _flc_temperatures({"uq4ct": {"id": found["id"]}}, results).values()
    assert note.data == "calibration and validation"
    assert note.means == {"id": pytest.approx(result.fitted.of(found["id"].flc).mean())}

    # Router confidence is averaged over the tokens that the adapter's record names.
    tokenizer = load_tokenizer(resolved, config.model)
    encoded = PromptEncoder(tokenizer, config.data.prompt, config.data.max_length).encode_all(
        data.splits["id"].questions
    )
    flc = {}
    for over in ("last", "prompt"):
        scoring = ScoringModel(model, over)
        settings = {"pad_id": tokenizer.pad_token_id, "token_budget": 2048, "flc_of": scoring.flc}
        flc[over] = score_questions(scoring, None, encoded, **settings).flc
    np.testing.assert_allclose(found["id"].flc, flc["last"], atol=1e-5)
    assert np.abs(flc["last"] - flc["prompt"]).max() > 1e-3
