"""The adapter folder: what is written reads back, with PEFT alone too, and every defect is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from components.config import AdapterConfig, ModelConfig
from components.config_data import PromptConfig
from components.errors import ModelError
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_checks import verify_adapter
from components.models.adapter_files import AdapterRecord, load_adapter, save_adapter
from components.models.base import ResolvedModel, load_model, load_tokenizer, resolve_model
from components.models.calibration_head import CalibrationHead
from components.models.smollm2 import sha256_of

TOKENS = torch.arange(3, 23)[None]
A_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"

Save = Callable[..., Path]
Trained = Callable[..., nn.Module]
Rewrite = Callable[[Path, Callable[[dict[str, Tensor]], object]], None]


@pytest.fixture
def lora(base: Callable[[], LlamaForCausalLM], base_config: ModelConfig, trained: Trained) -> nn.Module:
    return trained(attach_adapter(base(), base_config.adapter, seed=1)).eval()


def test_a_saved_adapter_and_head_read_back_bit_for_bit(
    lora: nn.Module, save: Save, base: Callable[[], LlamaForCausalLM]
) -> None:
    head = CalibrationHead(320)
    with torch.no_grad():
        head.rho.normal_()
        head.l.normal_()
    folder = save(lora, head=head)
    again, again_head = load_adapter(folder, base())
    logits = lora(TOKENS).logits
    assert not torch.equal(logits, base()(TOKENS).logits)
    assert torch.equal(again(TOKENS).logits, logits)
    assert again_head is not None
    assert torch.equal(again_head(logits), head(logits))
    assert not again.training
    assert not trainable_parameters(again)


def test_plain_peft_reads_the_folder_and_gives_the_same_logits(
    lora: nn.Module, save: Save, base: Callable[[], LlamaForCausalLM], tmp_path: Path
) -> None:
    """And the tensors are those that PEFT's own save_pretrained would have written."""
    folder = save(lora, head=CalibrationHead(320))
    plain = PeftModel.from_pretrained(base(), folder)
    assert torch.equal(plain.eval()(TOKENS).logits, lora(TOKENS).logits)
    lora.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_real_model_with_plain_peft(smollm2_folder: Path, tmp_path: Path, trained: Trained) -> None:
    config = ModelConfig(adapter=AdapterConfig(r=2))
    resolved = resolve_model(config)
    tokenizer = load_tokenizer(resolved, config)
    tokens = torch.tensor([tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)])
    model = trained(attach_adapter(load_model(resolved, config), config.adapter, seed=1), scale=0.02).eval()
    folder = save_adapter(
        tmp_path / "adapter",
        model=model,
        state=adapter_state(model),
        head=None,
        tokenizer=tokenizer,
        config=config,
        adapter=config.adapter,
        resolved=resolved,
        record=AdapterRecord("sft", 1, PromptConfig()),
    )
    with torch.no_grad():
        logits = model(tokens).logits
        base_model = load_model(resolved, config)
        assert (base_model(tokens).logits - logits).abs().max() > 0.01
        assert torch.equal(PeftModel.from_pretrained(base_model, folder).eval()(tokens).logits, logits)
    written = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert written["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "license: apache-2.0" in (folder / "README.md").read_text(encoding="utf-8")


def test_full_fine_tuning_reads_back_with_plain_transformers(
    base: Callable[[], LlamaForCausalLM], save: Save, trained: Trained
) -> None:
    full = AdapterConfig(kind="full")
    model = trained(attach_adapter(base(), full, seed=1)).eval()
    folder = save(model, adapter=full, head=CalibrationHead(320, "scalar"))
    logits = model(TOKENS).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits, logits)
    again, head = load_adapter(folder, base())
    assert torch.equal(again(TOKENS).logits, logits)
    assert head is not None
    assert head.form == "scalar"
    assert not (folder / "adapter_config.json").exists()


def test_gathered_state_is_saved_when_the_modules_own_tensors_are_empty(
    lora: nn.Module, save: Save, base: Callable[[], LlamaForCausalLM]
) -> None:
    """As under ZeRO stage 3, where `ds_shape` holds the full shape."""
    state, logits = adapter_state(lora), lora(TOKENS).logits
    for value in trainable_parameters(lora).values():
        value.ds_shape = value.shape
        value.data = torch.empty(0)
    again, _ = load_adapter(save(lora, state=state), base())
    assert torch.equal(again(TOKENS).logits, logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(A_NAME), rf"missing key '{A_KEY}'"),
        (lambda s: s.update(more=torch.ones(2)), "unexpected key 'more'"),
        (lambda s: s.update({A_NAME: torch.empty(0)}), rf"'{A_KEY}' has shape \[0\], expected \[4, 32\]"),
        (lambda s: s.update({A_NAME: s[A_NAME].T}), rf"'{A_KEY}' has shape \[32, 4\], expected \[4, 32\]"),
        (lambda s: s[A_NAME].view(-1)[3].fill_(float("inf")), rf"'{A_KEY}' is empty or has values that are not finite"),
        (lambda s: s[A_NAME].zero_(), rf"'{A_KEY}' is all zero"),
        (lambda s: [v.zero_() for k, v in s.items() if "lora_B" in k], "every lora_B is zero"),
    ],
    ids=["missing", "unexpected", "empty", "transposed", "infinite", "zero A", "zero B"],
)
def test_wrong_state_is_refused_and_the_earlier_folder_stays(
    lora: nn.Module, save: Save, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = save(lora)
    before = {path.name: sha256_of(path) for path in folder.iterdir()}
    state = adapter_state(lora)
    change(state)
    with pytest.raises(ModelError, match=message):
        save(lora, state=state)
    assert {path.name: sha256_of(path) for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_an_untrained_adapter_may_have_zero_b(
    base: Callable[[], LlamaForCausalLM], base_config: ModelConfig, save: Save
) -> None:
    fresh = attach_adapter(base(), base_config.adapter, seed=1)
    assert verify_adapter(save(fresh, steps=0))["steps"] == 0
    with pytest.raises(ModelError, match="every lora_B is zero"):
        save(fresh, steps=1)


def test_an_earlier_adapter_is_replaced_and_the_same_content_gives_the_same_files(
    lora: nn.Module, save: Save, trained: Trained
) -> None:
    first = save(lora, head=CalibrationHead(320))
    before = verify_adapter(first)
    assert verify_adapter(save(lora, head=CalibrationHead(320))) == before
    trained(lora)
    folder = save(lora)
    after = verify_adapter(folder)
    assert after["files"] != before["files"]
    assert after["head"] is None
    assert not (folder / "calibration_head.safetensors").exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_of_something_else_is_left_alone(lora: nn.Module, save: Save, tmp_path: Path) -> None:
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("words", encoding="utf-8")
    with pytest.raises(ModelError, match="not an adapter folder"):
        save(lora, folder=other)
    assert (other / "chapter.txt").read_text(encoding="utf-8") == "words"


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"])
def test_a_changed_or_missing_file_is_found(
    lora: nn.Module, save: Save, base: Callable[[], LlamaForCausalLM], name: str
) -> None:
    folder = save(lora)
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}: its content"):
        load_adapter(folder, base())
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(ModelError, match=f"{name} has {len(content) - 1} bytes"):
        verify_adapter(folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name} is missing"):
        verify_adapter(folder)


def test_people_may_edit_the_card(lora: nn.Module, save: Save) -> None:
    folder = save(lora)
    card = folder / "README.md"
    _, header, body = card.read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "peft"
    assert "| id | .05 |" in body
    card.write_text("mine", encoding="utf-8")
    verify_adapter(folder)


def test_a_folder_without_its_record_is_not_complete(lora: nn.Module, save: Save, tmp_path: Path) -> None:
    folder = save(lora)
    (folder / "caltune.json").unlink()
    with pytest.raises(ModelError, match="not a complete adapter folder"):
        verify_adapter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(A_KEY), rf"missing key '{A_KEY}'"),
        (lambda t: (t.pop(A_KEY), t.pop(A_KEY.replace("_A", "_B"))), rf"missing key '{A_KEY}'"),
        (lambda t: t.update({"base_model.model.score": torch.ones(2)}), "unexpected key 'base_model.model.score'"),
        (lambda t: t.update({A_KEY: torch.ones(4, 31)}), rf"'{A_KEY}' has shape \[4, 31\], expected \[4, 32\]"),
    ],
    ids=["half a pair", "a pair", "unexpected", "misshapen"],
)
def test_loading_is_strict(
    lora: nn.Module,
    save: Save,
    rewrite: Rewrite,
    base: Callable[[], LlamaForCausalLM],
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    folder = save(lora)
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        load_adapter(folder, base())


def test_another_base_model_is_refused(lora: nn.Module, save: Save) -> None:
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    wider = LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=48, **sizes))
    with pytest.raises(ModelError, match=r"has shape .* expected"):
        load_adapter(save(lora), wider)
    more_words = LlamaForCausalLM(LlamaConfig(vocab_size=330, hidden_size=32, **sizes))
    with pytest.raises(ModelError, match="made for 320 logits, the base model has 330"):
        load_adapter(save(lora, head=CalibrationHead(320)), more_words)


def test_the_record_says_what_belongs_to_the_tensors(lora: nn.Module, save: Save, tiny_model_folder: Path) -> None:
    folder = save(lora, head=CalibrationHead(320))
    record = verify_adapter(folder)
    assert record["method"] == "calm"
    assert record["base_model"]["origin"] == "local folder"
    assert record["details"] == {"seed": 7}
    assert record["prompt"] == PromptConfig().model_dump(mode="json")
    assert record["head"] == {"form": "vocabulary", "vocabulary_size": 320}
    modules = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    assert modules == sorted(modules)
    assert record["files"].keys() == {path.name for path in folder.iterdir()} - {"caltune.json"}
    assert resolve_model(ModelConfig(name=str(tiny_model_folder))) == ResolvedModel(
        str(tiny_model_folder.resolve()), None, "local folder", str(tiny_model_folder.resolve())
    )
