"""Fitting a posterior to a trained adapter, and evaluating with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from components.data.prepare import load_prepared
from components.errors import ModelError
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.base import load_model, load_tokenizer
from ray_jobs.evaluate import EvaluationJob, evaluate
from ray_jobs.posterior import PosteriorJob, fit_posterior


@pytest.fixture
def job(make_job, tmp_path):
    """A laplace adapter whose weights were moved at random, without its posterior."""
    training = make_job("posterior", "laplace", laplace={"samples": 500})
    config, resolved = training.config, training.resolved
    model = attach_adapter(load_model(resolved, config.model), config.model.adapter, 0)
    with torch.no_grad():
        for p in trainable_parameters(model).values():
            p += 0.3 * torch.randn_like(p)
    folder = save_adapter(
        tmp_path / "adapter",
        model=model,
        state=adapter_state(model),
        head=None,
        tokenizer=load_tokenizer(resolved, config.model),
        config=config.model,
        adapter=config.model.adapter,
        resolved=resolved,
        record=AdapterRecord("laplace", 3, config.data.prompt),
    )
    return PosteriorJob(config, load_prepared(training.data), resolved, folder)


def predictions(job, adapter):
    return evaluate(EvaluationJob(job.config, job.data, job.resolved, adapter, ["id"]), lambda done: None)["id"]


def test_an_adapter_with_a_posterior_is_evaluated_with_it(job):
    """And without one not at all; the folder alone says so, whatever the run file's samples are by now."""
    with pytest.raises(ModelError, match="never fitted"):
        predictions(job, job.adapter)
    done = []
    figures = fit_posterior(job, done.append)
    assert sum(done) == figures["n"] == 32
    assert figures["prior_variance"] > 0
    found = predictions(job, job.adapter)
    config = job.config.model_copy(update={"laplace": job.config.laplace.model_copy(update={"samples": 100})})
    again = predictions(replace(job, config=config), job.adapter)
    np.testing.assert_array_equal(found.option_log_probs, again.option_log_probs)
    np.testing.assert_allclose(np.exp(found.option_log_probs).sum(axis=1), 1.0)


@pytest.mark.slow
@pytest.mark.distributed
def test_in_an_actor_it_is_the_same(job, ray_here):
    evaluation = job.config.evaluation.model_copy(update={"actors": 2})
    here = fit_posterior(job, lambda done: None)
    apart = replace(job, config=job.config.model_copy(update={"evaluation": evaluation}))
    assert fit_posterior(apart, lambda done: None) == pytest.approx(here, rel=1e-4)
