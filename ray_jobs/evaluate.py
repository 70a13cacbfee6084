"""Evaluating a model, with or without an adapter, on the splits of a run: in this process, or on actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.config import RunConfig
from components.data.prepare import PreparedData
from components.evaluation.predictions import Predictions
from components.models.base import ResolvedModel


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate.

    Attributes:
        config: The run.
        data: Its prepared data.
        resolved: The base model.
        adapter: An adapter folder; None for the base model alone.
        splits: Names of the splits to score.
    """

    config: RunConfig
    data: PreparedData
    resolved: ResolvedModel
    adapter: Path | None
    splits: Sequence[str]


def evaluate(job: EvaluationJob, on_progress: Callable[[int], None]) -> dict[str, Predictions]:
    """Scores every question of the splits.

    One actor and no GPU: in this process. Otherwise through Ray Data, which puts each actor where its cores, and with
    `resources.use_gpu` its GPU, are. The batches are the same either way, and so are the results.

    Args:
        job: What to evaluate.
        on_progress: Called with the number of questions done since the last call.

    Returns:
        Predictions by split.

    Raises:
        CaltuneError: The model or the adapter is damaged, or actors made no progress.
        UsageError: More actors were asked for than Ray has room for.
        FloatingPointError: A score is NaN.
    """
    from components.data.prompts import PromptEncoder
    from components.evaluation.score_split import predictions_of
    from components.models.base import load_tokenizer
    from ray_jobs.evaluation_actors import score_on_actors
    from ray_jobs.scorer import Scorer, ScorerSpec

    config = job.config
    tokenizer = load_tokenizer(job.resolved, config.model)
    encoder = PromptEncoder(tokenizer, config.data.prompt, config.data.max_length)
    encoded = {split: encoder.encode_all(job.data.splits[split].questions) for split in job.splits}
    adapter = None if job.adapter is None else job.adapter.resolve()  # an actor has a current folder of its own
    spec = ScorerSpec(config, job.resolved, adapter, int(tokenizer.pad_token_id))  # type: ignore[arg-type]
    if config.evaluation.actors > 1 or config.resources.use_gpu:
        scores = score_on_actors(spec, encoded, on_progress)
    else:
        scorer = Scorer(spec, "cpu")
        scores = {split: scorer.scores(questions, on_progress) for split, questions in encoded.items()}
    return {split: predictions_of(job.data.splits[split].questions, scores[split]) for split in job.splits}
