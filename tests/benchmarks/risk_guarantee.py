"""Does the guarantee of `components/evaluation/selective.py` hold on real predictions? Random splits say how often not.

    make bench        or        python tests/benchmarks/risk_guarantee.py [--adapter FOLDER] [--risk 0.3] [--json]

SmolLM2-135M-Instruct, or an adapter of it, answers built-in questions; on the calibration part of each random split a
threshold is chosen, by the project, by MAPIE (Learn then Test with Holm's correction over its default grid of
confidences) and naively, and what it achieves is compared with the target.

The questions are a finite set, so a calibration part drawn from it is hypergeometric, not binomial, which has less
spread: the test is then on the safe side. "exceeds" is that the error rate *of the whole set* above the threshold lies
above the target, which is what the guarantee speaks of: the set is the population. "exceeds on the rest" takes the
other questions only, an estimate with noise of its own, and high exactly where the calibration part was lucky, since
the two make up a fixed whole. Of a threshold whose error rate is at the target the rest shows more in half of the
splits, so delta does not bound that figure; the smaller the calibration part, the closer it comes to "exceeds".
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from components.evaluation.predictions import Predictions, read_predictions
from components.evaluation.selective import answered_at, naive_threshold, threshold_for_risk

RUN_FILE = Path(__file__).parents[2] / "ray_jobs" / "configs" / "quickstart.yaml"

Chooser = Callable[[np.ndarray, np.ndarray, float, float], float | None]
"""(confidence [n], correct [n], risk, delta) -> threshold."""


def real_predictions(questions: int, adapter: Path | None, seed: int = 0) -> Predictions:
    """Answers of the 135M model to that many questions of geography, drawn at random."""
    from components.data.facts.builder import build_facts
    from components.data.prompts import PromptEncoder
    from components.evaluation.score_split import predictions_of
    from components.evaluation.scorer import Scorer, ScorerSpec
    from components.models.base import load_tokenizer, resolve_model
    from components.run_file import load_run_file

    config = load_run_file(RUN_FILE)
    resolved = resolve_model(config.model)
    tokenizer = load_tokenizer(resolved, config.model)
    drawn = list(build_facts("geography", seed).with_choices)
    random.Random(seed).shuffle(drawn)
    drawn = drawn[:questions]
    encoded = PromptEncoder(tokenizer, config.data.prompt, config.data.max_length).encode_all(drawn)
    scorer = Scorer(ScorerSpec(config, resolved, adapter, int(tokenizer.pad_token_id)), "cpu")  # type: ignore[arg-type]
    return predictions_of(drawn, scorer.scores(encoded))


def by_mapie(confidence: np.ndarray, correct: np.ndarray, risk: float, delta: float) -> float | None:
    """MAPIE's controller: precision of 'is right' among the answered, its default grid and correction."""
    from mapie.risk_control import BinaryClassificationController

    controller = BinaryClassificationController(
        predict_function=lambda values: np.stack([1 - values, values], axis=1),
        risk="precision",
        target_level=1 - risk,
        confidence_level=1 - delta,
        best_predict_param_choice="recall",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no threshold was found
        controller.calibrate(confidence, correct.astype(int))
    best = controller.best_predict_param
    return None if best is None else float(best)  # type: ignore[arg-type]


CHOOSERS: dict[str, Chooser] = {
    "guaranteed": threshold_for_risk,
    "MAPIE": by_mapie,
    "naive": lambda confidence, correct, risk, delta: naive_threshold(confidence, correct, risk),
}


def over_splits(
    confidence: np.ndarray, correct: np.ndarray, risk: float, delta: float, share: float, splits: int, choose: Chooser
) -> dict[str, float]:
    """How often the target is exceeded over random splits, and what is answered."""
    generator = np.random.default_rng(0)
    n = round(share * len(confidence))
    found, exceeds, on_rest, coverage = [], [], [], []
    for _ in range(splits):
        order = generator.permutation(len(confidence))
        drawn, rest = order[:n], order[n:]
        threshold = choose(confidence[drawn], correct[drawn], risk, delta)
        answered = answered_at(confidence, threshold)
        found.append(threshold is not None)
        coverage.append(answered.mean())
        exceeds.append(_error_rate(correct[answered]) > risk)
        on_rest.append(_error_rate(correct[rest][answered[rest]]) > risk)
    columns = {"found": found, "exceeds": exceeds, "exceeds_on_rest": on_rest, "coverage": coverage}
    return {name: float(np.mean(values)) for name, values in columns.items()}


def _error_rate(correct: np.ndarray) -> float:
    return float(1 - correct.mean()) if len(correct) else 0.0


def measure(predictions: Predictions, risks: list[float], delta: float, splits: int) -> list[dict[str, Any]]:
    """A row for each target, size of the calibration part and way of choosing."""
    confidence, correct = predictions.confidence(), predictions.correct
    return [
        {"risk": risk, "calibration": round(share * len(confidence)), "chosen": name}
        | over_splits(confidence, correct, risk, delta, share, splits, choose)
        for risk in risks
        for share in (0.5, 0.1)
        for name, choose in CHOOSERS.items()
    ]


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1500)
    parser.add_argument("--adapter", type=Path, help="an adapter folder of the 135M model; without it the model itself")
    parser.add_argument("--predictions", type=Path, help="a predictions.parquet, in place of answering anything")
    parser.add_argument("--risk", type=float, nargs="+", default=[0.2, 0.3])
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = (
        read_predictions(given.predictions) if given.predictions else real_predictions(given.questions, given.adapter)
    )
    rows = measure(found, given.risk, given.delta, given.splits)
    if given.json:
        print(json.dumps({"n": len(found), "accuracy": float(found.correct.mean()), "rows": rows}, indent=2))
        return
    print(f"{len(found)} questions, accuracy {found.correct.mean():.3f}, delta {given.delta}, {given.splits} splits")
    print("risk  calibration  chosen       found  exceeds  exceeds on the rest  coverage")
    for row in rows:
        print(
            f"{row['risk']:<5} {row['calibration']:<12} {row['chosen']:<12} {row['found']:<6.2f} "
            f"{row['exceeds']:<8.3f} {row['exceeds_on_rest']:<20.3f} {row['coverage']:.2f}"
        )


if __name__ == "__main__":
    main()
