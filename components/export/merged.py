"""A plain Hugging Face model from an adapter folder: LoRA merged into the weights, alpha beside them or folded in.

Before the folder is put in place it is opened again as anybody would open it, and its log-probabilities are compared
with those of the adapter on real questions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from components.errors import ModelError
from components.export.card import exported_card
from components.export.check import Difference, difference, log_probs_of, real_rows
from components.export.fold import fold_head, require_foldable
from components.export.source import Source, require_mergeable
from components.export.standalone import calibrated_logits
from components.models.adapter_checks import CARD_FILE
from components.models.base import bars_on_terminals_only
from components.models.calibration_head import CalibrationHead

RECORD_FILE = "caltune_export.json"
FORMAT = 1
STANDALONE = ("calibrated_logits.py", "calibrated_logits_vllm.py")
TOLERANCE = 1e-4
"""Most that folding may change a log-probability, in nats, in float32."""
MERGING_TOLERANCE = 1e-3
"""Most that merging may: it rounds anew in every layer (1.5e-4 for a token of log-probability -25 was measured, 5e-6
for any probability)."""

Alpha = Literal["none", "beside", "folded"]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        alpha: Where the calibration head went.
        dtype: Of the weights.
        merging: How far the merged model is from the adapter, on real questions.
        folding: How far the folded model is from the merged one under its head; None where nothing was folded.
    """

    folder: Path
    alpha: Alpha
    dtype: str
    merging: Difference
    folding: Difference | None


def export_merged(source: Source, target: Path, *, fold: bool, results: str) -> Exported:
    """Writes the model, checks it, and only then puts it in place.

    Args:
        source: From `open_source`.
        target: A folder that does not exist yet.
        fold: Put the calibration head into the output layer. The model is then written in float32.
        results: Markdown with the measured figures, for the card; may be empty.

    Returns:
        What was written. For an adapter on half-precision weights `merging` is what rounding the merged weights
        makes; it is stated, not refused.

    Raises:
        ModelError: The adapter cannot be merged, or its head not be folded; or one or the other changes
            log-probabilities by more than is rounding in float32; or `target` exists.
    """
    require_mergeable(source)
    if target.exists():
        raise ModelError(f"{target} exists; name a folder that does not")
    if fold and source.metadata["head"] is None:
        raise ModelError(f"{source.folder} has no calibration head that could be folded; export without --fold")
    tokenizer = source.tokenizer()
    rows = real_rows(tokenizer, source.prompt)
    model, head = source.load()
    said = log_probs_of(model, rows, head)
    # What was trained in full has no other weights than its own, which are float32.
    plain = _merge(model, "float32" if fold or source.kind == "full" else source.config.dtype)
    merged = log_probs_of(plain, rows, head)
    apart = difference(said, merged)
    _require_merged(source, apart)
    had_bias = False
    if fold and head is not None:
        require_foldable(plain.config, type(plain).__name__)
        had_bias = fold_head(plain, head)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        draft.chmod(0o755)
        architecture, dtype = type(plain).__name__, str(plain.dtype).removeprefix("torch.")
        _write_model(draft, plain, tokenizer, head, fold)
        del plain, model
        again = _reopened(draft, rows, beside=head is not None and not fold)
        written = difference(merged, again)
        if fold and head is not None:
            _require_folded(source, written, architecture, head, had_bias)
        elif written.greatest > TOLERANCE:
            raise ModelError(
                f"{draft}: the model reads back differently from what was written ({written.greatest:.2g})"
            )
        alpha: Alpha = "none" if head is None else "folded" if fold else "beside"
        exported = Exported(target, alpha, dtype, apart, written if fold else None)
        _write_record(draft, source, exported)
        (draft / CARD_FILE).write_text(exported_card(source, exported, results), encoding="utf-8")
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return exported


def _merge(model: Any, dtype: str) -> Any:
    """A plain model of this precision. Sums are taken in float32, so that half-precision weights are rounded once."""
    model.float()
    plain = model.merge_and_unload(safe_merge=True) if isinstance(model, PeftModel) else model
    return plain.to(getattr(torch, dtype))


def _write_model(draft: Path, plain: Any, tokenizer: Any, head: CalibrationHead | None, fold: bool) -> None:
    own = plain.generation_config
    if head is not None:
        # Without a repetition penalty and the like, which would change the logits before the head sees them.
        ids = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        plain.generation_config = GenerationConfig(**ids)
    with bars_on_terminals_only():
        plain.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    if head is not None and not fold:
        head.save(draft)
        for name in STANDALONE:
            shutil.copyfile(Path(calibrated_logits.__file__).with_name(name), draft / name)
    for path in draft.iterdir():
        path.chmod(0o644)  # safetensors are written for the owner alone


def _reopened(draft: Path, rows: list[tuple[int, ...]], *, beside: bool) -> list[Tensor]:
    with bars_on_terminals_only():
        model = AutoModelForCausalLM.from_pretrained(draft, dtype="auto", local_files_only=True).eval()
    adjust = calibrated_logits.CalibratedLogits.from_pretrained(draft).adjust if beside else None
    return log_probs_of(model, rows, adjust)


def _require_merged(source: Source, apart: Difference) -> None:
    if source.config.dtype == "float32" and not apart.greatest <= MERGING_TOLERANCE:
        raise ModelError(
            f"{source.folder}: the merged model's log-probabilities differ from the adapter's by up to "
            f"{apart.greatest:.2g}, more than {MERGING_TOLERANCE:g}; nothing was written"
        )


def _require_folded(
    source: Source, apart: Difference, architecture: str, head: CalibrationHead, had_bias: bool
) -> None:
    if apart.greatest <= TOLERANCE:
        return
    why = "rounding is too coarse"
    if not had_bias:
        spread = float((head.l.max() - head.l.min()).detach())
        why = (
            f"the output layer of {architecture} has no bias, so the temperatures can be folded but not the offsets, "
            f"which spread over {spread:.2g}"
        )
    raise ModelError(
        f"{source.folder}: with the head folded in, log-probabilities differ by up to {apart.greatest:.2g}, more than "
        f"{TOLERANCE:g}: {why}. Nothing was written; export without --fold"
    )


def _write_record(draft: Path, source: Source, exported: Exported) -> None:
    record = {
        "format": FORMAT,
        "method": source.method,
        "alpha": exported.alpha,
        "dtype": exported.dtype,
        "base_model": source.metadata["base_model"],
        "prompt": source.metadata["prompt"],
        "details": source.metadata["details"],
        "versions": source.metadata["versions"],
        "greatest_log_probability_difference": {
            "merging": asdict(exported.merging),
            "folding": None if exported.folding is None else asdict(exported.folding),
        },
    }
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    (draft / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
