"""Every method is three choices: what trains, what it minimises, what is fitted afterwards.

The third choice, recalibration, is the run file's (`recalibrate`) and applies to any method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.config import MethodName


@dataclass(frozen=True)
class Method:
    """A named method.

    Attributes:
        name: As in run files and tables.
        trains_adapter: Whether there is anything to train.
        head: Whether the calibration head is trained beside the adapter.
        objective: What the loop's step minimises.
        summary: One line for help and reports.
    """

    name: MethodName
    trains_adapter: bool
    head: bool
    objective: Literal["none", "cross_entropy", "calm"]
    summary: str


METHODS: dict[MethodName, Method] = {
    method.name: method
    for method in (
        Method("base", False, False, "none", "the model as it is"),
        Method("sft", True, False, "cross_entropy", "fine-tuning by cross-entropy on the answers"),
        Method("calm", True, True, "calm", "bilevel: cross-entropy below, predictive entropy above"),
    )
}
