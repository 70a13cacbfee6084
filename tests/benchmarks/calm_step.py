"""What a CALM step costs beside an SFT step, and how close that is to the counted limit.

Counting a forward pass and a backward pass through a frozen base as 1 each, an SFT step is 2. A CALM step needs T
gradients of the lower level (2T; the one at theta serves the residual and the first inner step), the gradient of the
upper level (2) and a forward pass at the surrogate (1): 2T + 3, so the limit of the ratio is (2T + 3) / 2. That holds
for batches of equal size; here the upper level reads the same rows as the lower one.

    make bench        or        python tests/benchmarks/calm_step.py --repeats 9

Steps of both kinds alternate, so a machine that slows down slows both; the ratio is the median over repetitions.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from components.config import AdapterConfig, ModelConfig
from components.config_data import PromptConfig
from components.config_methods import CalmConfig
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.base import load_model, load_tokenizer, resolve_model
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel
from components.training.feed import Feed
from components.training.lower_losses import AnswerLoss
from components.training.parameter_space import TorchSpace, block_groups
from components.training.steps import CalmStep, SupervisedStep

INNER_STEPS = (1, 5)
PROMPT = PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" ")


def build(batch_size: int) -> tuple[Callable[[int], object], dict[int, Callable[[int], object]]]:
    """An SFT step and a CALM step for each T, on one model, over the same batches."""
    config = ModelConfig(adapter=AdapterConfig(r=8, alpha=16))
    resolved = resolve_model(config)
    tokenizer = load_tokenizer(resolved, config)
    base = load_model(resolved, config)
    model = attach_adapter(base, config.adapter, seed=0)
    scoring = ScoringModel(model).train()
    theta = trainable_parameters(model)
    questions = PromptEncoder(tokenizer, PROMPT, 256).encode_all(build_facts("geography", 0).questions[:256])
    feed = Feed(questions, batch_size, "gold", 0, pad_id=int(tokenizer.pad_token_id))
    sft = SupervisedStep(TorchSpace({}, theta, torch.optim.AdamW(block_groups({}, theta))), AnswerLoss(scoring, feed))
    head = CalibrationHead(base.config.vocab_size)
    alpha = {name: p for name, p in head.named_parameters() if p.requires_grad}
    space = TorchSpace(alpha, theta, torch.optim.AdamW(block_groups(alpha, theta)))
    vocabulary = CalmConfig(entropy_over="vocabulary")
    lower = AnswerLoss(scoring, feed, head)
    return sft, {
        t: CalmStep(space, lower, scoring, head, replace(feed), vocabulary.model_copy(update={"inner_steps": t}))
        for t in INNER_STEPS
    }


def seconds(step: Callable[[int], object], number: int) -> float:
    """Wall time of one step."""
    begun = time.perf_counter()
    step(number)
    return time.perf_counter() - begun


def measure(repeats: int, batch_size: int) -> list[dict[str, float]]:
    """Ratio of a CALM step to the SFT steps before and after it, over the same questions."""
    sft, calm = build(batch_size)
    for step in (sft, *calm.values()):
        step(0)
    rows = []
    for t, step in calm.items():
        ratios, base = [], []
        for number in range(repeats):
            before, this, after = seconds(sft, number), seconds(step, number), seconds(sft, number)
            ratios.append(2 * this / (before + after))
            base.append((before + after) / 2)
        limit = (2 * t + 3) / 2
        ratio = statistics.median(ratios)
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "T": t,
                "sft_step_s": statistics.median(base),
                "ratio": ratio,
                "ratio_q1": quartiles[0],
                "ratio_q3": quartiles[2],
                "limit": limit,
                "ratio_over_limit": ratio / limit,
            }
        )
    return rows


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats, arguments.batch_size)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"SmolLM2-135M-Instruct, LoRA r 8, batch {arguments.batch_size}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads, {platform.machine()}")
    print("  T   SFT step   CALM / SFT   (quartiles)     limit   over limit")
    for row in rows:
        print(
            f"{row['T']:>3} {row['sft_step_s']:>9.2f}s {row['ratio']:>12.2f}   "
            f"({row['ratio_q1']:.2f}-{row['ratio_q3']:.2f}) {row['limit']:>9.2f} {row['ratio_over_limit']:>11.2f}"
        )


if __name__ == "__main__":
    main()
