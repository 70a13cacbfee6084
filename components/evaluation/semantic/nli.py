"""Classes of equal meaning by a model of natural language inference.

Two answers are the same when each entails the other (Kuhn et al. 2023, arXiv 2302.09664, in its strict form).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any

from components.errors import ModelError
from components.evaluation.semantic.clustering import classes

PAIRS_AT_ONCE = 32


class NliClusterer:
    """Asks a sequence classifier, loaded at the first question.

    Args:
        model: Hub id or folder of a sequence classifier with a label `entailment`, e.g. microsoft/deberta-large-mnli.
        device: Where it runs.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        self.name, self.device = model, device

    def __call__(self, question: str, aliases: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
        """See `Clusterer`; the right answers have no say.

        Raises:
            ModelError: The model cannot be loaded, or knows no entailment.
        """

        def related(texts: Sequence[str]) -> Iterable[tuple[int, int]]:
            pairs = list(permutations(range(len(texts)), 2))
            entailed = self.entails([(f"{question} {texts[i]}", f"{question} {texts[j]}") for i, j in pairs])
            found = {pair for pair, holds in zip(pairs, entailed, strict=True) if holds}
            return [(i, j) for i, j in pairs if i < j and (i, j) in found and (j, i) in found]

        return classes(answers, related)

    def entails(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether entailment is the most probable relation of each (premise, hypothesis).

        Raises:
            ModelError: As for a call.
        """
        import torch

        tokenizer, model, entailment = self._loaded
        found: list[bool] = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            premises, hypotheses = zip(*pairs[start : start + PAIRS_AT_ONCE], strict=True)
            batch = tokenizer(list(premises), list(hypotheses), padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(**batch.to(self.device)).logits
            found += (logits.argmax(dim=-1) == entailment).tolist()
        return found

    @cached_property
    def _loaded(self) -> tuple[Any, Any, int]:
        """Tokenizer, model and the index of its label for entailment."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.name)
            model = AutoModelForSequenceClassification.from_pretrained(self.name, use_safetensors=True)
        except Exception as problem:  # tokenizers raises bare Exception for a damaged tokenizer.json
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise ModelError(
                f"generation.nli_model '{self.name}' cannot be loaded ({reason}); give a hub id or folder of an NLI "
                "classifier, or set generation.clusterer to 'offline', which needs no model"
            ) from problem
        labels = {str(label).lower(): int(index) for index, label in model.config.id2label.items()}
        if "entailment" not in labels:
            raise ModelError(
                f"generation.nli_model '{self.name}' has the labels {', '.join(labels)}, but not 'entailment': "
                "it is no NLI classifier"
            )
        return tokenizer, model.to(self.device).eval(), labels["entailment"]
