"""`caltune export`: what it prints, and that a refusal is a sentence and an exit code."""

from __future__ import annotations

import json
import sys

import pytest

from components.config import MixLoraConfig
from pipelines import cli


@pytest.fixture
def caltune(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["caltune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_merged_says_how_close_it_is(caltune, make_adapter, random_head, tmp_path):
    adapter = make_adapter(head=random_head())
    code, out, _ = caltune("export", "merged", adapter, tmp_path / "out", "--json")
    assert code == 0
    made = json.loads(out)
    assert made["folder"] == str(tmp_path / "out")
    assert made["alpha"] == "beside"
    assert 0 <= made["merging"]["greatest"] <= 1e-4
    record = json.loads((tmp_path / "out" / "caltune_export.json").read_text())
    assert record["greatest_log_probability_difference"]["merging"] == made["merging"]
    assert "CalibratedLogits" in (tmp_path / "out" / "README.md").read_text()
    code, _, err = caltune("export", "merged", adapter, tmp_path / "out")
    assert code == 1
    assert "exists" in err


def test_a_mixture_is_refused_with_what_to_do_and_that_works(caltune, make_adapter, tmp_path):
    adapter = make_adapter(method="uq4ct", spec=MixLoraConfig(r=2, alpha=4, num_experts=4))
    code, _, err = caltune("export", "merged", adapter, tmp_path / "out")
    assert code == 1
    assert f"caltune export mixlora {adapter} OUT" in err
    code, out, _ = caltune("export", "mixlora", adapter, tmp_path / "out")
    assert code == 0
    assert out.strip() == str(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.bin").is_file()
