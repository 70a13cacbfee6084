"""Every method is three choices: what trains, what it minimises, what is fitted afterwards.

The third choice, recalibration, is the run file's (`recalibrate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.config import AdapterSpec, MethodName, ModelConfig


@dataclass(frozen=True)
class Method:
    """A named method.

    Attributes:
        name: As in run files and tables.
        adapter: What is trained on top of the model: `lora` is the run file's `model.adapter`, whatever its kind,
            `mixlora` its `model.mixlora`.
        lower: What the weights minimise.
        bilevel: Whether CALM's upper level trains a calibration head beside the weights.
        summary: One line for help and reports.
        prediction: How its answers' probabilities are made: from one forward pass, or from several or a posterior.
    """

    name: MethodName
    adapter: Literal["none", "lora", "mixlora"]
    lower: Literal["none", "cross_entropy", "uq4ct"]
    bilevel: bool
    summary: str
    prediction: Literal["point", "mc_dropout", "ensemble", "laplace", "blob"] = "point"

    @property
    def trains_adapter(self) -> bool:
        """Whether there is anything to train."""
        return self.adapter != "none"

    def adapter_spec(self, config: ModelConfig) -> AdapterSpec:
        """What to attach to the base model; only for a method that trains."""
        return config.mixlora if self.adapter == "mixlora" else config.adapter


METHODS: dict[MethodName, Method] = {
    method.name: method
    for method in (
        Method("base", "none", "none", False, "the model as it is"),
        Method("sft", "lora", "cross_entropy", False, "fine-tuning by cross-entropy on the answers"),
        Method("calm", "lora", "cross_entropy", True, "bilevel: cross-entropy below, predictive entropy above"),
        Method(
            "laplace",
            "lora",
            "cross_entropy",
            False,
            "fine-tuning with weight decay, then a Gaussian posterior of the LoRA weights",
            prediction="laplace",
        ),
        Method("uq4ct", "mixlora", "uq4ct", False, "experts whose router learns how likely the answer is right"),
        Method("calm_uq4ct", "mixlora", "uq4ct", True, "bilevel: UQ4CT's loss below, predictive entropy above"),
    )
}


def prediction_of(name: str) -> str:
    """A method's `prediction`, by the name in an adapter folder, which may be that of a method not known here."""
    return next((method.prediction for method in METHODS.values() if method.name == name), "point")
