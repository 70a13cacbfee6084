"""A model ready to score questions, with whatever its adapter folder adds: in this process, or in an actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import RunConfig
from components.models.base import ResolvedModel
from components.training.methods import prediction_of

if TYPE_CHECKING:
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
        from components.models.scoring import ScoringModel
        from components.posthoc.laplace.files import load_posterior
        from components.posthoc.laplace.layers import lora_layers

        model, head = load_model(spec.resolved, spec.config.model), None
        flc_over = spec.config.model.mixlora.flc_over
        self.posterior: Posterior | None = None
        if spec.adapter is not None:
            model, head = load_adapter(spec.adapter, model)  # type: ignore[assignment]
            head = head.to(device) if head is not None else None
            # Averaged over the tokens that it was trained over, whatever the run file says by now.
            metadata = read_json(spec.adapter / METADATA_FILE, remedy="train the adapter again")
            record = metadata["adapter"]
            flc_over = record.get("flc_over", flc_over)  # an adapter without routers has no such field
            if prediction_of(metadata["method"]) == "laplace":
                self.posterior = load_posterior(spec.adapter, lora_layers(model))
        self.spec, self.device, self.head = spec, device, head
        self.model = ScoringModel(model, flc_over).to(device).eval()

    def scores(
        self, questions: Sequence[EncodedQuestion], on_progress: Callable[[int], None] | None = None
    ) -> SplitScores:
        """Scores questions, in batches of similar length.

        Args:
            questions: At least one.
            on_progress: Called with the number of questions done since the last call.

        Raises:
            FloatingPointError: A score or a router's confidence is NaN.
        """
        from components.models.score_questions import score_questions
        from components.posthoc.laplace.predict import score_with_posterior

        if self.posterior is not None:
            return score_with_posterior(
                self.model,
                self.posterior,
                questions,
                pad_id=self.spec.pad_id,
                token_budget=self.spec.config.evaluation.batch_tokens,
                device=self.device,
                on_progress=on_progress,
            )
        return score_questions(
            self.model,
            self.head,
            questions,
            pad_id=self.spec.pad_id,
            token_budget=self.spec.config.evaluation.batch_tokens,
            flc_of=self.model.flc,
            device=self.device,
            on_progress=on_progress,
        )
