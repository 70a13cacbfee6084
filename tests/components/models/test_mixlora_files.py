"""Adapter folders of a mixture of LoRA experts: every field comes back, bit for bit, and every defect is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from components.config import AdapterConfig, MixLoraConfig
from components.errors import ModelError
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_checks import verify_adapter
from components.models.adapter_files import load_adapter
from components.models.calibration_head import CalibrationHead
from components.models.mixlora.files import adapted_projections, lacking_routers, read_spec
from components.models.smollm2 import sha256_of

TOKENS = torch.arange(3, 23)[None]
SPEC = MixLoraConfig(r=3, alpha=6, num_experts=4, top_k=2)
# Every field differs from its default, so a field that is not stored cannot come back by chance.
OTHER = MixLoraConfig(
    r=2,
    alpha=5.5,
    dropout=0.1,
    num_experts=3,
    top_k=1,
    attention="none",
    router_init_std=0.05,
    jitter=0.02,
    flc_over="last",
)
MLP = "base_model.model.model.layers.1.mlp."
A, B, ROUTER = MLP + "lora_A_up_proj", MLP + "lora_B_up_proj", MLP + "router.weight"
ATTENTION_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

Save = Callable[..., Path]
Base = Callable[[], LlamaForCausalLM]
Change = Callable[[dict[str, Tensor]], object]
Trained = Callable[..., nn.Module]
Rewrite = Callable[[Path, Change], None]


@pytest.fixture
def mixture(base: Base, trained: Trained) -> nn.Module:
    return trained(attach_adapter(base(), SPEC, seed=1)).eval()


@pytest.mark.parametrize("attention", ["lora", "mixlora", "none"])
def test_a_saved_mixture_and_head_read_back_bit_for_bit(
    base: Base, trained: Trained, save: Save, attention: str
) -> None:
    spec = SPEC.model_copy(update={"attention": attention})
    model = trained(attach_adapter(base(), spec, seed=1)).eval()
    folder = save(model, adapter=spec, head=CalibrationHead(320, "scalar"))
    logits = model(TOKENS).logits
    assert (logits - base()(TOKENS).logits).abs().max() > 0.01
    again, head = load_adapter(folder, base())
    assert torch.equal(again(TOKENS).logits, logits)
    assert head is not None
    assert head.form == "scalar"
    assert not again.training
    assert not trainable_parameters(again)
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(stored) == len(adapter_state(model))
    assert {value.dtype for value in stored.values()} == {torch.float32}


def test_the_folder_holds_the_keys_we_say_it_does(mixture: nn.Module, save: Save) -> None:
    """Tiny Llama: width 32, FFN 64, 2 layers; 4 experts of rank 3."""
    stored = load_file(save(mixture, adapter=SPEC) / "adapter_model.safetensors")
    shapes = {key: list(value.shape) for key, value in stored.items() if ".layers.1." in key}
    attention = {
        f"base_model.model.model.layers.1.self_attn.{name}.lora_{half}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for half in "AB"
    }
    assert {key: shape for key, shape in shapes.items() if key not in attention} == {
        MLP + "router.weight": [4, 32],
        MLP + "lora_A_gate_proj": [4, 3, 32],
        MLP + "lora_B_gate_proj": [4, 64, 3],
        MLP + "lora_A_up_proj": [4, 3, 32],
        MLP + "lora_B_up_proj": [4, 64, 3],
        MLP + "lora_A_down_proj": [4, 3, 64],
        MLP + "lora_B_down_proj": [4, 32, 3],
    }
    assert attention <= shapes.keys()


@pytest.mark.parametrize("spec", [SPEC, OTHER, OTHER.model_copy(update={"attention": "mixlora"})])
def test_every_field_is_in_adapter_config(
    base: Base, trained: Trained, save: Save, tiny_model_folder: Path, spec: MixLoraConfig
) -> None:
    folder = save(trained(attach_adapter(base(), spec, seed=1)), adapter=spec)
    assert read_spec(folder) == spec
    assert MixLoraConfig.model_validate(verify_adapter(folder)["adapter"]) == spec
    written = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    ffn = ["down_proj", "gate_proj", "up_proj"]
    attention = [] if spec.attention == "none" else ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert written["target_modules"] == sorted(ffn + attention)
    assert {name: written[name] for name in ("peft_type", "routing_strategy", "act_fn", "router_aux_loss_coef")} == {
        "peft_type": "MIXLORA",
        "routing_strategy": "mixlora",
        "act_fn": "silu",
        "router_aux_loss_coef": 0.01,
    }
    assert written["base_model_name_or_path"] == str(tiny_model_folder.resolve())


def test_projections_are_read_off_the_keys() -> None:
    assert adapted_projections([A, B, ROUTER, ATTENTION_A]) == ["q_proj", "up_proj"]
    assert adapted_projections(["model.layers.0.self_attn.qkv_proj.lora_A_weight"]) == ["qkv_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(ROUTER), rf"missing key '{ROUTER}'"),
        (lambda s: s.pop(A), rf"missing key '{A}'"),
        (lambda s: s.update(more=torch.ones(2)), "unexpected key 'more'"),
        (lambda s: s.update({A: s[A][:3]}), rf"'{A}' has shape \[3, 3, 32\], expected \[4, 3, 32\]"),
        (lambda s: s.update({ROUTER: s[ROUTER].T}), rf"'{ROUTER}' has shape \[32, 4\], expected \[4, 32\]"),
        (lambda s: s[B].view(-1)[5].fill_(float("nan")), rf"'{B}' is empty or has values that are not finite"),
        (lambda s: s[A].zero_(), rf"'{A}' is all zero, which"),
        (lambda s: s[A][2].zero_(), rf"'{A}' is all zero for expert 2"),
        (lambda s: s[ROUTER].zero_(), rf"'{ROUTER}' is all zero for expert 0"),
        (lambda s: s[ROUTER][3].zero_(), rf"'{ROUTER}' is all zero for expert 3"),
        (lambda s: [v.zero_() for k, v in s.items() if "lora_B" in k], "every lora_B is zero"),
    ],
    ids=[
        *("no router", "no A", "unexpected", "an expert short", "transposed", "nan", "zero A"),
        *("zero A of one expert", "zero router", "zero router of one expert", "zero B"),
    ],
)
def test_wrong_state_is_refused_and_the_earlier_folder_stays(
    mixture: nn.Module, save: Save, change: Change, message: str
) -> None:
    folder = save(mixture, adapter=SPEC)
    before = {path.name: sha256_of(path) for path in folder.iterdir()}
    state = adapter_state(mixture)
    change(state)
    with pytest.raises(ModelError, match=message):
        save(mixture, adapter=SPEC, state=state)
    assert {path.name: sha256_of(path) for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_an_expert_that_never_received_a_token_may_have_a_zero_b(mixture: nn.Module, save: Save) -> None:
    state = adapter_state(mixture)
    for name, value in state.items():
        if ".mlp.lora_B" in name:
            value[1].zero_()
    verify_adapter(save(mixture, adapter=SPEC, state=state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(ROUTER), rf"missing key '{ROUTER}'"),
        (lambda t: t.pop(B), rf"missing key '{B}'"),
        (lambda t: [t.pop(key) for key in list(t) if key.startswith(MLP)], rf"missing key '{MLP}lora_A_down_proj'"),
        (lambda t: t.update({MLP + "lora_C_up_proj": torch.ones(2)}), f"unexpected key '{MLP}lora_C_up_proj'"),
        (lambda t: t.update({A: torch.ones(4, 3, 31)}), rf"'{A}' has shape \[4, 3, 31\], expected \[4, 3, 32\]"),
        (lambda t: t.update({A: torch.ones(5, 3, 32)}), rf"'{A}' has shape \[5, 3, 32\], but there are 4 experts"),
        (lambda t: t.update({A: torch.ones(4, 96)}), rf"'{A}' has shape \[4, 96\], but there are 4 experts"),
        (lambda t: t.update({ATTENTION_A: torch.ones(4, 32)}), rf"'{ATTENTION_A}' has shape \[4, 32\], expected \[3"),
    ],
    ids=["router", "half a pair", "a layer", "unexpected", "misshapen", "experts", "flat", "rank of attention"],
)
def test_loading_is_strict(
    mixture: nn.Module, save: Save, rewrite: Rewrite, base: Base, change: Change, message: str
) -> None:
    folder = save(mixture, adapter=SPEC)
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        load_adapter(folder, base())


def test_a_router_cannot_go_missing_unseen(mixture: nn.Module, save: Save, rewrite: Rewrite) -> None:
    """Without a model at hand too: experts need the router of their own module."""
    folder = save(mixture, adapter=SPEC)
    rewrite(folder, lambda t: t.pop(ROUTER))
    with pytest.raises(ModelError, match=f"missing key '{ROUTER}'"):
        verify_adapter(folder)
    assert lacking_routers(["m.q_proj.lora_A_weight", "m.mlp.lora_B_up_proj", "m.mlp.router.weight"]) == [
        "m.q_proj.router.weight"
    ]


def resigned(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Changes adapter_config.json and makes its checksum agree again."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")
    record = json.loads((folder / "caltune.json").read_text(encoding="utf-8"))
    record["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (folder / "caltune.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("top_k"), "adapter_config.json: missing field 'top_k'"),
        (lambda c: c.pop("flc_over"), "adapter_config.json: missing field 'flc_over'"),
        (lambda c: c.update(top_k=9), "adapter_config.json: .*top_k 9 exceeds num_experts 4"),
        (lambda c: c.update(num_experts=0), "adapter_config.json: field 'num_experts': "),
        (lambda c: c.update(router_init_range=-1), "adapter_config.json: field 'router_init_range': "),
        (lambda c: c.update(peft_type="LORA"), "peft_type 'LORA' with routing_strategy 'mixlora' is not"),
        (lambda c: c.update(routing_strategy="mixlora-dynamic"), "routing_strategy 'mixlora-dynamic' is not"),
        (lambda c: c.update(num_experts=3), "but there are 3 experts"),
        (lambda c: c.update(attention="none"), "missing key"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(
    mixture: nn.Module, save: Save, base: Base, change: Callable[[dict[str, object]], object], message: str
) -> None:
    folder = save(mixture, adapter=SPEC)
    resigned(folder, change)
    with pytest.raises(ModelError, match=message):
        load_adapter(folder, base())


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_changed_or_missing_file_is_found(mixture: nn.Module, save: Save, name: str) -> None:
    folder = save(mixture, adapter=SPEC)
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}: its content"):
        verify_adapter(folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name} is missing"):
        verify_adapter(folder)


def test_an_untrained_mixture_may_have_zero_b(base: Base, save: Save) -> None:
    fresh = attach_adapter(base(), SPEC, seed=1)
    assert verify_adapter(save(fresh, adapter=SPEC, steps=0))["steps"] == 0
    with pytest.raises(ModelError, match="every lora_B is zero"):
        save(fresh, adapter=SPEC, steps=1)


def test_a_state_of_another_kind_is_refused(base: Base, trained: Trained, save: Save, mixture: nn.Module) -> None:
    lora = trained(attach_adapter(base(), AdapterConfig(r=3), seed=1))
    with pytest.raises(ModelError, match="missing key"):
        save(mixture, adapter=SPEC, state=adapter_state(lora))


def test_the_card_says_how_to_load_a_mixture(mixture: nn.Module, save: Save, tiny_model_folder: Path) -> None:
    card = (save(mixture, adapter=SPEC) / "README.md").read_text(encoding="utf-8")
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "caltune"
    assert "mixlora" in yaml.safe_load(header)["tags"]
    assert f'from_pretrained("{tiny_model_folder.resolve()}"' in body
    assert "PeftModel" not in body


def test_the_cards_code_runs(mixture: nn.Module, save: Save, tmp_path: Path) -> None:
    folder = save(mixture, adapter=SPEC)
    card = (folder / "README.md").read_text(encoding="utf-8")
    load, export = (block.split("```")[0] for block in card.split("```python\n")[1:])
    code = f"{load}\n{export}".replace("path/to/this/folder", str(folder))
    names: dict[str, nn.Module] = {}
    exec(code.replace("path/to/a/new/folder", str(tmp_path / "public")), names)
    assert torch.equal(names["model"](TOKENS).logits, mixture(TOKENS).logits)
    assert {path.name for path in (tmp_path / "public").iterdir()} == {"adapter_config.json", "adapter_model.bin"}
