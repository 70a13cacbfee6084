"""A model ready to score questions, with whatever its adapter folder adds: in this process, or in an actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import ModelConfig, RunConfig
from components.config_generation import GenerationConfig
from components.models.base import ResolvedModel
from components.training.methods import prediction_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import EncodedQuestion
    from components.evaluation.checks import FloatArray
    from components.evaluation.scorer_passes import PassSettings
    from components.models.generate import Answers
    from components.models.score_questions import SplitScores
    from components.posthoc.laplace.posterior import Posterior


@dataclass(frozen=True)
class ScorerSpec:
    """What a scorer is made from; plain data, so that Ray can carry it.

    Attributes:
        model: How the base model is loaded.
        resolved: The base model.
        adapter: An adapter folder, absolute; None for the base model alone.
        pad_id: Token id that fills rows up.
        passes: Of methods that answer by several passes.
        batch_tokens: Token budget of a batch, padding included.
        generation: How open-ended questions are answered.
    """

    model: ModelConfig
    resolved: ResolvedModel
    adapter: Path | None
    pad_id: int
    passes: PassSettings
    batch_tokens: int
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @classmethod
    def of_run(cls, config: RunConfig, resolved: ResolvedModel, adapter: Path | None, pad_id: int) -> ScorerSpec:
        """What a run evaluates with.

        Args:
            config: The run.
            resolved: The base model.
            adapter: An adapter folder, absolute; None for the base model alone.
            pad_id: Token id that fills rows up.
        """
        from components.evaluation.scorer_passes import PassSettings

        passes = PassSettings(config.seed, config.mc_dropout, config.ensemble, config.blob)
        budget, generation = config.evaluation.batch_tokens, config.generation
        return cls(config.model, resolved, adapter, pad_id, passes, budget, generation)


class Scorer:
    """One copy of the model on one device.

    Args:
        spec: What to load.
        device: Where to.

    Attributes:
        identity: Names the weights: of the base model and of the adapter.

    Raises:
        ModelError: The model or the adapter is damaged, or they do not belong together.
    """

    def __init__(self, spec: ScorerSpec, device: str) -> None:
        from components.evaluation.scorer_passes import passes_of
        from components.models.adapter import merge_adapter
        from components.models.adapter_checks import read_metadata
        from components.models.adapter_extras import fingerprint
        from components.models.adapter_files import load_adapter
        from components.models.base import load_model
        from components.models.ensemble import is_ensemble, load_ensemble
        from components.models.scoring import ScoringModel
        from components.posthoc.laplace.files import load_posterior
        from components.posthoc.laplace.layers import lora_layers

        model, head = load_model(spec.resolved, spec.model), None
        flc_over, method, digest = spec.model.mixlora.flc_over, "base", ""
        members: list[dict[str, Tensor]] = []
        self.posterior: Posterior | None = None
        if spec.adapter is not None:
            record = read_metadata(spec.adapter)
            if is_ensemble(record):
                model, members = load_ensemble(spec.adapter, model)  # type: ignore[assignment]
            else:
                model, head = load_adapter(spec.adapter, model)  # type: ignore[assignment]
            head = head.to(device) if head is not None else None
            digest = fingerprint(spec.adapter)
            # Averaged over the tokens that it was trained over, whatever the run file says by now.
            flc_over = record["adapter"].get("flc_over", flc_over)  # an adapter without routers has no such field
            method = str(record["method"])
            if prediction_of(method) == "laplace":
                self.posterior = load_posterior(spec.adapter, lora_layers(model))
        self.spec, self.device, self.head = spec, device, head
        self.model = ScoringModel(model, flc_over).to(device).eval()
        self.passes = passes_of(method, self.model, members, spec.passes)
        # Routers amplify the rounding of merged attention to 1e-5 of a probability, and experts cannot be merged.
        if prediction_of(method) == "point" and not self.has_routers:
            merge_adapter(model)
        self.identity = "/".join([spec.resolved.path_or_id, spec.resolved.revision or "", spec.model.dtype, digest])

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

        budget = self.spec.batch_tokens
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

    def answers(
        self,
        questions: Sequence[EncodedQuestion],
        kept: Path | None = None,
        on_progress: Callable[[int], None] | None = None,
        *,
        greedy_alone: bool = False,
    ) -> tuple[list[Answers], FloatArray | None]:
        """Has open-ended questions answered, greedily and by samples, under the calibrated distribution.

        Args:
            questions: At least one.
            kept: A folder for answers by chunks; what is found there of the same model is taken.
            on_progress: Called with the number of questions done since the last call.
            greedy_alone: Take no samples.

        Returns:
            Answers, and for a model with routers their confidence in each prompt, [n].

        Raises:
            ModelError: A prompt leaves the model no room for an answer.
            FloatingPointError: A log-probability or a router's confidence is NaN.
        """
        from components.evaluation.score_split import without_rounding
        from components.models.generate import Generator, Settings

        spec, wanted = self.spec, self.spec.generation
        samples = 0 if greedy_alone else wanted.samples
        settings = Settings(samples, wanted.max_new_tokens, spec.passes.seed, wanted.rows)
        generator = Generator(self.model.model, self.head, self._tokenizer, settings, self.device)
        found = generator.answer(questions, kept=kept, key=self.identity, on_progress=on_progress)
        routed = self.scores(questions).flc if self.has_routers else None
        return found, without_rounding(routed)

    @property
    def has_routers(self) -> bool:
        """Whether the model states a router confidence."""
        from components.models.mixlora.inject import recorder_of

        return recorder_of(self.model) is not None

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from components.models.base import load_tokenizer

        return load_tokenizer(self.spec.resolved, self.spec.model)
