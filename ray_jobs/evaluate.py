"""Evaluating a model, with or without an adapter, on the splits of a run."""

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
    """Scores every question of the splits in this process.

    Args:
        job: What to evaluate.
        on_progress: Called with the number of questions done since the last call.

    Returns:
        Predictions by split.
    """
    import torch

    from components.data.prompts import PromptEncoder
    from components.evaluation.score_split import predictions_of
    from components.models.adapter_files import load_adapter
    from components.models.base import load_model, load_tokenizer
    from components.models.score_questions import score_questions
    from components.models.scoring import ScoringModel

    device = "cuda" if job.config.resources.use_gpu and torch.cuda.is_available() else "cpu"
    model, head = load_model(job.resolved, job.config.model), None
    if job.adapter is not None:
        model, head = load_adapter(job.adapter, model)  # type: ignore[assignment]
        head = head.to(device) if head is not None else None
    scoring = ScoringModel(model).to(device).eval()
    tokenizer = load_tokenizer(job.resolved, job.config.model)
    encoder = PromptEncoder(tokenizer, job.config.data.prompt, job.config.data.max_length)
    found = {}
    for split in job.splits:
        questions = job.data.splits[split].questions
        scores = score_questions(
            scoring,
            head,
            encoder.encode_all(questions),
            pad_id=int(tokenizer.pad_token_id),  # type: ignore[arg-type]
            token_budget=job.config.evaluation.batch_tokens,
            device=device,
            on_progress=on_progress,
        )
        found[split] = predictions_of(questions, scores)
    return found
