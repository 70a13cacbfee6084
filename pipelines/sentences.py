"""What a run says in words while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.training.expert_load import LOAD_FILE

if TYPE_CHECKING:
    from components.data.prepare import PreparedData
    from ray_jobs.worker_files import Start


def headline(row: Mapping[str, float]) -> str:
    """The few numbers worth showing beside a progress bar."""
    shown = ("loss", "g", "f", "mean_tau", "flc_mean", "correct_share", "validation/nll", "validation/ece")
    return "  ".join(f"{key} {row[key]:.3f}" for key in shown if key in row)


def start_sentences(method: str, start: Start) -> list[str]:
    """What a person should know of a start of workers."""
    sentences = [f"{method}: {sentence}" for sentence in start.passed_over]
    if start.number > 1:
        sentences.append(
            f"{method}: workers were lost, or there is room for more; {start.workers} go on from step {start.from_step}"
        )
    return sentences


def collapse_sentence(method: str, row: Mapping[str, float]) -> str:
    """A router that hardly chooses any more, in words."""
    return (
        f"{method}, step {int(row['step'])}: a router sends {row['max_expert_share']:.0%} of its tokens to one expert "
        f"first; see {LOAD_FILE}, raise uq4ct.balance_weight or lower uq4ct.router_learning_rate"
    )


def overlap_sentences(data: PreparedData) -> list[str]:
    """Questions that stand in two splits, in words."""
    policy = data.manifest["overlap_policy"]
    did = "dropped from the earlier one" if policy == "drop" else "kept"
    return [
        f"{overlap.questions} question texts stand in {overlap.first} and in {overlap.second} "
        f"({overlap.same_choices} with the same choices); {did}"
        for overlap in data.overlaps
    ]
