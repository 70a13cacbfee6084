"""An ensemble's folder, and its answers against members loaded one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from components.config import AdapterConfig, ModelConfig, RunConfig
from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.evaluation.scorer import Scorer, ScorerSpec
from components.models.adapter import attach_adapter
from components.models.adapter_checks import verify_adapter
from components.models.adapter_files import load_adapter
from components.models.base import resolve_model
from components.models.calibration_head import CalibrationHead
from components.models.ensemble import load_ensemble, save_ensemble
from components.models.score_questions import SplitScores, score_questions
from components.models.scoring import ScoringModel

QUESTIONS = [
    EncodedQuestion(str(i), tuple(range(3 + i, 7 + i)), tuple((40 + k + i,) for k in range(4)), i % 4) for i in range(5)
]


@pytest.fixture
def members(base, save, trained, tmp_path: Path) -> list[Path]:
    """Three LoRA adapters with weights of their own."""
    spec = AdapterConfig(r=4, alpha=8)
    return [
        save(trained(attach_adapter(base(), spec, seed=i), scale=0.3), folder=tmp_path / f"alone-{i}") for i in range(3)
    ]


@pytest.fixture
def ensemble(members: list[Path], base_config: ModelConfig, tmp_path: Path) -> Path:
    return save_ensemble(
        tmp_path / "ensemble", members, method="ensemble", resolved=resolve_model(base_config), details={"run": "a"}
    )


@pytest.fixture
def scorer(ensemble: Path, base_config: ModelConfig) -> Callable[[str], Scorer]:
    def make(combine: str) -> Scorer:
        config = RunConfig.model_validate(
            {
                "run": "a",
                "model": base_config.model_dump(),
                "data": {"source": {"kind": "facts", "domain": "geography"}},
                "ensemble": {"combine": combine},
            }
        )
        return Scorer(ScorerSpec.of_run(config, resolve_model(base_config), ensemble, 0), "cpu")

    return make


def alone(folder: Path, base: Callable) -> SplitScores:
    model, _ = load_adapter(folder, base())
    return score_questions(ScoringModel(model), None, QUESTIONS, pad_id=0, token_budget=2048)


def softmax(matrix: np.ndarray) -> np.ndarray:
    return np.exp(matrix) / np.exp(matrix).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("combine", ["probabilities", "logits"])
def test_answers_are_the_mean_of_members_loaded_one_by_one(scorer, members, base, combine):
    """Options are one token each, so a member's option scores are its logits up to a constant."""
    stack = np.stack([alone(member, base).log_probs for member in members])
    expected = softmax(stack).mean(axis=0) if combine == "probabilities" else softmax(stack.mean(axis=0))
    subject = scorer(combine)
    found = subject.scores(QUESTIONS)
    np.testing.assert_allclose(softmax(found.log_probs), expected, atol=1e-6)
    np.testing.assert_array_equal(subject.scores(QUESTIONS).log_probs, found.log_probs)
    other = softmax(stack.mean(axis=0)) if combine == "probabilities" else softmax(stack).mean(axis=0)
    assert np.abs(expected - other).max() > 1e-3, "the two ways differ here"


def test_the_folder_says_what_it_is_and_every_member_is_an_adapter_folder(ensemble, members, base):
    metadata = verify_adapter(ensemble)
    assert (metadata["method"], metadata["adapter"]["kind"], metadata["steps"]) == ("ensemble", "ensemble", 3)
    assert metadata["members"] == ["member-0", "member-1", "member-2"]
    assert metadata["adapter"]["member"] == AdapterConfig(r=4, alpha=8).model_dump(mode="json")
    tokens = torch.arange(3, 23)[None]
    for number, member in enumerate(members):
        plain = PeftModel.from_pretrained(base(), ensemble / f"member-{number}").eval()
        assert torch.equal(plain(tokens).logits, load_adapter(member, base())[0](tokens).logits)


def test_it_is_not_taken_for_one_adapter(ensemble, members, base):
    with pytest.raises(ModelError, match=r"ensemble of 3 adapters, not one; load one of its members, .*member-0"):
        load_adapter(ensemble, base())
    with pytest.raises(ModelError, match="one 'lora' adapter, which is no ensemble"):
        load_ensemble(members[0], base())


def _damage(ensemble: Path) -> None:
    (ensemble / "member-1" / "adapter_model.safetensors").write_bytes(b"x")


def _lose(ensemble: Path) -> None:
    (ensemble / "member-2" / "caltune.json").unlink()


def _shorten(ensemble: Path) -> None:
    path = ensemble / "caltune.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"members": ["member-0"]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_damage, r"member-1/adapter_model\.safetensors has 1 bytes"),
        (_lose, r"member-2/caltune\.json is missing"),
        (_shorten, "names fewer than two members"),
    ],
)
def test_a_damaged_ensemble_is_refused(ensemble, change, message):
    change(ensemble)
    with pytest.raises(ModelError, match=message):
        verify_adapter(ensemble)


def test_members_that_do_not_belong_together_are_refused(members, base, base_config, save, trained, tmp_path):
    resolved = resolve_model(base_config)
    spec = AdapterConfig(r=2, alpha=8)
    other = save(trained(attach_adapter(base(), spec, seed=3)), adapter=spec, folder=tmp_path / "other")
    with pytest.raises(ModelError, match="its adapter is not that of member-0"):
        save_ensemble(tmp_path / "new", [members[0], other], method="ensemble", resolved=resolved, details={})
    model = trained(attach_adapter(base(), AdapterConfig(r=4, alpha=8), seed=3))
    headed = save(model, head=CalibrationHead(320), folder=tmp_path / "headed")
    with pytest.raises(ModelError, match="without a calibration head"):
        save_ensemble(tmp_path / "new", [members[0], headed], method="ensemble", resolved=resolved, details={})
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="is not an adapter folder"):
        save_ensemble(tmp_path / "full", members, method="ensemble", resolved=resolved, details={})
