"""Evaluating a model, with or without an adapter, on the splits of a run: in this process, or on actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.config import RunConfig
from components.data.prepare import PreparedData
from components.errors import UsageError
from components.evaluation.open_predictions import AnyPredictions
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
        kept: A folder for generated answers, from which an evaluation that was broken off goes on.
    """

    config: RunConfig
    data: PreparedData
    resolved: ResolvedModel
    adapter: Path | None
    splits: Sequence[str]
    kept: Path | None = None


def evaluate(job: EvaluationJob, on_progress: Callable[[int], None]) -> dict[str, AnyPredictions]:
    """Scores every multiple-choice question of the splits, and has every open-ended one answered.

    Scoring with one actor and no GPU: in this process. Otherwise through Ray Data, which puts each actor where its
    cores, and with `resources.use_gpu` its GPU, are. The batches are the same either way, and so are the results.
    Answers are generated in this process, on its GPU with `resources.use_gpu`.

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
    from components.evaluation.judge_answers import clusterer_of, judge_answers
    from components.evaluation.score_split import predictions_of
    from components.evaluation.scorer import Scorer, ScorerSpec
    from components.models.base import load_tokenizer
    from ray_jobs.evaluation_actors import score_on_actors

    config = job.config
    tokenizer = load_tokenizer(job.resolved, config.model)
    encoder = PromptEncoder(tokenizer, config.data.prompt, config.data.max_length)
    encoded = {split: encoder.encode_all(job.data.splits[split].questions) for split in job.splits}
    adapter = None if job.adapter is None else job.adapter.resolve()  # an actor has a current folder of its own
    spec = ScorerSpec.of_run(config, job.resolved, adapter, int(tokenizer.pad_token_id))  # type: ignore[arg-type]
    open_ended = {split: encoded.pop(split) for split in job.splits if job.data.splits[split].open_ended}
    own: Scorer | None = None
    found: dict[str, AnyPredictions] = {}
    if encoded and (config.evaluation.actors > 1 or config.resources.use_gpu):
        scores = score_on_actors(spec, config, encoded, on_progress)
    else:
        own = Scorer(spec, "cpu") if encoded or not config.resources.use_gpu else None
        scores = {split: own.scores(questions, on_progress) for split, questions in encoded.items() if own is not None}
    for split, of in scores.items():
        found[split] = predictions_of(job.data.splits[split].with_choices, of)
    if open_ended:
        answering = own or Scorer(spec, gpu())
        clusterer = clusterer_of(config.generation, answering.device)
        for split, prompts in open_ended.items():
            answers, flc = answering.answers(prompts, job.kept, on_progress)
            asked = job.data.splits[split].without_choices
            found[split] = judge_answers(asked, answers, config.generation, clusterer, flc)
    return {split: found[split] for split in job.splits}


def gpu() -> str:
    """The GPU of this process.

    Raises:
        UsageError: There is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "resources.use_gpu is true, but the process that has open-ended questions answered sees no GPU; start "
            "caltune on a machine with one, or set it to false"
        )
    return "cuda"
