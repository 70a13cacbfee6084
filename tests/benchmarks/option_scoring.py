"""Questions a second by option scoring, beside lm-evaluation-harness: same model, same rows, its own best batch size.

    make bench        or        python tests/benchmarks/option_scoring.py --rows 100 --repeats 3

The harness (`hf` model, 0.4.13) runs a row for each prompt and option, or one a prompt where all options are single
tokens; caltune one a question, with the options side by side behind the prompt. Both tokenise in the time measured.
Timings alternate; the ratio is the median over repetitions. The harness's batch size is the fastest of some on the
first questions. Scores are compared too: a fast wrong number is none.

Rows are those of ARC-Easy's test split where `--data` names it (JSONL, may be gzipped), else built-in facts.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.config import ModelConfig
from components.config_data import PromptConfig
from components.data.batching import batches_by_length
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder, render_prompt
from components.data.schema import Question
from components.models.base import load_model, load_tokenizer, resolve_model
from components.models.score_questions import SplitScores, score_questions
from components.models.scoring import ScoringModel

ARC_EASY = Path(__file__).resolve().parents[3] / "shared" / "data" / "arc_easy" / "test.jsonl.gz"
PROMPTS = {
    "text": PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" "),
    "letter": PromptConfig(style="plain", template="{question}\n{options}\nAnswer:", delimiter=" ", scoring="letter"),
}
TARGETS = {"text": 3.0, "letter": 2.0}
BATCH_SIZES = (1, 4, 16, 64)
BUDGET = 2048


def read_questions(path: Path | None, rows: int) -> list[Question]:
    """The first rows of a file, or built-in facts."""
    if path is None:
        return list(build_facts("geography", 0).with_choices[:rows])
    lines = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = [json.loads(line) for line in lines.decode().splitlines()[:rows]]
    return [Question(str(row["id"]), row["question"], tuple(row["choices"]), row["answer"]) for row in found]


class Ours:
    """caltune's scorer."""

    def __init__(self, model: Any, tokenizer: Any, prompt: PromptConfig) -> None:
        self.model, self.encoder = ScoringModel(model).eval(), PromptEncoder(tokenizer, prompt, 2048)
        self.pad_id = int(tokenizer.pad_token_id)

    def __call__(self, questions: Sequence[Question]) -> SplitScores:
        """Tokenises and scores."""
        encoded = self.encoder.encode_all(questions)
        return score_questions(self.model, None, encoded, pad_id=self.pad_id, token_budget=BUDGET)

    def padding(self, questions: Sequence[Question]) -> float:
        """Share of the tokens computed that nobody reads."""
        encoded = self.encoder.encode_all(questions)
        groups = list(batches_by_length(encoded, BUDGET))
        computed = sum(len(g) * max(encoded[i].packed_length for i in g) for g in groups)
        return 1 - sum(question.packed_length for question in encoded) / computed


class Theirs:
    """lm-evaluation-harness, asked as its tasks ask it."""

    def __init__(self, model: Any, tokenizer: Any, prompt: PromptConfig, batch_size: int) -> None:
        from lm_eval.models.huggingface import HFLM

        self.tokenizer, self.prompt = tokenizer, prompt
        self.harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        """Log-probabilities of every question's options."""
        from lm_eval.api.instance import Instance

        requests = []
        for number, question in enumerate(questions):
            text = render_prompt(question, self.prompt, self.tokenizer)
            said = question.choices if self.prompt.scoring == "text" else "ABCDE"[: len(question.choices)]
            for place, choice in enumerate(said):
                requests.append(Instance("loglikelihood", {"id": number}, (text, f" {choice}"), place))
        found = iter(self.harness.loglikelihood(requests, disable_tqdm=True))
        return [[float(next(found)[0]) for _ in question.choices] for question in questions]


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time, and the result."""
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def measure(scoring: str, questions: list[Question], repeats: int, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Both on the same questions, in turn."""
    prompt = PROMPTS[scoring]
    ours = Ours(model, tokenizer, prompt)
    sizes = {size: Theirs(model, tokenizer, prompt, size) for size in BATCH_SIZES}
    some = questions[: max(8, len(questions) // 5)]
    ours(some)
    best = min(sizes, key=lambda size: seconds(lambda: sizes[size](some))[0])
    ratios, our_times, their_times = [], [], []
    for _ in range(repeats):
        their_time, theirs = seconds(lambda: sizes[best](questions))
        our_time, found = seconds(lambda: ours(questions))
        ratios.append(their_time / our_time)
        our_times.append(our_time)
        their_times.append(their_time)
    scores = [found.log_probs[i, : len(own)] for i, own in enumerate(theirs)]
    return {
        "scoring": scoring,
        "questions": len(questions),
        "ours_per_s": len(questions) / statistics.median(our_times),
        "harness_per_s": len(questions) / statistics.median(their_times),
        "harness_batch": best,
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "target": TARGETS[scoring],
        "same_answers": sum(int(np.argmax(a) == np.argmax(b)) for a, b in zip(scores, theirs, strict=True)),
        "worst_difference": max(float(np.abs(a - b).max()) for a, b in zip(scores, theirs, strict=True)),
        "padding": ours.padding(questions),
    }


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--data", type=Path, default=ARC_EASY if ARC_EASY.exists() else None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        print("lm-evaluation-harness is not installed: pip install -e '.[parity]'")
        return
    questions = read_questions(arguments.data, arguments.rows)
    config = ModelConfig()
    resolved = resolve_model(config)
    model, tokenizer = load_model(resolved, config), load_tokenizer(resolved, config)
    rows = [measure(scoring, questions, arguments.repeats, model, tokenizer) for scoring in PROMPTS]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    what = "built-in facts" if arguments.data is None else arguments.data.parent.name
    print(f"SmolLM2-135M-Instruct, {len(questions)} questions of {what}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads, {platform.machine()}")
    for row in rows:
        print(
            f"{row['scoring']:>7}: {row['ours_per_s']:.1f} a second, harness {row['harness_per_s']:.1f} (batch "
            f"{row['harness_batch']}), ratio {row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f}), "
            f"target {row['target']:.0f}; answers alike {row['same_answers']}, log-probabilities within "
            f"{row['worst_difference']:.1e}; {row['padding']:.1%} padding"
        )


if __name__ == "__main__":
    main()
