"""The section `laplace` and what it does to the method's training."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from components.config import RunConfig


def config(**sections):
    tree = {
        "run": "small",
        "methods": ["sft", "laplace"],
        "data": {"source": {"kind": "facts", "domain": "geography"}},
        "training": {"steps": 3, "weight_decay": 0.02},
    }
    return RunConfig.model_validate(tree | sections)


def test_weight_decay_is_the_methods_own():
    found = config(laplace={"weight_decay": 0.3})
    assert found.weight_decay_of("sft") == 0.02
    assert found.weight_decay_of("laplace") == 0.3
    assert config().weight_decay_of("laplace") == 1e-5


def test_it_needs_lora_matrices():
    with pytest.raises(ValidationError, match=r"needs model\.adapter\.kind 'lora'"):
        config(model={"adapter": {"kind": "full"}})
    assert config(methods=["sft"], model={"adapter": {"kind": "full"}}).methods == ["sft"]


@pytest.mark.parametrize("section", [{"rank": 0}, {"prior_variance": 0}, {"samples": 5}, {"ranks": 3}])
def test_impossible_settings_are_refused(section):
    with pytest.raises(ValidationError):
        config(laplace=section)
