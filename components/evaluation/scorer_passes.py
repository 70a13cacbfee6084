"""The forward passes that a method's answers are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from components.config_bayes import BlobConfig, EnsembleConfig, McDropoutConfig
from components.models.averaging import COMBINE, Combine, mean_of_probabilities
from components.models.passes import MemberPass, NoisyPass, switch_dropout_on, switch_sampling_on
from components.models.score_questions import LogitsAt
from components.models.scoring import ScoringModel
from components.training.methods import METHODS


@dataclass(frozen=True)
class PassSettings:
    """How many passes a method's answers are made from, and what becomes of them.

    Attributes:
        seed: Of the noise.
        mc_dropout: For `mc_dropout`.
        ensemble: For `ensemble`.
        blob: For `blob`.
    """

    seed: int = 0
    mc_dropout: McDropoutConfig = field(default_factory=McDropoutConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    blob: BlobConfig = field(default_factory=BlobConfig)


@dataclass(frozen=True)
class Passes:
    """Forward passes, and what is made of their scores.

    Attributes:
        logits: One for each pass, at least one.
        combine: Makes one scoring of theirs.
    """

    logits: Sequence[LogitsAt]
    combine: Combine = mean_of_probabilities


def passes_of(
    method: str, model: ScoringModel, members: Sequence[Mapping[str, Tensor]], settings: PassSettings
) -> Passes:
    """The passes of an adapter's method; how many there are, whoever evaluates says.

    Args:
        method: As the adapter folder names it. A name that is none of METHODS', as an imported adapter's or that of a
            single member, takes one pass.
        model: In evaluation mode, on its device.
        members: The values of an ensemble's members.
        settings: How many, and which noise.
    """
    known = {str(name): each.prediction for name, each in METHODS.items()}
    prediction = known.get(method, "point")
    if members:
        parameters = dict(model.model.named_parameters())
        places = {name: parameters[name] for name in members[0]}
        return Passes([MemberPass(model, places, values) for values in members], COMBINE[settings.ensemble.combine])
    if prediction == "mc_dropout" and switch_dropout_on(model):
        return Passes([NoisyPass(model, settings.seed, s) for s in range(settings.mc_dropout.samples)])
    if prediction == "blob" and settings.blob.samples and switch_sampling_on(model):
        return Passes([NoisyPass(model, settings.seed, s) for s in range(settings.blob.samples)])
    return Passes([model])
