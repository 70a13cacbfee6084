"""Classes by entailment: the model is asked both ways, and a missing one is a clear error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from components.errors import ModelError
from components.evaluation.semantic.nli import NliClusterer


class HandMade(NliClusterer):
    """Entails by a list instead of a model; remembers what it was asked."""

    def __init__(self, entailed: set[tuple[str, str]]) -> None:
        super().__init__("no model")
        self.entailed, self.asked = entailed, []

    def entails(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        self.asked += pairs
        return [(a.removeprefix("Q? "), b.removeprefix("Q? ")) in self.entailed for a, b in pairs]


def test_both_ways_are_needed() -> None:
    """Paris entails a French city, not the other way round; car and automobile entail each other."""
    clusterer = HandMade({("Paris", "French city"), ("car", "automobile"), ("automobile", "car")})
    answers = ["Paris", "French city", "car", "automobile", "car."]
    assert clusterer("Q?", [], answers) == (2, 1, 0, 0, 0)
    assert ("Q? Paris", "Q? French city") in clusterer.asked


def test_without_the_model() -> None:
    with pytest.raises(ModelError, match=r"no-such/nli-model.*offline"):
        NliClusterer("no-such/nli-model")("Q?", [], ["a b", "c d"])


def test_a_random_classifier(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Real loading and batching on random weights: as many verdicts as pairs; without the label it is refused."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    def write(labels: list[str]) -> str:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
        )
        folder = tmp_path / "-".join(labels)
        LlamaForSequenceClassification(config).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return str(folder)

    clusterer = NliClusterer(write(["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]))
    pairs = [(f"premise {i}", f"hypothesis {i} and more") for i in range(40)]
    assert len(clusterer.entails(pairs)) == 40
    with pytest.raises(ModelError, match="entailment"):
        NliClusterer(write(["yes", "no"])).entails(pairs[:1])


@pytest.mark.slow
def test_a_real_model() -> None:
    """Set CALTUNE_NLI_MODEL to a folder or hub id of an NLI classifier."""
    name = os.environ.get("CALTUNE_NLI_MODEL")
    if not name:
        pytest.skip("set CALTUNE_NLI_MODEL to a folder or hub id of an NLI classifier to test with a real one")
    answers = ["It is Paris.", "The answer is Paris.", "It is Rome."]
    found = NliClusterer(name)("What is the capital of France?", [], answers)
    assert found[0] == found[1] != found[2]
