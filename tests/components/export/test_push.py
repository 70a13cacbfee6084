"""What would go to a hub: the card with its table, and the files. The upload itself is one call of huggingface_hub."""

from __future__ import annotations

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.errors import ModelError, UsageError
from components.evaluation.metrics_file import evaluate_predictions, write_metrics
from components.evaluation.predictions import Predictions
from components.export.card import measured, with_measured
from components.export.push import card_to_push, push, upload_operations


@pytest.fixture
def evaluation(tmp_path):
    """Figures of 40 questions on two splits, one of which is no test."""
    rng = np.random.default_rng(0)
    scores = np.log(rng.dirichlet(np.ones(4), size=40))
    ids, mass = tuple(f"q{i}" for i in range(40)), np.full(40, 0.5)
    predictions = Predictions(ids, rng.integers(0, 4, 40), scores, mass, (None,) * 40, flc=rng.uniform(size=40))
    metrics = evaluate_predictions(predictions, EvaluationConfig(bootstrap=100), seed=0)
    for split in ("id", "validation"):
        write_metrics(tmp_path / "calm" / "evaluation" / split / "metrics.json", metrics)
    return tmp_path / "calm" / "evaluation", metrics


def test_the_table_has_every_source_of_every_test_split_with_intervals(evaluation):
    folder, metrics = evaluation
    lines = measured(folder).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| id")]
    assert [row[2] for row in rows] == ["softmax", "flc"]
    assert not any("validation" in line for line in lines)
    figure = metrics["sources"]["softmax"]["ece"]
    assert rows[0][5] == f"{figure['value']:.3f} [{figure['ci_low']:.3f}, {figure['ci_high']:.3f}]"
    assert "15 bins" in lines[-1]
    assert all(line.count("|") == lines[0].count("|") for line in lines if line.startswith("|"))


def test_a_card_gets_its_figures_once_and_where_they_belong():
    once = with_measured("---\na: b\n---\n\n# title\n\ntext\n\n## Use\n\nso\n", "| a \\1 |")
    assert once == "---\na: b\n---\n\n# title\n\ntext\n\n## Measured\n\n| a \\1 |\n\n## Use\n\nso\n"
    again = with_measured(once, "| b |")
    assert again == once.replace("| a \\1 |", "| b |")
    assert with_measured(once, "") == once
    assert with_measured("# no section", "| b |") == "# no section\n\n## Measured\n\n| b |\n\n"


def test_an_adapter_goes_up_with_the_figures_beside_it(make_adapter, random_head, evaluation):
    folder, _ = evaluation
    adapter = make_adapter(head=random_head())
    before = (adapter / "README.md").read_text()
    card = card_to_push(adapter, None)
    assert measured(folder) in card
    assert (adapter / "README.md").read_text() == before, "the folder stays as it is"
    (adapter / ".hidden").write_text("x")
    operations = {operation.path_in_repo: operation for operation in upload_operations(adapter, card)}
    assert operations["README.md"].path_or_fileobj == card.encode()
    wanted = {"adapter_model.safetensors", "adapter_config.json", "calibration_head.safetensors", "caltune.json"}
    assert wanted <= operations.keys()
    assert ".hidden" not in operations


def test_what_should_not_go_up_is_refused(make_adapter, tmp_path):
    with pytest.raises(ModelError, match="no adapter folder and no exported model"):
        card_to_push(tmp_path, None)
    adapter = make_adapter()
    with pytest.raises(UsageError, match=r"metrics\.json"):
        card_to_push(adapter, tmp_path)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        push(adapter, "me/calm")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="bytes"):
        card_to_push(adapter, None)
