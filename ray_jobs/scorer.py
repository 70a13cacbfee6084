"""A model ready to score questions, with whatever its adapter folder adds: in this process, or in an actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import RunConfig
from components.models.base import ResolvedModel

if TYPE_CHECKING:
    from components.data.prompts import EncodedQuestion
    from components.evaluation.checks import FloatArray
    from components.models.generate import Answers
    from components.models.score_questions import SplitScores


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

        model, head = load_model(spec.resolved, spec.config.model), None
        flc_over = spec.config.model.mixlora.flc_over
        if spec.adapter is not None:
            model, head = load_adapter(spec.adapter, model)  # type: ignore[assignment]
            head = head.to(device) if head is not None else None
            # Averaged over the tokens that it was trained over, whatever the run file says by now.
            record = read_json(spec.adapter / METADATA_FILE, remedy="train the adapter again")["adapter"]
            flc_over = record.get("flc_over", flc_over)  # an adapter without routers has no such field
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

    def answers(
        self,
        questions: Sequence[EncodedQuestion],
        kept: Path | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> tuple[list[Answers], FloatArray | None]:
        """Has open-ended questions answered, greedily and by samples, under the calibrated distribution.

        Args:
            questions: At least one.
            kept: A folder for answers by chunks; what is found there of the same model is taken.
            on_progress: Called with the number of questions done since the last call.

        Returns:
            Answers, and for a model with routers their confidence in each prompt, [n].

        Raises:
            ModelError: A prompt leaves the model no room for an answer.
            FloatingPointError: A log-probability or a router's confidence is NaN.
        """
        from components.evaluation.score_split import without_rounding
        from components.models.base import load_tokenizer
        from components.models.generate import Generator, Settings

        config, resolved = self.spec.config, self.spec.resolved
        wanted = config.generation
        settings = Settings(wanted.samples, wanted.max_new_tokens, config.seed, wanted.rows)
        tokenizer = load_tokenizer(resolved, config.model)
        generator = Generator(self.model.model, self.head, tokenizer, settings, self.device)
        found = generator.answer(questions, kept=kept, key=self._identity(), on_progress=on_progress)
        routed = self.scores(questions).flc if self.has_routers else None
        return found, without_rounding(routed)

    @property
    def has_routers(self) -> bool:
        """Whether the model states a router confidence."""
        from components.models.mixlora.inject import recorder_of

        return recorder_of(self.model) is not None

    def _identity(self) -> str:
        """Names the weights: of the base model and of the adapter."""
        from components.models.adapter_checks import METADATA_FILE
        from components.models.smollm2 import sha256_of

        spec = self.spec
        adapter = "" if spec.adapter is None else sha256_of(spec.adapter / METADATA_FILE)
        return "/".join([spec.resolved.path_or_id, spec.resolved.revision or "", spec.config.model.dtype, adapter])
