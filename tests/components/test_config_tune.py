"""What a search space may hold, and what is said of one that cannot be searched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from components.config import RunConfig
from components.config_population import PbtConfig
from components.config_tune import AshaConfig, Dimension, TuneConfig, value_at, with_values
from components.errors import RunFileError
from components.run_file import load_run_file, to_yaml


def run_of(space: dict, method: str = "calm", **tune) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": "search",
            "methods": ["sft", "calm", "uq4ct", "regularization", "learned_ts"],
            "data": {"source": {"kind": "facts", "domain": "geography"}},
            "tune": {"method": method, "space": space, **tune},
        }
    )


def test_every_kind_of_range_is_read_and_written_back(tmp_path: Path):
    space = {
        "calm.eta": {"uniform": [0.1, 1.0]},
        "calm.alpha_learning_rate": {"log_uniform": [1e-4, 1e-1]},
        "calm.inner_steps": {"integer": [1, 5]},
        "calm.head": {"choice": ["vocabulary", "scalar"]},
        "model.adapter.r": {"choice": [4, 8]},
    }
    config = run_of(space)
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config))
    assert load_run_file(path) == config
    assert config.model_dump(mode="json")["tune"]["space"] == space


def test_keys_that_an_ablation_reads_can_be_searched():
    space = {"regularization.beta": {"choice": [0.01, 0.5]}, "calm.alpha_learning_rate": {"uniform": [1e-3, 1e-2]}}
    assert run_of(space, "regularization").tune.method == "regularization"


@pytest.mark.parametrize(
    ("space", "method", "message"),
    [
        ({"calm.etta": {"uniform": [0, 1]}}, "calm", "no key 'calm.etta', did you mean 'calm.eta'?"),
        ({"nonsense": {"uniform": [0, 1]}}, "calm", "no key 'nonsense'; 'calm' reads training, model.adapter, calm"),
        ({"calm": {"uniform": [0, 1]}}, "calm", "no key 'calm'"),
        (
            {"calm.eta": {"uniform": [0, 1]}},
            "sft",
            "cannot be searched; 'sft' reads training, model.adapter",
        ),
        ({"data.max_length": {"integer": [10, 20]}}, "calm", "'data.max_length' cannot be searched"),
        (
            {"calm.eta": {"uniform": [0.1, 1]}},
            "regularization",
            "'calm.eta' cannot be searched; 'regularization' reads",
        ),
        ({"calm.head": {"choice": ["scalar", "vocabulary"]}}, "learned_ts", "'calm.head' cannot be searched"),
        ({"calm.inner_steps": {"uniform": [1, 5]}}, "calm", "'calm.inner_steps' takes no fractions; use {integer:"),
        ({"calm.head": {"log_uniform": [1, 5]}}, "calm", "'calm.head' takes no fractions; use {choice:"),
        ({"calm.inner_steps": {"integer": [0, 5]}}, "calm", "does not take 0: Input should be greater than or equal"),
        ({"calm.head": {"choice": ["scalar", "matrix"]}}, "calm", "'calm.head' does not take 'matrix'"),
        ({"model.adapter.r": {"choice": [4, True]}}, "calm", "'model.adapter.r' does not take true"),
        ({"model.mixlora.top_k": {"integer": [1, 9]}}, "uq4ct", "does not take 9: top_k 9 exceeds num_experts 8"),
    ],
)
def test_a_key_that_cannot_be_searched_is_named(space, method, message):
    with pytest.raises(ValidationError) as refused:
        run_of(space, method)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("dimension", "message"),
    [
        ({}, "needs exactly one of"),
        ({"uniform": [0, 1], "choice": [1, 2]}, "needs exactly one of"),
        ({"uniform": [1, 0]}, r"\[1.0, 0.0\] must be \[low, high\]"),
        ({"integer": [2, 2]}, "low below high"),
        ({"log_uniform": [0, 1]}, "greater than 0"),
        ({"choice": [1]}, "at least 2"),
        ({"normal": [0, 1]}, "normal"),
    ],
)
def test_a_range_that_is_none_is_refused(dimension, message):
    with pytest.raises(ValidationError, match=message):
        Dimension.model_validate(dimension)


def test_a_run_file_with_a_bad_space_says_so_with_file_and_key(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: a\ndata: {source: {kind: facts, domain: geography}}\ntune:\n  space:\n    calm.etta: {uniform: [0, 1]}\n"
    )
    with pytest.raises(RunFileError, match=r"run\.yaml:1: .*'calm\.etta', did you mean 'calm\.eta'\?"):
        load_run_file(path)


def test_method_and_confidence_must_fit_the_run():
    with pytest.raises(ValidationError, match=r"tune\.method is 'calm_uq4ct', which 'methods' does not run"):
        run_of({"calm.eta": {"uniform": [0.1, 1]}}, "calm_uq4ct")
    with pytest.raises(ValidationError, match="confidence 'flc' needs a method with routers"):
        run_of({"calm.eta": {"uniform": [0.1, 1]}}, confidence="flc")
    config = run_of({"uq4ct.balance_weight": {"uniform": [0, 1]}}, "uq4ct", confidence="flc")
    assert config.tune is not None
    row = {"validation/ece": 0.1, "validation/flc_ece": 0.2, "validation/accuracy": 0.7}
    assert config.tune.figure(row, "ece") == 0.2
    assert config.tune.figure(row, "accuracy") == 0.7


def test_a_search_judges_by_the_splits_that_it_names():
    row = {"validation/ece": 0.1, "validation_shift/ece": 0.3, "validation/nll": 1.0, "validation_shift/nll": 2.0}
    space = {"calm.eta": {"uniform": [0.1, 1]}}
    with pytest.raises(ValidationError, match=r"tune\.split is 'both' but data\.heldout_groups is empty"):
        run_of(space, split="both")
    both = TuneConfig.model_validate({"space": space, "split": "both"})
    assert both.figure(row, "ece") == pytest.approx(0.2)
    assert both.figure(row, "nll") == pytest.approx(1.5)
    assert both.model_copy(update={"split": "validation_shift"}).figure(row, "ece") == 0.3


def test_values_are_put_at_dotted_keys_and_the_original_stays():
    tree = {"calm": {"eta": 1, "stop": {"rule": "match"}}, "seed": 0}
    changed = with_values(tree, {"calm.stop.rule": "budget", "seed": 5})
    assert changed == {"calm": {"eta": 1, "stop": {"rule": "budget"}}, "seed": 5}
    assert tree == {"calm": {"eta": 1, "stop": {"rule": "match"}}, "seed": 0}
    assert value_at(changed, "calm.stop.rule") == "budget"


def test_a_range_knows_what_it_holds():
    assert Dimension(uniform=(0.0, 1.0)).holds(1.0)
    assert not Dimension(integer=(1, 3)).holds(4)
    assert Dimension(choice=["a", "b"]).holds("b")
    assert not Dimension(log_uniform=(1e-3, 1.0)).holds("b")


class TestScheduler:
    """A scheduler is told by its kind; one that names none is ASHA, as before there was another."""

    space: ClassVar[dict] = {
        "calm.alpha_learning_rate": {"log_uniform": [1e-3, 1e-1]},
        "model.adapter.r": {"choice": [4, 8]},
    }
    pbt: ClassVar[dict] = {"kind": "pbt", "keys": ["calm.alpha_learning_rate"], "interval_steps": 10}

    def run_with(self, scheduler, trials: int = 4, **sections) -> RunConfig:
        tree = run_of(self.space).model_dump(mode="json") | sections
        return RunConfig.model_validate(
            tree | {"tune": {"space": self.space, "scheduler": scheduler, "trials": trials}}
        )

    def test_the_kind_tells_which(self, tmp_path):
        asha = self.run_with({"grace_steps": 10, "reduction_factor": 2}).tune
        assert asha is not None
        assert asha.scheduler == AshaConfig(grace_steps=10, reduction_factor=2)
        assert self.run_with({"kind": "asha"}) == self.run_with({})
        config = self.run_with(self.pbt)
        assert config.tune is not None
        assert config.tune.scheduler == PbtConfig(kind="pbt", keys=["calm.alpha_learning_rate"], interval_steps=10)
        (tmp_path / "run.yaml").write_text(to_yaml(config))
        assert load_run_file(tmp_path / "run.yaml") == config

    @pytest.mark.parametrize(
        ("scheduler", "message"),
        [
            ({"kind": "hyperband"}, "asha"),
            ({"kind": "pbt", "keys": ["calm.eta"]}, "interval_steps"),
            (pbt | {"grace_steps": 5}, "grace_steps"),
            (pbt | {"fraction": 0.6}, "fraction"),
            (pbt | {"keys": ["calm.eta"]}, "'calm.eta' is not in tune.space"),
            (
                pbt | {"keys": ["model.adapter.r"]},
                "'model.adapter.r' cannot change while a trial trains; those that can: ",
            ),
            (pbt | {"interval_steps": 5}, "interval_steps 5 is no multiple of training.evaluate_every 10"),
            (pbt | {"interval_steps": 40}, "interval_steps 40 leaves no exchange before the end at training.steps 40"),
        ],
    )
    def test_what_cannot_be_is_refused(self, scheduler, message):
        with pytest.raises(ValidationError, match=re.escape(message)):
            self.run_with(scheduler)

    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            ({"trials": 1}, "'pbt' needs at least 2 trials"),
            ({"training": {"checkpoint_every": 4}}, "no multiple of training.checkpoint_every 4"),
            ({"resources": {"workers": 2}}, "pauses each trial at an exact step"),
            ({"resources": {"deepspeed": {"stage": 2}}}, "pauses each trial at an exact step"),
            ({"calm": {"stop": {"rule": "match"}}}, "'match' ends each at a step of its own"),
        ],
    )
    def test_a_run_that_a_population_cannot_train_is_refused(self, sections, message):
        with pytest.raises(ValidationError, match=re.escape(message)):
            self.run_with(self.pbt, **sections)
