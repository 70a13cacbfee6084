"""Expert load: what is read, what counts as collapse, the figure."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.errors import CaltuneError
from components.evaluation.expert_load import ExpertLoads, expert_load_figure

EVEN = [0.25] * 4


def loads(*last: list[float]) -> ExpertLoads:
    """Two steps, even at first, then as given, one list a router."""
    share = np.array([[EVEN] * len(last), last])
    return ExpertLoads(np.array([0, 40]), share, np.full(share.shape[:2], 1.2))


def test_reads_what_training_wrote(tmp_path: Path) -> None:
    path = tmp_path / "expert_load.json"
    content = {"steps": [0, 10], "share": [[EVEN] * 3, [EVEN] * 3], "entropy": [[1.3] * 3, [1.1, 1.2, 1.3]]}
    path.write_text(json.dumps(content))
    found = ExpertLoads.read(path)
    assert found.steps.tolist() == [0, 10]
    assert found.share.shape == (2, 3, 4)
    assert found.entropy[1].tolist() == [1.1, 1.2, 1.3]


@pytest.mark.parametrize(
    "content",
    [
        {"steps": [0], "share": [[EVEN]]},
        {"steps": [0, 1], "share": [[EVEN]], "entropy": [[1.0]]},
        {"steps": [0], "share": [[EVEN]], "entropy": [[1.0, 1.0]]},
        {"steps": [0], "share": [[EVEN, [0.5, 0.5]]], "entropy": [[1.0, 1.0]]},
        {"steps": [0], "share": [["x"]], "entropy": [[1.0]]},
        {"steps": [], "share": [], "entropy": []},
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: dict[str, object]) -> None:
    path = tmp_path / "expert_load.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CaltuneError, match=r"expert_load\.json is no record of expert load.*train again"):
        ExpertLoads.read(path)


def test_collapse_counts_the_tokens_an_expert_serves() -> None:
    """With k = 2 an expert of every token has half of the choices: .5 * 2 = 1, above .9; .44 * 2 = .88 is below."""
    found = loads(EVEN, [0.5, 0.3, 0.1, 0.1], [0.44, 0.44, 0.06, 0.06])
    assert found.collapsed(top_k=2, limit=0.9) == [1]
    assert found.collapsed(top_k=2, limit=0.8) == [1, 2]
    assert found.collapsed(top_k=1, limit=0.9) == []
    assert found.served(2)[0].tolist() == [0.5] * 4


def test_sentences_name_routers_and_step() -> None:
    worst = [0.5, 0.5, 0.0, 0.0]
    assert loads(EVEN, worst).sentence(2, 0.9) == (
        "router 1 has collapsed at step 40: one expert serves more than 90 % of the tokens"
    )
    assert loads(worst, EVEN, worst).sentence(2, 0.9).startswith("routers 0, 2 have collapsed at step 40")
    assert loads(EVEN).sentence(2, 0.9) == (
        "no router has collapsed at step 40: the busiest expert serves 50 % of the tokens"
    )


@pytest.mark.parametrize("routers", [1, 30])
def test_the_figure_shows_the_last_step(routers: int) -> None:
    even = expert_load_figure(loads(*[EVEN] * routers), "uq4ct")
    assert Image.open(io.BytesIO(even)).format == "PNG"
    assert even != expert_load_figure(loads(*[[0.5, 0.5, 0.0, 0.0]] * routers), "uq4ct")


def test_one_expert_alone_can_be_drawn() -> None:
    alone = ExpertLoads(np.array([5]), np.ones((1, 2, 1)), np.zeros((1, 2)))
    assert Image.open(io.BytesIO(expert_load_figure(alone))).format == "PNG"
