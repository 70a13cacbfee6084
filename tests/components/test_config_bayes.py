"""What a run file may ask of the methods that answer by several passes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from components.config import SAMPLED_METHODS, RunConfig
from components.training.methods import METHODS


def run_of(methods: list[str], **sections: object) -> RunConfig:
    return RunConfig.model_validate(
        {"run": "a", "methods": methods, "data": {"source": {"kind": "facts", "domain": "geography"}}} | sections
    )


@pytest.mark.parametrize(
    ("methods", "sections", "message"),
    [
        (["mc_dropout"], {"model": {"adapter": {"kind": "full"}}}, "'mc_dropout' averages over passes that differ"),
        (["blob"], {"resources": {"deepspeed": {"stage": 3}}}, "which DeepSpeed's own copies of the weights would not"),
        (["ensemble"], {"ensemble": {"members": 1}}, "greater than or equal to 2"),
        (
            ["blob"],
            {"resources": {"workers": 2, "min_workers": 1}},
            "blob.init_scale of 'blob' is drawn by each worker",
        ),
        (
            ["mc_dropout"],
            {"resources": {"workers": 2, "min_workers": 1}},
            "mc_dropout.dropout of 'mc_dropout' is drawn by each worker",
        ),
        (["ensemble"], {"tune": {"method": "ensemble", "space": {}}}, "Input should be 'sft'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(methods, sections, message):
    with pytest.raises(ValidationError, match=message):
        run_of(methods, **sections)


def test_noise_is_what_makes_workers_differ():
    config = run_of(["blob"], mc_dropout={"dropout": 0.0}, model={"adapter": {"dropout": 0.2}})
    found = {method: config.noise_of(method) for method in ("mc_dropout", "ensemble", "blob", "sft")}
    dropout = "model.adapter.dropout"
    assert found == {"mc_dropout": None, "ensemble": dropout, "blob": "blob.init_scale", "sft": dropout}


def test_methods_put_their_sections_into_what_they_train():
    config = run_of(
        ["blob"],
        model={"adapter": {"r": 3, "alpha": 6, "dropout": 0.4, "target_modules": ["q_proj"]}},
        mc_dropout={"dropout": 0.25},
        blob={"prior_std": 0.5, "init_scale": 0.1},
    )
    assert METHODS["ensemble"].adapter_spec(config) == METHODS["sft"].adapter_spec(config) == config.model.adapter
    assert METHODS["mc_dropout"].adapter_spec(config) == config.model.adapter.model_copy(update={"dropout": 0.25})
    assert METHODS["blob"].adapter_spec(config).model_dump() == {
        "kind": "blob", "r": 3, "alpha": 6, "dropout": 0.4, "target_modules": ["q_proj"], "init_scale": 0.1,
        "prior_std": 0.5,
    }  # fmt: skip


def test_sampled_methods_are_those_whose_answers_take_several_passes():
    assert {m for m in METHODS if METHODS[m].prediction in ("mc_dropout", "ensemble", "blob")} == set(SAMPLED_METHODS)
