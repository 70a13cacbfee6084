"""Model cards for what leaves the house: the measured calibration as a table, and how to use an exported model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from components.errors import UsageError
from components.evaluation.display import UNDEFINED, Column, interval, number
from components.evaluation.metrics_file import read_metrics

if TYPE_CHECKING:
    from components.export.merged import Exported
    from components.export.source import Source

CHOSEN_ON = ("validation", "validation_shift")
"""Splits that chose settings or stopped training: their figures are no test."""
HEADING = "## Measured"
COLUMNS = (
    Column("accuracy", "Accuracy", "higher"),
    Column("mean_confidence", "Confidence", None),
    Column("ece", "ECE", "lower"),
    Column("top_label_brier_score", "Brier", "lower"),
    Column("nll", "NLL", "lower"),
    Column("auroc", "AUROC", "higher"),
)

PLAIN_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```"""

BESIDE_USE = """The calibration head (`calibration_head.safetensors`) is part of the method: without it the confidence
is not calibrated. Generated tokens, with this folder on Python's path:

```python
from calibrated_logits import CalibratedLogits

alpha = CalibratedLogits.from_pretrained("path/to/this/folder")
model.generate(**inputs, logits_processor=[alpha])
```

Probabilities of given text: `alpha.adjust(model(**inputs).logits).log_softmax(-1)`.

vLLM, whose log-probabilities are the uncalibrated ones unless it is asked for processed ones:

```bash
PYTHONPATH=path/to/this/folder vllm serve path/to/this/folder \\
  --logits-processors calibrated_logits_vllm:CalibratedLogits --logprobs-mode processed_logprobs
```"""

FOLDED_USE = (
    "The calibration head is folded into the output layer: the model's own probabilities are the calibrated ones."
)


def measured(evaluation: Path) -> str:
    """A Markdown table of a method's evaluation: a row for each test split and confidence source, with intervals.

    Args:
        evaluation: The method's folder `evaluation` in a run folder, with `<split>/metrics.json`.

    Returns:
        The table and how it was computed; empty where no test split was evaluated.

    Raises:
        CaltuneError: A file is damaged.
    """
    files = [path for path in sorted(evaluation.glob("*/metrics.json")) if path.parent.name not in CHOSEN_ON]
    if not files:
        return ""
    header = ["split", "n", "confidence", *(column.title for column in COLUMNS)]
    lines = ["| " + " | ".join(header) + " |", "| --- | ---: | --- |" + " ---: |" * len(COLUMNS)]
    for path in files:
        metrics = read_metrics(path)
        for source, block in metrics["sources"].items():
            cells = [_cell(block.get(column.metric)) for column in COLUMNS]
            lines.append("| " + " | ".join([path.parent.name, str(metrics["n"]), source, *cells]) + " |")
    computed = metrics["computed"]
    note = (
        f"ECE with {computed['bins']} bins; in brackets the {computed['level']:.0%} interval of "
        f"{computed['bootstrap']} bootstrap draws over questions."
    )
    return "\n".join(lines) + "\n\n" + note


def evaluation_of(folder: Path, named: Path | None) -> Path | None:
    """The folder of figures that belongs to an adapter.

    Args:
        folder: The adapter folder; a run keeps its evaluation beside it.
        named: What the user named; it must hold figures.

    Raises:
        UsageError: The folder named holds none.
    """
    if named is not None:
        if not any(named.glob("*/metrics.json")):
            raise UsageError(
                f"{named} holds no <split>/metrics.json; name a method's folder 'evaluation' in a run folder"
            )
        return named
    beside = folder.resolve().parent / "evaluation"
    return beside if any(beside.glob("*/metrics.json")) else None


def with_measured(card: str, results: str) -> str:
    """A card with its section of figures replaced, or put before the first other one; unchanged without results."""
    if not results:
        return card
    section = f"{HEADING}\n\n{results.strip()}\n"
    if re.search(rf"^{HEADING}$", card, re.MULTILINE):
        return re.sub(rf"^{HEADING}\n.*?(?=^## |\Z)", lambda _: section + "\n", card, flags=re.MULTILINE | re.DOTALL)
    first = re.search(r"^## ", card, re.MULTILINE)
    at = len(card) if first is None else first.start()
    return f"{card[:at].rstrip()}\n\n{section}\n{card[at:]}"


def exported_card(source: Source, exported: Exported, results: str) -> str:
    """The README.md of an exported model.

    Args:
        source: The adapter.
        exported: What was made of it.
        results: Markdown with the adapter's measured figures; may be empty.
    """
    import yaml

    public_id = source.metadata["base_model"]["public_id"]
    header: dict[str, object] = {
        "base_model": public_id,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["caltune", "calibration", source.method, "merged"],
    }
    if source.resolved.license is not None:
        header["license"] = source.resolved.license
    use = {"none": [], "beside": [BESIDE_USE], "folded": [FOLDED_USE]}[exported.alpha]
    prompt = json.dumps(source.metadata["prompt"], indent=2, ensure_ascii=False)
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {source.method} on {public_id}, merged",
        f"Trained by caltune with the method `{source.method}` and merged into the weights ({exported.dtype}). "
        f"{_exactness(exported)}",
        "## Use",
        PLAIN_USE,
        *use,
        "The figures hold for questions put like this (an option's probability is that of its tokens after the prompt; "
        "`{question}` stands for the question):",
        f"```json\n{prompt}\n```",
    ]
    return with_measured("\n\n".join(parts) + "\n", results)


def _exactness(exported: Exported) -> str:
    merging = exported.merging
    text = (
        f"On real questions ({merging.positions} positions, whole vocabulary) its log-probabilities differ from the "
        f"adapter's by at most {merging.greatest:.1e}."
    )
    if exported.folding is not None:
        text += f" Folding the calibration head in changed them by at most {exported.folding.greatest:.1e}."
    return text


def _cell(figure: dict[str, float | None] | None) -> str:
    if figure is None or figure["value"] is None:
        return UNDEFINED
    return number(figure["value"]) if figure["ci_low"] is None else f"{number(figure['value'])} {interval(figure)}"
