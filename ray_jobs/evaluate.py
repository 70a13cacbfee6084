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
    from components.files import read_json
    from components.models.adapter_checks import METADATA_FILE
    from components.models.adapter_files import load_adapter
    from components.models.base import load_model, load_tokenizer
    from components.models.score_questions import score_questions
    from components.models.scoring import ScoringModel

    device = "cuda" if job.config.resources.use_gpu and torch.cuda.is_available() else "cpu"
    model, head, flc_over = load_model(job.resolved, job.config.model), None, job.config.model.mixlora.flc_over
    if job.adapter is not None:
        model, head = load_adapter(job.adapter, model)  # type: ignore[assignment]
        head = head.to(device) if head is not None else None
        # Averaged over the tokens that it was trained over, whatever the run file says by now.
        record = read_json(job.adapter / METADATA_FILE, remedy="train the adapter again")["adapter"]
        flc_over = record.get("flc_over", flc_over)  # an adapter without routers has no such field
    scoring = ScoringModel(model, flc_over).to(device).eval()
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
            flc_of=scoring.flc,
            device=device,
            on_progress=on_progress,
        )
        found[split] = predictions_of(questions, scores)
    return found
