"""What a second actor brings to an evaluation: questions per second with two actors beside one, and one process.

    make bench        or        python tests/benchmarks/evaluation_actors.py --questions 96

SmolLM2-135M-Instruct, the quickstart's prompt. One actor and two get one CPU core each, so the limit of the ratio is 2
where two cores are free. The first quarter of the results is not counted: they come while actors start and load their
model, which takes as long however many questions follow. One process has as many threads as an actor, so its scores
must be the actors' bit for bit, and are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from components.config import ModelConfig, RunConfig
from components.config_data import PromptConfig
from components.data.facts.builder import build_facts
from components.data.prompts import EncodedQuestion, PromptEncoder
from components.evaluation.scorer import Scorer, ScorerSpec
from components.models.base import load_tokenizer, resolve_model
from components.models.score_questions import SplitScores
from ray_jobs.evaluation_actors import score_on_actors

BATCH_TOKENS = 128
PROMPT = PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" ")


class Clock:
    """Notes when how many questions were done."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def __call__(self, done: int) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(done)

    def rate(self) -> float:
        """Questions per second after the first quarter of the results."""
        skip = max(len(self.counts) // 4, 1)
        return sum(self.counts[skip:]) / (self.times[-1] - self.times[skip - 1])


def prepared(questions: int) -> tuple[Callable[[int], tuple[ScorerSpec, RunConfig]], list[EncodedQuestion]]:
    """The scorer's specification and the run by number of actors, and encoded questions."""
    model = ModelConfig()
    resolved = resolve_model(model)
    tokenizer = load_tokenizer(resolved, model)

    def spec(actors: int) -> tuple[ScorerSpec, RunConfig]:
        config = RunConfig.model_validate(
            {
                "run": "bench",
                "data": {"source": {"kind": "facts", "domain": "geography"}},
                "evaluation": {"actors": actors, "batch_tokens": BATCH_TOKENS},
                "resources": {"cpus_per_worker": 1},
            }
        )
        return ScorerSpec.of_run(config, resolved, None, int(tokenizer.pad_token_id)), config  # type: ignore[arg-type]

    encoder = PromptEncoder(tokenizer, PROMPT, 256)
    return spec, encoder.encode_all(build_facts("geography", 0).questions[:questions])


def equal(first: SplitScores, second: SplitScores) -> bool:
    """Whether two sets of scores are the same bit for bit."""
    return np.array_equal(first.log_probs, second.log_probs) and np.array_equal(first.mass, second.mass)


def measure(questions: int) -> dict[str, Any]:
    """Questions per second of a process, an actor and two actors, and whether their scores are the same."""
    spec, encoded = prepared(questions)
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would put the actors behind whatever else runs
    clocks = {name: Clock() for name in ("process", "actor", "actors")}
    alone = Scorer(spec(1)[0], "cpu").scores(encoded, clocks["process"])
    split, by_name = {"split": encoded}, ((1, "actor"), (2, "actors"))
    one, two = (score_on_actors(*spec(n), split, clocks[name])["split"] for n, name in by_name)
    rates = {name: clock.rate() for name, clock in clocks.items()}
    return {
        "questions": len(encoded),
        **{f"{name}_per_s": rate for name, rate in rates.items()},
        "two_over_one": rates["actors"] / rates["actor"],
        "equal": equal(alone, one) and equal(alone, two),
    }


def main() -> None:
    """Measures and prints a line, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    row = measure(arguments.questions)
    if arguments.json:
        print(json.dumps(row, indent=2))
        return
    print(f"SmolLM2-135M-Instruct, {row['questions']} questions, {BATCH_TOKENS} tokens a batch, ", end="")
    print(f"torch {torch.__version__}, 1 thread a process, {platform.machine()}")
    print("questions/s: process   one actor   two actors   two/one   scores equal")
    print(
        f"{row['process_per_s']:>20.2f} {row['actor_per_s']:>11.2f} {row['actors_per_s']:>12.2f} "
        f"{row['two_over_one']:>9.2f}   {'yes' if row['equal'] else 'NO'}"
    )


if __name__ == "__main__":
    main()
