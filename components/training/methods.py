"""Every method is three choices: what trains, what it minimises, what is fitted afterwards.

The third choice, recalibration, is the run file's (`recalibrate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.config import AdapterSpec, MethodName, RunConfig
from components.config_bayes import BlobAdapterConfig
from components.config_methods import CalmConfig

HeadForm = Literal["vocabulary", "scalar"]


@dataclass(frozen=True)
class Method:
    """A named method.

    Attributes:
        name: As in run files and tables.
        adapter: What is trained on top of the model: `lora` is the run file's `model.adapter`, whatever its kind,
            `mixlora` its `model.mixlora`, `blob` is `model.adapter` with a Gaussian for its A.
        lower: What the weights minimise.
        trains_head: Whether a calibration head is trained beside the weights, to raise the entropy on the split
            `calibration`; the stop rule `calm.stop` then decides.
        summary: One line for help and reports.
        levels: For a method that trains a head, how its two objectives come together: CALM's solver, one weighted sum,
            or steps in turn.
        head: Form of the head that the method is defined by; None leaves it to `calm.head`.
        prediction: How its answers' probabilities are made: from one forward pass, or from several or a posterior.
    """

    name: MethodName
    adapter: Literal["none", "lora", "mixlora", "blob"]
    lower: Literal["none", "cross_entropy", "label_smoothing", "cft", "rcft", "uq4ct"]
    trains_head: bool
    summary: str
    levels: Literal["bilevel", "sum", "alternate"] = "bilevel"
    head: HeadForm | None = None
    prediction: Literal["point", "mc_dropout", "ensemble", "laplace", "blob"] = "point"

    @property
    def trains_adapter(self) -> bool:
        """Whether there is anything to train."""
        return self.adapter != "none"

    @property
    def bilevel(self) -> bool:
        """Whether CALM's solver trains it."""
        return self.trains_head and self.levels == "bilevel"

    def head_form(self, config: CalmConfig) -> HeadForm:
        """Form of the calibration head; only for a method that trains one."""
        return self.head or config.head

    def adapter_spec(self, config: RunConfig) -> AdapterSpec:
        """What to attach to the base model; only for a method that trains."""
        lora = config.model.adapter
        if self.adapter == "mixlora":
            return config.model.mixlora
        if self.adapter == "blob":
            fields = lora.model_dump(include={"r", "alpha", "dropout", "target_modules"})
            return BlobAdapterConfig(**fields, init_scale=config.blob.init_scale, prior_std=config.blob.prior_std)
        if self.prediction == "mc_dropout":
            return lora.model_copy(update={"dropout": config.mc_dropout.dropout})
        return lora


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
        Method("label_smoothing", "lora", "label_smoothing", False, "cross-entropy against softened answers"),
        Method("cft", "lora", "cft", False, "answers' cross-entropy, confidence pulled to each bin's accuracy"),
        Method("rcft", "lora", "rcft", False, "as cft, with the questions' text learnt too"),
        Method("regularization", "lora", "cross_entropy", True, "CALM as one weighted sum", levels="sum"),
        Method("iterate", "lora", "cross_entropy", True, "CALM's two objectives in turn", levels="alternate"),
        Method("learned_ts", "lora", "cross_entropy", True, "CALM with one temperature for all", head="scalar"),
        Method(
            "mc_dropout", "lora", "cross_entropy", False, "mean over passes with dropout on", prediction="mc_dropout"
        ),
        Method("ensemble", "lora", "cross_entropy", False, "mean over adapters trained apart", prediction="ensemble"),
        Method(
            "blob", "blob", "cross_entropy", False, "LoRA with a Gaussian posterior, mean over draws", prediction="blob"
        ),
    )
}


def prediction_of(name: str) -> str:
    """A method's `prediction`, by the name in an adapter folder, which may be that of a method not known here."""
    return next((method.prediction for method in METHODS.values() if method.name == name), "point")
