"""Fitting the posterior of a trained adapter: in this process, or where evaluation has actors, in a Ray task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import RunConfig
from components.data.prepare import PreparedData
from components.models.base import ResolvedModel

if TYPE_CHECKING:
    from components.data.prompts import EncodedQuestion
    from components.posthoc.laplace.posterior import Posterior


@dataclass(frozen=True)
class PosteriorJob:
    """What a posterior is fitted to.

    Attributes:
        config: The run.
        data: Its prepared data; the split `train` is read.
        resolved: The base model.
        adapter: The trained adapter's folder, which gets the posterior.
    """

    config: RunConfig
    data: PreparedData
    resolved: ResolvedModel
    adapter: Path


def fit_posterior(job: PosteriorJob, on_progress: Callable[[int], None]) -> dict[str, float | int]:
    """Fits a posterior and puts it into the adapter's folder, in place of an earlier one.

    One evaluation actor and no GPU: in this process. Otherwise in one Ray task with the cores, and with
    `resources.use_gpu` the GPU, of an actor.

    Args:
        job: What to fit.
        on_progress: Called with the number of questions done since the last call.

    Returns:
        The posterior's figures: prior variance, evidence and what they come from.

    Raises:
        CaltuneError: The model or the adapter is damaged or has no LoRA matrices, or the evidence has no maximum.
        FloatingPointError: A score is NaN.
        UsageError: Ray has not the room for the task.
    """
    from components.data.prompts import PromptEncoder
    from components.models.base import load_tokenizer
    from components.posthoc.laplace.files import save_posterior

    config = job.config
    tokenizer = load_tokenizer(job.resolved, config.model)
    encoder = PromptEncoder(tokenizer, config.data.prompt, config.data.max_length)
    questions = encoder.encode_all(job.data.splits["train"].questions)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    work = (config, job.resolved, job.adapter.resolve(), questions, pad_id)
    apart = config.evaluation.actors > 1 or config.resources.use_gpu
    posterior: Posterior | None = None
    for item in _in_a_task(config, work) if apart else fitting(*work, device="cpu"):
        if isinstance(item, int):
            on_progress(item)
        else:
            posterior = item
    assert posterior is not None
    save_posterior(job.adapter, posterior)
    return posterior.figures


def fitting(
    config: RunConfig,
    resolved: ResolvedModel,
    adapter: Path,
    questions: Sequence[EncodedQuestion],
    pad_id: int,
    device: str,
) -> Iterator[int | Posterior]:
    """Yields the number of questions done since the last time, over and over, and the posterior in the end."""
    from components.models.adapter_files import load_adapter
    from components.models.base import load_model
    from components.models.scoring import ScoringModel
    from components.posthoc.laplace.fit import PosteriorFit

    model, _ = load_adapter(adapter, load_model(resolved, config.model))
    fit = PosteriorFit(ScoringModel(model).to(device).eval(), config.laplace, config.seed)
    yield from fit.over(questions, pad_id=pad_id, token_budget=config.evaluation.batch_tokens)
    yield fit.posterior()


def _in_a_task(config: RunConfig, work: tuple[Any, ...]) -> Iterator[Any]:
    """`fitting` in a process that Ray starts where there is room; its errors arrive as they are."""
    import ray

    from ray_jobs.cluster import connect, resources_per_actor

    connect()
    cores, gpus = resources_per_actor(config.resources, 1)
    remote: Any = ray.remote(fitting).options(num_returns="streaming", num_cpus=cores, num_gpus=gpus)
    try:
        for item in remote.remote(*work, device="cuda" if gpus else "cpu"):
            yield ray.get(item)
    except ray.exceptions.RayTaskError as problem:
        raise problem.cause if problem.cause is not None else problem from None
