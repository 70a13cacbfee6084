"""Finding and loading base models: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaForCausalLM

from components.config import ModelConfig
from components.errors import ModelError
from components.models.base import load_model, load_tokenizer, resolve_model

TOKENS = torch.arange(3, 23)[None]


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def edit_json(path: Path, change: dict[str, object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | change
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


def load(folder: Path, **changes: object) -> LlamaForCausalLM:
    config = ModelConfig.model_validate({"name": str(folder)} | changes)
    return load_model(resolve_model(config), config)


def test_a_local_folder_loads_frozen_in_evaluation_mode(folder: Path, tiny_model: LlamaForCausalLM) -> None:
    model = load(folder)
    assert torch.equal(model(TOKENS).logits, tiny_model(TOKENS).logits)
    assert not model.training
    assert not any(value.requires_grad for value in model.parameters())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frozen_weights_have_the_precision_asked_for(folder: Path, dtype: str) -> None:
    assert {value.dtype for value in load(folder, dtype=dtype).parameters()} == {getattr(torch, dtype)}


def test_the_origin_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    with caplog.at_level("INFO"):
        resolved = resolve_model(ModelConfig(name=str(folder)))
    assert "local folder" in caplog.text
    assert (resolved.revision, resolved.license) == (None, "mit")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def make_gguf(folder: Path) -> None:
    remove_config(folder)
    (folder / "model.safetensors").rename(folder / "model.gguf")


def make_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def make_headless(folder: Path) -> None:
    edit_json(folder / "config.json", {"architectures": ["LlamaModel"]})


def make_bert(folder: Path) -> None:
    BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)).save_pretrained(
        folder
    )


def make_unknown(folder: Path) -> None:
    edit_json(folder / "config.json", {"model_type": "riddle", "architectures": ["RiddleForCausalLM"]})


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, "has no config.json: the folder is not a model"),
        (make_adapter, "the folder is an adapter, not a base model"),
        (make_gguf, "is a GGUF model: its quantised weights can be neither trained nor saved"),
        (make_headless, r"is LlamaModel, not a causal language model \(LlamaForCausalLM is wanted\)"),
        (make_bert, "is BertModel, not a causal language model"),
        (make_unknown, "config.json cannot be used.*riddle"),
        (break_config, "config.json cannot be used"),
    ],
)
def test_folders_that_are_no_causal_language_model(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        resolve_model(ModelConfig(name=str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "someone/unheard-of"}, "not a folder here, not in the hub's cache, and the hub cannot be reached"),
        ({"name": "./nowhere"}, "'./nowhere' is not a folder"),
        ({"name": "two words"}, "neither an existing folder nor a hub id"),
        ({"name": "smollm2-135m-instruct", "revision": "main"}, "has no revisions"),
    ],
)
def test_names_that_lead_nowhere(
    changes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve_model(ModelConfig.model_validate(changes))


def test_a_revision_of_a_local_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a local folder"):
        resolve_model(ModelConfig(name=str(folder), revision="main"))


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="a file is damaged or cut short"):
        load(folder)


def test_missing_weights_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("key", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_without_a_value_is_refused_instead_of_left_random(folder: Path, key: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[key]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match="no value in the files"):
        load(folder)


def test_a_misshapen_weight_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", {"intermediate_size": 60})
    with pytest.raises(ModelError, match=r"weights of a wrong shape in the files: .*model\.layers\.0\.mlp"):
        load(folder)


def test_padding_falls_back_to_the_end_token_without_growing_the_vocabulary(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", {"pad_token": None})
    config = ModelConfig(name=str(folder))
    tokenizer = load_tokenizer(resolve_model(config), config)
    assert tokenizer.pad_token == tokenizer.eos_token == "</s>"
    assert len(tokenizer) == 320


def test_a_tokenizer_that_cannot_pad_is_refused(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", {"pad_token": None, "eos_token": None})
    config = ModelConfig(name=str(folder))
    with pytest.raises(ModelError, match="neither a padding nor an end-of-sequence token"):
        load_tokenizer(resolve_model(config), config)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.save_pretrained(folder)
    config = ModelConfig(name=str(folder))
    with pytest.raises(ModelError, match="token id 320 but the model's vocabulary has 320 rows"):
        load_tokenizer(resolve_model(config), config)


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    config = ModelConfig(name=str(folder))
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(resolve_model(config), config)
