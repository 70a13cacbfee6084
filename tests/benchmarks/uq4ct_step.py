"""What a whole UQ4CT training step costs beside a LoRA step: time, and peak memory of the process.

    make bench        or        python tests/benchmarks/uq4ct_step.py --repeats 9

SmolLM2-135M-Instruct, the quickstart's prompt and batch, ranks equal. Time: steps of both kinds alternate, the ratio is
the median over repetitions. Memory: each kind has a process of its own, whose high-water mark is reset after two steps
and read after two more; model, tokenizer and libraries are in it, as in what a scheduler would have to grant. It is
measured at the quickstart's batch and, by exact match, at a larger one: experts cost the same memory at both (weights,
gradients and two moments, 16 bytes a number), activations grow with the batch.

Three kinds of UQ4CT step, by what counts as correct: `exact_match` under teacher forcing reads the same rows as the
LoRA step, so it shows what experts, routers and losses cost; by letter `options` reads the same tokens too; by text
`options` has the other options ride along in each row and pays for their tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from components.config import AdapterConfig, MixLoraConfig, ModelConfig
from components.config_data import PromptConfig
from components.config_methods import Uq4ctConfig
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.base import load_model, load_tokenizer, resolve_model
from components.models.scoring import ScoringModel
from components.training.feed import Feed
from components.training.lower_losses import AnswerLoss, Uq4ctLoss, options_needed
from components.training.parameter_space import TorchSpace, block_groups
from components.training.steps import SupervisedStep

TEXT = PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" ")
LETTER = PromptConfig(style="plain", template="{question}\n{options}\nAnswer:", delimiter=" ", scoring="letter")
KINDS = ("text, exact_match", "text, options", "letter, options")
RANK = 16
LARGE_BATCH = 96


def build(kind: str, method: str, batch_size: int) -> Callable[[int], Any]:
    """A step of `lora` or `uq4ct` on a model of its own."""
    scoring, correctness = kind.split(", ")
    config = ModelConfig(adapter=AdapterConfig(r=RANK), mixlora=MixLoraConfig(r=RANK))
    resolved = resolve_model(config)
    tokenizer = load_tokenizer(resolved, config)
    spec = config.mixlora if method == "uq4ct" else config.adapter
    module = ScoringModel(attach_adapter(load_model(resolved, config), spec, seed=0)).train()
    theta = trainable_parameters(module)
    space = TorchSpace({}, theta, torch.optim.AdamW(block_groups({}, theta), lr=1e-4))
    encoder = PromptEncoder(tokenizer, TEXT if scoring == "text" else LETTER, 256)
    questions = encoder.encode_all(build_facts("geography", 0).questions[:256])
    uq4ct = Uq4ctConfig(correctness=correctness)  # type: ignore[arg-type]
    options = options_needed(uq4ct) if method == "uq4ct" else "gold"
    feed = Feed(questions, batch_size, options, 0, pad_id=int(tokenizer.pad_token_id))  # type: ignore[arg-type]
    return SupervisedStep(space, Uq4ctLoss(module, feed, uq4ct) if method == "uq4ct" else AnswerLoss(module, feed))


def seconds(step: Callable[[int], Any], number: int) -> float:
    """Wall time of one step."""
    begun = time.perf_counter()
    step(number)
    return time.perf_counter() - begun


def time_ratio(kind: str, repeats: int, batch_size: int) -> tuple[float, float]:
    """Seconds of the LoRA step, and UQ4CT's over the mean of the LoRA steps before and after it."""
    lora, uq4ct = build(kind, "lora", batch_size), build(kind, "uq4ct", batch_size)
    lora(0)
    uq4ct(0)
    ratios, base = [], []
    for number in range(1, repeats + 1):
        before, this, after = seconds(lora, number), seconds(uq4ct, number), seconds(lora, number)
        ratios.append(2 * this / (before + after))
        base.append((before + after) / 2)
    return statistics.median(base), statistics.median(ratios)


def peak_mib(kind: str, method: str, batch_size: int) -> float:
    """Peak resident memory of two steps in MiB, of this process."""
    step = build(kind, method, batch_size)
    step(0)
    step(1)
    Path("/proc/self/clear_refs").write_text("5")
    step(2)
    step(3)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _in_a_process(kind: str, method: str, batch_size: int) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_mib, (kind, method, batch_size))


def memory_ratio(kind: str, batch_size: int) -> dict[str, float]:
    """Peak memory of both steps in MiB, and UQ4CT's over LoRA's."""
    lora, uq4ct = (_in_a_process(kind, method, batch_size) for method in ("lora", "uq4ct"))
    return {"lora_peak_mib": lora, "uq4ct_peak_mib": uq4ct, "memory_ratio": uq4ct / lora}


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for kind in KINDS:
        lora_s, ratio = time_ratio(kind, arguments.repeats, arguments.batch_size)
        row: dict[str, Any] = {
            "kind": kind,
            "batch": arguments.batch_size,
            "lora_step_s": lora_s,
            "time_ratio": ratio,
        }
        if sys.platform == "linux":
            row |= memory_ratio(kind, arguments.batch_size)
        rows.append(row)
    if sys.platform == "linux":
        rows.append({"kind": KINDS[0], "batch": LARGE_BATCH, **memory_ratio(KINDS[0], LARGE_BATCH)})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"SmolLM2-135M-Instruct, r {RANK}, 8 experts, top 2, ", end="")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print("correctness        batch    LoRA step   UQ4CT / LoRA    LoRA peak   UQ4CT peak   UQ4CT / LoRA")
    for row in rows:
        memory = (
            f"{row['lora_peak_mib']:>8.0f} MiB {row['uq4ct_peak_mib']:>8.0f} MiB {row['memory_ratio']:>14.3f}"
            if "memory_ratio" in row
            else ""
        )
        took = f"{row['lora_step_s']:>9.2f}s {row['time_ratio']:>14.2f}" if "time_ratio" in row else " " * 25
        print(f"{row['kind']:<17} {row['batch']:>6} {took} {memory}")


if __name__ == "__main__":
    main()
