"""Predictions under the posterior, against the covariance in full."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from components.data.batching import collate
from components.models.score_questions import score_questions
from components.models.scoring import option_scores
from components.posthoc.laplace.layers import lora_layers
from components.posthoc.laplace.predict import linear_scores, mean_softmax, score_with_posterior

SETTINGS = {"pad_id": 0, "token_budget": 60}


def confidence(scores):
    return np.exp(scores.log_probs).max(axis=1)


@pytest.mark.parametrize("rank", [64, 3])
def test_variance_is_that_of_the_full_covariance(scoring, questions, fit_on, rank):
    """J C J^T with C the inverse of (I / p + H) of each matrix in full, J by autograd on the weights themselves."""
    posterior = fit_on(scoring, questions, rank=rank)
    layers, p = lora_layers(scoring.model), 0.7
    found = linear_scores(scoring, layers, posterior.blocks, p, collate(questions, 0))
    covariances = {}
    for layer in layers:
        block = posterior.blocks[layer.name]
        wide = (block.wide_vectors.double() * block.wide_values.double()) @ block.wide_vectors.double().T
        narrow = (block.narrow_vectors.double() * block.narrow_values.double()) @ block.narrow_vectors.double().T
        h = torch.kron(wide, narrow)
        covariances[layer.name] = torch.linalg.inv(torch.eye(len(h), dtype=h.dtype) / p + h)
    weights = [layer.module.weight for layer in layers]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        for row in (0, 7, 11):
            batch = collate([questions[row]], 0)
            scores = option_scores(scoring(batch), batch).log_probs[0]
            count = len(scores)
            expected = torch.zeros(count, count, dtype=torch.float64)
            gradients = [torch.autograd.grad(score, weights, retain_graph=True) for score in scores]
            for number, layer in enumerate(layers):
                parts = [g[number].T if layer.wide_input else g[number] for g in gradients]
                jacobian = torch.stack([part.double().flatten() for part in parts])
                expected += jacobian @ covariances[layer.name] @ jacobian.T
            # Orthonormal to float32's last digit only, hence not to float64's.
            torch.testing.assert_close(found.variance[row, :count, :count], expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.mean[row, :count], scores.detach().double(), rtol=1e-6, atol=1e-6)
            assert not found.variance[row, count:].any()
    finally:
        for weight in weights:
            weight.requires_grad_(False)


def test_without_prior_variance_it_is_the_point_prediction(scoring, questions, posterior):
    point = score_questions(scoring, None, questions, **SETTINGS)
    found = score_with_posterior(scoring, replace(posterior, prior_variance=1e-12), questions, **SETTINGS)
    expected = point.log_probs - np.logaddexp.reduce(point.log_probs, axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(found.log_probs), np.exp(expected), atol=2e-6)
    np.testing.assert_array_equal(np.isneginf(found.log_probs), np.isneginf(point.log_probs))
    np.testing.assert_allclose(found.mass, point.mass, rtol=1e-6)
    np.testing.assert_array_equal(found.answers, point.answers)


def test_a_wider_posterior_never_makes_it_surer(scoring, questions, posterior):
    """Mean confidence over the questions, with the same draws throughout."""
    small = replace(posterior, samples=4000)
    means = [
        confidence(score_with_posterior(scoring, replace(small, prior_variance=p), questions, **SETTINGS)).mean()
        for p in (1e-12, 1e-3, 1e-2, 0.1, 1.0)
    ]
    assert (np.diff(means) <= 1e-9).all()
    assert means[-1] < means[0] - 0.02


def test_a_question_alone_or_among_others_is_the_same(scoring, questions, posterior, monkeypatch):
    small = replace(posterior, samples=500)
    together = score_with_posterior(scoring, small, questions, **SETTINGS)
    monkeypatch.setattr("components.posthoc.laplace.predict._JACOBIAN_BYTES", 1)  # one question at a time
    done = []
    alone = score_with_posterior(scoring, small, questions, **SETTINGS, on_progress=done.append)
    np.testing.assert_allclose(alone.log_probs, together.log_probs, atol=1e-5)
    assert done == [1] * 12


def test_mean_softmax_of_two_options_is_the_integral_over_their_difference():
    """E sigmoid(d) for d ~ N(m1 - m2, v11 + v22 - 2 v12), by quadrature; the error stated holds with room."""
    mean = torch.tensor([[1.5, 0.0, -torch.inf]], dtype=torch.float64)
    variance = torch.zeros(1, 3, 3, dtype=torch.float64)
    variance[0, :2, :2] = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    expected, _ = quad(lambda d: expit(d) * norm.pdf(d, 1.5, np.sqrt(2.0)), -15, 18)
    found = mean_softmax(mean, variance, 20_000).exp()[0]
    assert float(found[0]) == pytest.approx(expected, abs=0.5 / np.sqrt(20_000) * 3)
    assert float(found.sum()) == pytest.approx(1.0)
    assert found[2] == 0
