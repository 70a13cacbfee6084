"""A model ready to score questions, with whatever its adapter folder adds: in this process, or in an actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import RunConfig
from components.models.base import ResolvedModel
from components.training.methods import prediction_of

if TYPE_CHECKING:
    from torch import Tensor

    from components.data.prompts import EncodedQuestion
    from components.models.score_questions import SplitScores
    from components.posthoc.laplace.posterior import Posterior


@dataclass(frozen=True)
class ScorerSpec:
    """What a scorer is made from; plain data, so that Ray can carry it.

    Attributes:
        config: The run.
        resolved: The base model.
        adapter: An adapter folder, absolute; None for the base model alone.
        pad_id: Token id that fills rows up.
    """

    config: RunConfig
    resolved: ResolvedModel
    adapter: Path | None
    pad_id: int


class Scorer:
    """One copy of the model on one device.

    Args:
        spec: What to load.
        device: Where to.

    Raises:
        ModelError: The model or the adapter is damaged, or they do not belong together.
    """

    def __init__(self, spec: ScorerSpec, device: str) -> None:
        from components.files import read_json
        from components.models.adapter_checks import METADATA_FILE
        from components.models.adapter_files import load_adapter
        from components.models.base import load_model
        from components.models.ensemble import is_ensemble, load_ensemble
        from components.models.scoring import ScoringModel
        from components.posthoc.laplace.files import load_posterior
        from components.posthoc.laplace.layers import lora_layers
        from ray_jobs.scorer_passes import passes_of

        model, head = load_model(spec.resolved, spec.config.model), None
        flc_over, method = spec.config.model.mixlora.flc_over, "base"
        members: list[dict[str, Tensor]] = []
        self.posterior: Posterior | None = None
        if spec.adapter is not None:
            record = read_json(spec.adapter / METADATA_FILE, remedy="train the adapter again")
            if is_ensemble(record):
                model, members = load_ensemble(spec.adapter, model)  # type: ignore[assignment]
            else:
                model, head = load_adapter(spec.adapter, model)  # type: ignore[assignment]
            head = head.to(device) if head is not None else None
            # Averaged over the tokens that it was trained over, whatever the run file says by now.
            flc_over = record["adapter"].get("flc_over", flc_over)  # an adapter without routers has no such field
            method = str(record["method"])
            if prediction_of(method) == "laplace":
                self.posterior = load_posterior(spec.adapter, lora_layers(model))
        self.spec, self.device, self.head = spec, device, head
        self.model = ScoringModel(model, flc_over).to(device).eval()
        self.passes = passes_of(method, self.model, members, spec.config)

    def scores(
        self, questions: Sequence[EncodedQuestion], on_progress: Callable[[int], None] | None = None
    ) -> SplitScores:
        """Scores questions, in batches of similar length, by as many passes as the adapter's method takes.

        Args:
            questions: At least one.
            on_progress: Called with the number of questions done since the last call.

        Raises:
            FloatingPointError: A score or a router's confidence is NaN.
        """
        from components.models.passes import score_by_passes
        from components.models.score_questions import score_questions
        from components.posthoc.laplace.predict import score_with_posterior

        budget = self.spec.config.evaluation.batch_tokens
        if self.posterior is not None:
            return score_with_posterior(
                self.model,
                self.posterior,
                questions,
                pad_id=self.spec.pad_id,
                token_budget=budget,
                device=self.device,
                on_progress=on_progress,
            )
        score = partial(
            score_questions,
            head=self.head,
            pad_id=self.spec.pad_id,
            token_budget=budget,
            flc_of=self.model.flc,
            device=self.device,
        )
        if len(self.passes.logits) == 1:
            return score(self.passes.logits[0], questions=questions, on_progress=on_progress)
        return score_by_passes(
            lambda logits_at, batch: score(logits_at, questions=batch),
            self.passes.logits,
            self.passes.combine,
            questions,
            token_budget=budget,
            on_progress=on_progress,
        )
