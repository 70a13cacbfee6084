"""What a calibration head has learned: how far its temperatures and offsets lie from the identity, at which tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.evaluation.checks import FloatArray
from components.models.calibration_head import FILE_NAME, CalibrationHead

TOKENS = 8
"""Tokens shown at each end."""
LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class MovedToken:
    """A token of the vocabulary with its temperature and its offset (nats)."""

    text: str
    temperature: float
    offset: float


@dataclass(frozen=True)
class HeadSummary:
    """A calibration head in figures.

    Attributes:
        vocabulary: Tokens; 1 value of each kind serves all of them where `scalar`.
        scalar: One temperature for all tokens.
        temperatures: Quantiles of the temperatures at `LEVELS`.
        offsets: Quantiles of the offsets at `LEVELS`, nats.
        moved: Tokens whose offset is not 0.
        raised: Tokens with the largest offsets, which became likelier.
        lowered: Tokens with the smallest offsets.
        flattest: Tokens with the highest temperatures.
        sharpest: Tokens with the lowest temperatures.
    """

    vocabulary: int
    scalar: bool
    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    moved: int
    raised: tuple[MovedToken, ...] = ()
    lowered: tuple[MovedToken, ...] = ()
    flattest: tuple[MovedToken, ...] = ()
    sharpest: tuple[MovedToken, ...] = ()


def read_head_summary(adapter: Path) -> HeadSummary | None:
    """Of an adapter folder, with its own tokenizer; None where the method has no calibration head.

    Raises:
        ModelError: The head cannot be read.
    """
    if not (adapter / FILE_NAME).exists():
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter, local_files_only=True)
    return summarise_head(CalibrationHead.load(adapter), lambda token: str(tokenizer.convert_ids_to_tokens(token)))


def summarise_head(head: CalibrationHead, text_of: Callable[[int], str], tokens: int = TOKENS) -> HeadSummary:
    """Figures of a head.

    Args:
        head: The head.
        text_of: Text of a token id; ids beyond the tokenizer's may have any.
        tokens: Most tokens at each end; of equal ones the first.
    """
    temperatures = np.exp((head.rho + head.shared).detach().double().numpy())
    offsets = head.l.detach().double().numpy()
    if head.form == "scalar":
        return HeadSummary(head.vocabulary_size, True, _quantiles(temperatures), _quantiles(offsets), 0)

    def tokens_by(values: FloatArray) -> tuple[MovedToken, ...]:
        order = np.argsort(values, kind="stable")[:tokens]
        return tuple(MovedToken(text_of(int(i)), float(temperatures[i]), float(offsets[i])) for i in order)

    return HeadSummary(
        head.vocabulary_size,
        False,
        _quantiles(temperatures),
        _quantiles(offsets),
        int(np.count_nonzero(offsets)),
        raised=tokens_by(-offsets),
        lowered=tokens_by(offsets),
        flattest=tokens_by(-temperatures),
        sharpest=tokens_by(temperatures),
    )


def _quantiles(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, LEVELS))
