"""Simulated predictions with known calibration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from components.evaluation.predictions import Predictions

Simulate = Callable[..., Predictions]


@pytest.fixture
def simulate() -> Simulate:
    """A maker of predictions: gold is drawn from softmax(z), the model states softmax(sharpening * z).

    `sharpening` 1 is perfectly calibrated, above 1 over-confident. The same seed gives the same questions and gold.
    `flc`: router confidence, a number for all questions or one each.
    """

    def make(
        n: int = 300,
        *,
        options: int = 4,
        sharpening: float = 1.0,
        seed: int = 0,
        mass: float = 0.5,
        flc: float | np.ndarray | None = None,
    ) -> Predictions:
        generator = np.random.default_rng(seed)
        z = 2.0 * generator.normal(size=(n, options))
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        gold = (generator.random((n, 1)) > np.cumsum(p, axis=1)[:, :-1]).sum(axis=1)
        ids = tuple(f"q{i}" for i in range(n))
        stated = None if flc is None else np.broadcast_to(flc, n)
        return Predictions(ids, gold, sharpening * z, np.full(n, mass), (None,) * n, flc=stated)

    return make
