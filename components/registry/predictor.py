"""A trained model that answers questions: the very numbers of its evaluation, with confidence and abstention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.data.prompts import EncodedQuestion, PromptEncoder, PromptError
from components.data.rows import Place
from components.data.schema import OpenQuestion, Question
from components.errors import CaltuneError, ModelError, UsageError
from components.evaluation.open_predictions import SEQUENCE, SEQUENCE_SUM
from components.evaluation.predictions import FLC, SOFTMAX, Predictions
from components.registry.abstention_policy import AbstentionPolicy, read_policies
from components.registry.asked import Asked, read_asked
from components.registry.folder_spec import read_recalibration, read_spec
from components.registry.locate import adapter_folder
from components.registry.prediction import Prediction, Refusal

if TYPE_CHECKING:
    from components.evaluation.checks import FloatArray

Progress = Callable[[int], None]
Policy = AbstentionPolicy | str | None


@dataclass(frozen=True)
class Ready:
    """A question that can be answered."""

    asked: Asked
    encoded: EncodedQuestion


class Predictor:
    """One copy of a trained model. One thread at a time may use it.

    Args:
        folder: An adapter folder; it is not needed any more afterwards. `temperature.json` and its like beside the
            adapter, as a version of a recalibrated method has, are applied; `abstention.json` holds the policies.
        base_model: Where the base model is, if not where the folder says: a folder or a hub id.
        max_length: Longest question in tokens with its longest option; by default what its run allowed, or as many
            positions as the model has where these are fewer.
        device: Where the model goes.
        trust_remote_code: Allow the base model's own Python code from the hub to run.

    Attributes:
        method: That trained it.
        policies: By name.
        max_length: As above.
        identity: Names weights, recalibration and limit; equal for two predictors that give the same numbers.

    Raises:
        ModelError: The folder or the base model is damaged, or they do not belong together.
        UsageError: `max_length` exceeds the model's positions.
    """

    def __init__(
        self,
        folder: Path,
        *,
        base_model: str | None = None,
        max_length: int | None = None,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        from components.evaluation.scorer import Scorer, ScorerSpec
        from components.models.base import load_tokenizer, resolve_model

        own = read_spec(folder, base_model, trust_remote_code)
        self.method, self.policies = own.method, read_policies(folder)
        self._fitted = read_recalibration(folder)
        try:
            resolved = resolve_model(own.model)
        except ModelError as problem:
            raise ModelError(f"{folder}: its base model: {problem} (base_model names another place)") from problem
        tokenizer = load_tokenizer(resolved, own.model)
        pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        self._scorer = Scorer(ScorerSpec(own.model, resolved, folder, pad_id, own.passes, own.batch_tokens), device)
        self._encoder = PromptEncoder(tokenizer, own.prompt, sys.maxsize)  # the limit is ours, so that it names the row
        self._room = _positions(self._scorer.model.model)
        self.max_length = min(own.max_length, self._room) if max_length is None else max_length
        if self.max_length > self._room:
            raise UsageError(f"max_length is {max_length}, but the model has {self._room} positions")
        self.identity = "/".join([self._scorer.identity, str(self._fitted), str(self.max_length)])

    def predict(
        self, questions: Sequence[Mapping[str, Any]], policy: Policy = None, on_progress: Progress | None = None
    ) -> list[Prediction]:
        """Answers questions, in batches of similar length.

        Scores are those of the evaluation of the same questions; where batches are formed differently, float32 rounding
        differs. Methods that draw noise (`mc_dropout`, `blob`) draw it anew for every batch's composition.

        Args:
            questions: Each `{"question", "choices"}`, with an `id` if wanted; without `choices` it is open-ended and
                answered greedily. A label may stand beside them and is not looked at.
            policy: A policy, or the name of one of the adapter's; None takes the adapter's default one, if it has any.
            on_progress: Called with the number of questions done since the last call.

        Returns:
            One prediction a question, in their order.

        Raises:
            DataError: A question is malformed or too long, is open-ended where this model cannot answer such, or has
                not the confidence that the policy reads; `questions:3` names the third.
            UsageError: There is no such policy, or it reads a confidence that the model does not state.
            FloatingPointError: A score is NaN.
        """
        chosen = self.policy(policy)
        ready = [self.read(row, *place, chosen) for row, place in _places(questions)]
        return self._answer(ready, chosen, on_progress)

    def predict_each(
        self, questions: Sequence[object], policy: Policy = None, places: Sequence[tuple[Place, str]] | None = None
    ) -> list[Prediction | Refusal]:
        """As `predict`, but a question that cannot be answered gets its reason and spoils no other.

        Args:
            questions: As for `predict`; anything else is refused in its place.
            policy: As for `predict`.
            places: For each question where it stands, for its error, and its id if it has none.

        Raises:
            UsageError: As for `predict`.
        """
        chosen = self.policy(policy)
        found: list[Prediction | Refusal | None] = [None] * len(questions)
        ready: dict[int, Ready] = {}
        pairs = _places(questions) if places is None else list(zip(questions, places, strict=True))
        for number, (row, place) in enumerate(pairs):
            try:
                ready[number] = self.read(row, *place, chosen)
            except CaltuneError as problem:
                found[number] = Refusal(problem)
        for number, result in zip(ready, self.answer_each(list(ready.values()), chosen), strict=True):
            found[number] = result
        return [result for result in found if result is not None]

    def policy(self, policy: Policy) -> AbstentionPolicy | None:
        """The policy in force.

        Raises:
            UsageError: The adapter has none of that name, or it reads a confidence that the model does not state.
        """
        chosen = policy if isinstance(policy, AbstentionPolicy) else self.policies.choose(policy)
        known = dict.fromkeys([*self.sources(open_ended=False), *self.sources(open_ended=True)])
        if chosen is not None and chosen.source not in known:
            raise UsageError(
                f"the abstention policy reads confidence '{chosen.source}', which is not stated by this model; there "
                f"is: {', '.join(known)}"
            )
        return chosen

    def sources(self, *, open_ended: bool) -> tuple[str, ...]:
        """Confidence sources of multiple-choice or of open-ended questions."""
        routed = (FLC,) if self._scorer.has_routers else ()
        if open_ended:
            return (SEQUENCE, SEQUENCE_SUM, *routed)
        return (SOFTMAX,) if self._fitted is not None else (SOFTMAX, *routed)

    def read(self, row: object, place: Place, default_id: str, policy: AbstentionPolicy | None) -> Ready:
        """Makes a row ready to be answered; the model is not asked yet.

        Args:
            row: As in `predict`.
            place: Where it stands.
            default_id: Its id, if it has none.
            policy: The one in force.

        Raises:
            DataError: As for `predict`.
        """
        asked = read_asked(row, place, default_id)
        open_ended = isinstance(asked.question, OpenQuestion)
        if open_ended and (reason := self._open_misfit()):
            raise place.error("choices", "is missing, so the question is open-ended", reason)
        if policy is not None and policy.source not in (there := self.sources(open_ended=open_ended)):
            kind = "an open-ended" if open_ended else "a multiple-choice"
            what = f"the abstention policy reads confidence '{policy.source}'; of {kind} question there is"
            raise place.error(None, f"{what} {', '.join(there)}")
        try:
            encoded = self._encoder.encode(asked.question)
        except PromptError as problem:
            raise place.error("question", str(problem)) from problem
        longest = len(encoded.prompt) + (0 if open_ended else max(map(len, encoded.options)))
        most = min(self.max_length, self._room - self._new_tokens) if open_ended else self.max_length
        if longest > most:
            what = "" if open_ended else " with its longest choice"
            raise place.error("question", f"is {longest} tokens long{what}", f"at most {most} are possible")
        return Ready(asked, encoded)

    @property
    def _new_tokens(self) -> int:
        return self._scorer.spec.generation.max_new_tokens

    def _open_misfit(self) -> str | None:
        from components.training.methods import METHODS

        known = {str(name): each.prediction for name, each in METHODS.items()}
        if known.get(self.method, "point") != "point":
            return f"'{self.method}' averages over options; give the question choices"
        return None if self._fitted is None else "the recalibration changes scores of options; give it choices"

    def answer_each(self, ready: Sequence[Ready], policy: AbstentionPolicy | None) -> list[Prediction | Refusal]:
        """Answers what `read` has made ready, which another thread may do meanwhile; NaN refuses its question alone."""
        try:
            return list(self._answer(ready, policy, None))
        except FloatingPointError:
            return [self._alone(one, policy) for one in ready]

    def _alone(self, one: Ready, policy: AbstentionPolicy | None) -> Prediction | Refusal:
        try:
            return self._answer([one], policy, None)[0]
        except FloatingPointError as problem:
            return Refusal(one.asked.place.error(None, str(problem)))

    def _answer(
        self, ready: Sequence[Ready], policy: AbstentionPolicy | None, on_progress: Progress | None
    ) -> list[Prediction]:
        found: dict[int, Prediction] = {}
        parts: tuple[tuple[type, Callable[..., list[Prediction]]], ...]
        parts = ((Question, self._choose), (OpenQuestion, self._speak))
        for kind, answer in parts:
            numbers = [i for i, one in enumerate(ready) if isinstance(one.asked.question, kind)]
            if numbers:
                found |= dict(zip(numbers, answer([ready[i] for i in numbers], policy, on_progress), strict=True))
        return [found[i] for i in range(len(ready))]

    def _choose(
        self, ready: Sequence[Ready], policy: AbstentionPolicy | None, on_progress: Progress | None
    ) -> list[Prediction]:
        """Answers multiple-choice questions."""
        from components.evaluation.recalibrate import apply
        from components.evaluation.score_split import predictions_of

        questions = [one.asked.question for one in ready if isinstance(one.asked.question, Question)]
        scores = self._scorer.scores([one.encoded for one in ready], on_progress)
        # Several callers may use the same id, of which predictions have one a question.
        found: Predictions = predictions_of([replace(q, id=str(i)) for i, q in enumerate(questions)], scores)
        if self._fitted is not None:
            found = apply(self._fitted, {"": found})[""]
        stated = {source: found.confidence(source) for source in found.sources}
        abstained = _abstained(policy, stated, len(questions))
        return [
            Prediction(
                question.id,
                question.choices[found.answer[i]],
                int(found.answer[i]),
                {source: float(values[i]) for source, values in stated.items()},
                tuple(found.probabilities[i, : found.n_options[i]].tolist()),
                abstained[i],
            )
            for i, question in enumerate(questions)
        ]

    def _speak(
        self, ready: Sequence[Ready], policy: AbstentionPolicy | None, on_progress: Progress | None
    ) -> list[Prediction]:
        """Answers open-ended questions, greedily."""
        answers, flc = self._scorer.answers([one.encoded for one in ready], None, on_progress, greedy_alone=True)
        log_probs = np.array([min(own.greedy.log_prob, 0.0) for own in answers])  # rounding may pass 0
        tokens = np.array([own.greedy.tokens for own in answers])
        stated = {SEQUENCE: np.exp(log_probs / tokens), SEQUENCE_SUM: np.exp(log_probs)}
        stated |= {} if flc is None else {FLC: flc}
        abstained = _abstained(policy, stated, len(ready))
        return [
            Prediction(
                one.asked.question.id,
                own.greedy.text,
                None,
                {source: float(values[i]) for source, values in stated.items()},
                None,
                abstained[i],
            )
            for i, (one, own) in enumerate(zip(ready, answers, strict=True))
        ]


def load_predictor(path_or_model_uri: str | Path, *, tracking_uri: str | None = None, **options: Any) -> Predictor:
    """A predictor from what a training has left.

    Args:
        path_or_model_uri: An adapter folder, `runs:/<run id>/<artifact path>`, `models:/<name>@<alias>` or
            `models:/<name>/<version>`.
        tracking_uri: MLflow server or database; by default MLFLOW_TRACKING_URI.
        options: Of `Predictor`.

    Raises:
        CaltuneError: As for `adapter_folder` and `Predictor`.
    """
    with adapter_folder(path_or_model_uri, tracking_uri) as folder:
        return Predictor(folder, **options)


def _places(questions: Sequence[Any]) -> list[tuple[Any, tuple[Place, str]]]:
    return [(row, (Place("questions", i + 1), f"question-{i}")) for i, row in enumerate(questions)]


def _positions(model: Any) -> int:
    """Tokens that the model has positions for."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)


def _abstained(policy: AbstentionPolicy | None, stated: Mapping[str, FloatArray], n: int) -> list[bool | None]:
    if policy is None:
        return [None] * n
    return [bool(value) for value in policy.abstains(stated[policy.source])]
