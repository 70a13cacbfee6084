"""Whether a free answer is right: SQuAD's normalisation, exact match and token F1, and alias match.

Rajpurkar et al. 2016 (arXiv 1606.05250) for the first three; Mallen et al. 2023 (PopQA, arXiv 2212.10511) count an
answer as right when a name of the right thing stands in it, here as whole words.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

RIGHT_F1 = 0.5
"""Token F1 from which an answer counts as right (ours: correctness has to be yes or no here)."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise_answer(text: str) -> str:
    """SQuAD's normal form: lower case, without ASCII punctuation and English articles, single spaces.

    A text of nothing else, as the answer "A" or "?", keeps its own characters, so that it equals itself alone.
    """
    plain = " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
    return plain or " ".join(text.lower().split())


def exact_match(answer: str, aliases: Sequence[str]) -> bool:
    """Whether an answer equals one of the right ones after normalisation. An empty answer never does."""
    found = normalise_answer(answer)
    return bool(found) and any(found == normalise_answer(alias) for alias in aliases)


def alias_match(answer: str, aliases: Sequence[str]) -> bool:
    """Whether one of the right answers stands in this one, as whole words, after normalisation."""
    found = f" {normalise_answer(answer)} "
    return any(f" {name} " in found for alias in aliases if (name := normalise_answer(alias)))


def token_f1(a: str, b: str) -> float:
    """Harmonic mean of precision and recall of the words of two texts, counted with repetition; symmetric.

    Returns:
        A number in [0, 1]; 0 where either text is empty.
    """
    ours, theirs = normalise_answer(a).split(), normalise_answer(b).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def best_token_f1(answer: str, aliases: Sequence[str]) -> float:
    """The largest token F1 with any of the right answers."""
    return max(token_f1(answer, alias) for alias in aliases)


JUDGES: Mapping[str, Callable[[str, Sequence[str]], bool]] = MappingProxyType(
    {
        "alias": alias_match,
        "exact_match": exact_match,
        "token_f1": lambda answer, aliases: best_token_f1(answer, aliases) >= RIGHT_F1,
    }
)
"""Ways to tell whether an answer is right, by their name in the run file."""
