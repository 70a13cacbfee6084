"""The curvature and the evidence, against matrices built in full."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from components.data.batching import collate
from components.errors import ModelError
from components.models.scoring import option_scores
from components.posthoc.laplace.factors import Factors, probe_count, probe_vectors
from components.posthoc.laplace.fit import uniform
from components.posthoc.laplace.layers import lora_layers
from components.posthoc.laplace.posterior import (
    best_prior_variance,
    curvature_of,
    evidence_slope,
    log_evidence,
)


def dense(block, wide=True):
    """One side's factor in full."""
    vectors, values = (block.wide_vectors, block.wide_values) if wide else (block.narrow_vectors, block.narrow_values)
    return (vectors.double() * values.double()) @ vectors.double().T


def label_of(question, scores):
    """The option that the question's own draw falls on."""
    return int((torch.cumsum(scores.double().softmax(0), 0) <= uniform(5, question.id)).sum())


def test_factors_are_those_of_each_question_by_itself(scoring, questions, posterior):
    """Each question alone, slopes at the outputs by adding zeros there: sums over the scored tokens, in full."""
    layers = lora_layers(scoring.model)
    inputs_of = {layer.name: [] for layer in layers}
    slopes_of = {layer.name: [] for layer in layers}
    gold = tokens = 0
    for question in questions:
        batch = collate([question], 0)
        zeros, seen, handles = {}, {}, []

        def add_zero(layer, zeros=zeros, seen=seen):
            def hook(module, args, output):
                seen[layer.name] = args[0].detach()
                zeros[layer.name] = torch.zeros_like(output).requires_grad_(True)
                return output + zeros[layer.name]

            return layer.module.register_forward_hook(hook)

        handles = [add_zero(layer) for layer in layers]
        scores = option_scores(scoring(batch), batch).log_probs[0]
        for handle in handles:
            handle.remove()
        log_probs = scores.log_softmax(0)
        gradients = torch.autograd.grad(log_probs[label_of(question, scores.detach())], list(zeros.values()))
        for name, slope in zip(zeros, gradients, strict=True):
            inputs_of[name].append(seen[name][0, batch.positions])
            slopes_of[name].append(slope[0, batch.positions])
        gold += float(log_probs.detach()[question.answer])
        tokens += len(batch.positions)
    for layer in layers:
        a, s = torch.cat(inputs_of[layer.name]), torch.cat(slopes_of[layer.name])
        wide, narrow = layer.sides(a, s)
        block = posterior.blocks[layer.name]
        expected = torch.kron(wide.T @ wide / tokens, narrow.T @ narrow)
        found = torch.kron(dense(block), dense(block, wide=False))
        torch.testing.assert_close(found, expected, atol=2e-6 * float(expected.abs().max()), rtol=0)
    assert posterior.log_likelihood == pytest.approx(gold, rel=1e-6)
    assert posterior.n == 12


def test_evidence_is_that_of_the_full_matrices(scoring, posterior):
    """LL - |theta|^2 / 2p - 1/2 log det(I + p H), the determinant of each matrix's H in full."""
    layers = lora_layers(scoring.model)
    norm = sum(float(layer.module.weight.double().square().sum()) for layer in layers)
    assert posterior.squared_norm == pytest.approx(norm)
    for p in (0.01, posterior.prior_variance, 10.0):
        half_log_det = 0.0
        for layer in layers:
            h = torch.kron(dense(posterior.blocks[layer.name]), dense(posterior.blocks[layer.name], wide=False))
            half_log_det += float(torch.logdet(torch.eye(len(h), dtype=h.dtype) + p * h)) / 2
        expected = posterior.log_likelihood - norm / (2 * p) - half_log_det
        found = log_evidence(math.log(p), curvature_of(posterior.blocks), norm, posterior.log_likelihood)
        assert float(found) == pytest.approx(expected, abs=1e-4)
        if p == posterior.prior_variance:
            assert posterior.log_evidence == pytest.approx(expected, abs=1e-4)


def test_slope_of_the_evidence_and_its_maximum(posterior):
    """The slope by autograd, the maximum by scipy's bounded search."""
    curvature = curvature_of(posterior.blocks)
    for at in (-6.0, -1.0, 2.0):
        log_p = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(log_evidence(log_p, curvature, posterior.squared_norm, 0.0), log_p)
        assert evidence_slope(at, curvature, posterior.squared_norm) == pytest.approx(float(slope), abs=1e-9)
    best = minimize_scalar(
        lambda at: -float(log_evidence(at, curvature, posterior.squared_norm, 0.0)),
        bounds=(-20, 20),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert math.log(posterior.prior_variance) == pytest.approx(best.x, abs=1e-5)


def test_evidence_without_a_maximum_is_refused():
    with pytest.raises(ModelError, match="no maximum"):
        best_prior_variance(torch.zeros(3, dtype=torch.float64), 1.0)
    with pytest.raises(ModelError, match="no maximum"):
        best_prior_variance(torch.ones(3, dtype=torch.float64), 0.0)


def test_neither_order_nor_batches_have_a_say(scoring, questions, posterior, fit_on):
    shuffled = random.Random(1).sample(questions, len(questions))
    again = fit_on(scoring, shuffled, token_budget=25, rank=64)
    assert again.prior_variance == pytest.approx(posterior.prior_variance, rel=1e-5)
    for name, block in posterior.blocks.items():
        for wide in (True, False):
            expected = dense(block, wide)
            atol = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(dense(again.blocks[name], wide), expected, atol=atol, rtol=0)


def test_a_given_prior_variance_is_taken(scoring, questions, fit_on):
    assert fit_on(scoring, questions[:3], rank=3, prior_variance=0.25).prior_variance == 0.25


def test_labels_are_drawn_as_often_as_they_are_likely():
    drawn = [uniform(0, f"question {i}") for i in range(4000)]
    assert np.histogram(drawn, bins=4, range=(0, 1))[0] / 4000 == pytest.approx(0.25, abs=0.03)
    assert uniform(0, "a") != uniform(1, "a")


def test_a_sketch_finds_the_leading_directions():
    """Of 200 directions 4 carry nearly everything; they are found to the size of the rest, whatever the order."""
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=torch.float64)).Q
    scales = torch.cat([torch.tensor([8.0, 4.0, 2.0, 1.0]), torch.full((196,), 1e-4)]).double()
    data = torch.randn(500, 200, generator=generator, dtype=torch.float64) * scales @ basis.T
    narrow = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    factors = Factors(200, 3, probe_vectors(200, probe_count(200, 4)))
    for part in (slice(300, 500), slice(0, 300)):
        factors.add(data[part], narrow[part])
    block = factors.block(4, tokens=500)
    exact = torch.linalg.eigvalsh(data.T @ data / 500).flip(0)[:4]
    torch.testing.assert_close(block.wide_values.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(dense(block, wide=False), narrow.T @ narrow, rtol=1e-5, atol=1e-5)
    assert block.wide_vectors.shape == (200, 4)
