"""A run that cannot go on exactly where it stood says so instead of going on somewhere else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import pytest

from components.data.prompts import EncodedQuestion
from components.errors import CheckpointError
from components.training.feed import Feed
from components.training.resumption import FLOAT32_TOLERANCE, Resumption


def feed(seed: int = 0, world_size: int = 1) -> Feed:
    questions = [EncodedQuestion(str(i), (1, 2), ((3,), (4,)), 0) for i in range(12)]
    return Feed(questions, 4, "gold", seed, pad_id=0, world_size=world_size)


@pytest.fixture
def here() -> Resumption:
    return Resumption(feed(), lambda: 2.0, noise=None, zero_stage=2, tolerance=FLOAT32_TOLERANCE)


def test_says_where_the_run_stands(here):
    written = here.describe(5)
    assert written["world_size"] == 1
    assert written["zero_stage"] == 2
    assert written["data"]["questions_seen"] == 20
    assert written["probe_loss"] == 2.0
    here.check_before_loading(5, written)
    here.check_loaded(5, written)


def test_weights_that_were_not_read_are_noticed(here):
    written = here.describe(5)
    within = replace(here, probe=lambda: 2.0 * (1 + FLOAT32_TOLERANCE / 2))
    within.check_loaded(5, written)
    for loss in (2.1, float("nan")):
        with pytest.raises(CheckpointError, match=r"step 5 was saved with a loss of 2\.00000 .* gives (2\.1|nan)"):
            replace(here, probe=lambda loss=loss: loss).check_loaded(5, written)


def test_other_questions_ahead_are_noticed(here):
    with pytest.raises(CheckpointError, match="would go on with other questions"):
        replace(here, feed=feed(seed=1)).check_before_loading(5, here.describe(5))
    with pytest.raises(CheckpointError, match="would go on with other questions"):
        here.check_before_loading(6, here.describe(5))


def test_another_number_of_workers_goes_on_only_without_noise(here):
    two = replace(here, feed=feed(world_size=2))
    two.check_before_loading(5, here.describe(5))
    noisy = replace(two, noise="model.adapter.dropout")
    with pytest.raises(
        CheckpointError, match=r"written by 1 worker\(s\) and 2 would go on: with model\.adapter\.dropout"
    ):
        noisy.check_before_loading(5, here.describe(5))
    noisy.check_before_loading(5, two.describe(5))


def test_what_was_estimated_before_training_comes_back(here):
    class Loss:
        found: ClassVar = {"count": [3, 0]}

        def estimates(self):
            return self.found

        def take_over(self, estimates):
            self.found = estimates

    written = json.loads(json.dumps(replace(here, before=Loss()).describe(5)))
    later = Loss()
    later.found = None
    replace(here, before=later).check_loaded(5, written)
    assert later.found == {"count": [3, 0]}
