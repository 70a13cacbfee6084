"""The public MixLoRA format: every tensor finds its place, older names too, and what cannot be honoured is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from components.config import AdapterConfig, MixLoraConfig, ModelConfig
from components.config_data import PromptConfig
from components.errors import ModelError
from components.models.adapter import adapter_parameters, attach_adapter
from components.models.adapter_files import load_adapter
from components.models.base import resolve_model
from components.models.calibration_head import CalibrationHead
from components.models.mixlora.public_files import read_tensors
from components.models.mixlora.public_format import convert_public, export_public, import_public

TOKENS = torch.arange(3, 23)[None]
SPEC = MixLoraConfig(r=3, alpha=6, num_experts=4, top_k=2)
WIDTHS = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
WIDTHS |= {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
LEGACY = {"gate_proj": "w1_proj", "down_proj": "w2_proj", "up_proj": "w3_proj"}
GATE = "mixlora.layers.1.mlp.moe_gate.weight"
EXPERT_A = "mixlora.layers.0.mlp.up_proj.experts.2.lora_A.weight"
QUERY_B = "mixlora.layers.1.self_attn.q_proj.lora_B.weight"

Save = Callable[..., Path]
Base = Callable[[], LlamaForCausalLM]
Trained = Callable[..., nn.Module]
Write = Callable[..., Path]


def public_tensors(targets: list[str], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors for the tiny model (2 layers, width 32, FFN 64, keys 16), by the current names."""
    tensors = {}
    for layer in range(2):
        tensors[f"mixlora.layers.{layer}.mlp.moe_gate.weight"] = torch.randn(4, 32)
        for name in targets:
            fan_in, fan_out = WIDTHS[name]
            attention = name in ("q_proj", "k_proj", "v_proj", "o_proj")
            prefix = f"mixlora.layers.{layer}." + (f"self_attn.{name}" if attention else f"mlp.{name}.experts")
            for part in [""] if attention else [f".{expert}" for expert in range(4)]:
                tensors[f"{prefix}{part}.lora_A.weight"] = torch.randn(3, fan_in) * 0.2
                tensors[f"{prefix}{part}.lora_B.weight"] = torch.randn(fan_out, 3) * 0.2
    return {key: value.to(dtype) for key, value in tensors.items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a public folder; keyword arguments change fields, None takes one out."""

    def run(tensors: dict[str, Tensor], *, name: str = "public", **fields: Any) -> Path:
        config = {
            "bias": "none",
            "peft_type": "MIXLORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": 3,
            "lora_alpha": 6,
            "lora_dropout": 0.05,
            "target_modules": list(WIDTHS),
            "routing_strategy": "mixlora",
            "num_experts": 4,
            "top_k": 2,
            **fields,
        }
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        torch.save(tensors, folder / "adapter_model.bin")
        return folder

    return run


def test_every_tensor_finds_its_place(base: Base, write: Write) -> None:
    tensors = public_tensors(list(WIDTHS))
    model, spec = import_public(write(tensors), base())
    assert spec == MixLoraConfig(r=3, alpha=6, dropout=0.05, num_experts=4, top_k=2)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layers = model.get_base_model().model.layers
    for number, layer in enumerate(layers):
        prefix = f"mixlora.layers.{number}"
        assert torch.equal(layer.mlp.router.weight, tensors[f"{prefix}.mlp.moe_gate.weight"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            for half in "AB":
                stacked = getattr(layer.mlp, f"lora_{half}_{name}")
                for expert in range(4):
                    key = f"{prefix}.mlp.{name}.experts.{expert}.lora_{half}.weight"
                    assert torch.equal(stacked[expert], tensors[key])
        value = layer.self_attn.v_proj
        assert torch.equal(value.lora_A["default"].weight, tensors[f"{prefix}.self_attn.v_proj.lora_A.weight"])
        assert torch.equal(value.lora_B["default"].weight, tensors[f"{prefix}.self_attn.v_proj.lora_B.weight"])
        assert value.scaling["default"] == 2.0


def test_fields_are_read(base: Base, write: Write) -> None:
    """And those of ours that the format does not have are not taken from a file of theirs."""
    tensors = public_tensors(list(WIDTHS))
    fields = {"top_k": 3, "router_init_range": 0.5, "jitter_noise": 0.1, "lora_dropout": 0.25, "lora_alpha": 9}
    _, spec = import_public(write(tensors, **fields, flc_over="last", attention="mixlora"), base())
    wanted = MixLoraConfig(
        r=3, alpha=9, dropout=0.25, num_experts=4, top_k=3, router_init_std=0.5, jitter=0.1, attention="lora"
    )
    assert spec == wanted
    _, spec = import_public(write(tensors, top_k=None), base())
    assert spec.top_k == 2


@pytest.mark.parametrize("expert_names", [LEGACY, {}], ids=["w1 w2 w3", "gate down up"])
def test_legacy_names_mean_the_same(base: Base, write: Write, expert_names: dict[str, str]) -> None:
    tensors = public_tensors(list(WIDTHS))
    legacy = {}
    for key, value in tensors.items():
        parts = key.split(".")
        if parts[3] == "mlp" and "experts" in parts:
            layer, projection, expert, half = parts[2], parts[4], parts[6], parts[7]
            key = f"mixlora.layers.{layer}.experts.{expert}.{expert_names.get(projection, projection)}.{half}.weight"
        elif parts[3] == "mlp":
            key = f"mixlora.layers.{parts[2]}.gate.weight"
        legacy[key] = value
    targets = {expert_names.get(name, name): True for name in WIDTHS}
    old = write(legacy, name="old", routing_strategy="mixtral", target_modules=targets)
    model, spec = import_public(old, base())
    again, again_spec = import_public(write(tensors), base())
    assert spec == again_spec
    assert torch.equal(model(TOKENS).logits, again(TOKENS).logits)
    with pytest.raises(ModelError, match=r"missing key 'mixlora\.layers\.0\.mlp\."):
        import_public(write(legacy, name="old", routing_strategy="mixlora"), base())


def test_a_tensor_by_its_old_and_its_new_name_is_refused(base: Base, write: Write) -> None:
    tensors = public_tensors(list(WIDTHS))
    tensors["mixlora.layers.1.gate.weight"] = tensors[GATE]
    with pytest.raises(ModelError, match=r"'mixlora\.layers\.1\.gate\.weight' holds a second value of"):
        import_public(write(tensors, routing_strategy="mixtral"), base())


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj"], ["up_proj", "down_proj", "o_proj"]])
def test_a_projection_that_is_left_out_changes_nothing(base: Base, write: Write, targets: list[str]) -> None:
    """The same as one whose B is zero."""
    tensors = public_tensors(targets)
    model, spec = import_public(write(tensors, target_modules={name: name in targets for name in WIDTHS}), base())
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert spec.attention == ("lora" if attention & set(targets) else "none")
    everything = public_tensors(list(WIDTHS)) | tensors
    for key, value in everything.items():
        if key not in tensors and "lora_B" in key:
            value.zero_()
    full, _ = import_public(write(everything), base())
    torch.testing.assert_close(model(TOKENS).logits, full(TOKENS).logits, atol=1e-5, rtol=0)
    assert (model(TOKENS).logits - base()(TOKENS).logits).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_exactly(base: Base, write: Write, dtype: torch.dtype) -> None:
    tensors = public_tensors(list(WIDTHS), dtype)
    folder = write(tensors)
    assert {value.dtype for value in read_tensors(folder / "adapter_model.bin").values()} == {torch.float32}
    model, _ = import_public(folder, base())
    assert {p.dtype for p in adapter_parameters(model, "mixlora").values()} == {torch.float32}
    stacked = model.get_base_model().model.layers[0].mlp.lora_A_up_proj
    assert torch.equal(stacked[2], tensors[EXPERT_A].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE), f"missing key '{GATE}'"),
        (lambda t: t.pop(EXPERT_A), f"missing key '{EXPERT_A}'"),
        (lambda t: t.pop(QUERY_B), f"missing key '{QUERY_B}'"),
        (lambda t: [t.pop(key) for key in list(t) if "self_attn" in key], r"missing key '.*self_attn"),
        (lambda t: t.update(classifier=torch.ones(2)), "unexpected key 'classifier'"),
        (lambda t: t.update({EXPERT_A.replace(".2.", ".4."): t[EXPERT_A]}), "unexpected key '.*experts.4.lora_A"),
        (lambda t: t.update({EXPERT_A: t[EXPERT_A].T}), rf"'{EXPERT_A}' has shape \[32, 3\], expected \[3, 32\]"),
        (lambda t: t.update({GATE: t[GATE][:3]}), rf"'{GATE}' has shape \[3, 32\], expected \[4, 32\]"),
        (lambda t: t.update({QUERY_B: torch.ones(32, 2)}), rf"'{QUERY_B}' has shape \[32, 2\], expected \[32, 3\]"),
        (lambda t: t[QUERY_B].view(-1)[1].fill_(float("inf")), f"'{QUERY_B}' is empty or has values"),
        (lambda t: t.update({GATE: torch.empty(0)}), f"'{GATE}' is empty or has values"),
        (lambda t: t.update({GATE: torch.ones(4, 32, dtype=torch.int8)}), f"'{GATE}' holds Tensor, not a tensor of"),
        (lambda t: t.update({GATE: "words"}), f"'{GATE}' holds str, not a tensor"),
        (lambda t: t.update({3: torch.ones(1)}), "key 3 holds"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_keys_are_held_to_the_model(
    base: Base, write: Write, change: Callable[[dict[Any, Any]], object], message: str
) -> None:
    tensors = public_tensors(list(WIDTHS))
    change(tensors)
    with pytest.raises(ModelError, match=f"adapter_model.bin.*{message}"):
        import_public(write(tensors), base())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"use_rslora": True}, "use_rslora is not supported"),
        ({"expert_lora": {"use_dora": True}}, "use_dora is not supported"),
        ({"expert_lora": {"r": 4, "lora_alpha": 6}}, "expert_lora.r is 4 but r is 3"),
        ({"expert_lora": {"r": 3, "lora_alpha": 12}}, "expert_lora.lora_alpha is 12 but lora_alpha is 6"),
        ({"expert_lora": [3]}, "field 'expert_lora' must be a mapping"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"act_fn": "gelu"}, "act_fn is 'gelu' but the base model's is 'silu'"),
        ({"act_fn": "nonsense"}, "act_fn is 'nonsense'"),
        ({"act_fn": ["silu"]}, "field 'act_fn' must be a name"),
        ({"routing_strategy": "mixlora-dynamic"}, "routing_strategy 'mixlora-dynamic' is not supported"),
        ({"routing_strategy": "switch"}, "routing_strategy 'switch' is not supported"),
        ({"routing_strategy": None}, "routing_strategy None is not supported"),
        ({"peft_type": "LORA"}, "peft_type 'LORA'"),
        ({"target_modules": "all-linear"}, "'target_modules' must be a list"),
        ({"target_modules": [["q_proj"]]}, "'target_modules' must be a list"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names 'lm_head'"),
        ({"num_experts": None}, "missing field 'num_experts'"),
        ({"r": None}, "missing field 'r'"),
        ({"lora_alpha": None}, "missing field 'lora_alpha'"),
        ({"top_k": 5}, "top_k 5 exceeds num_experts 4"),
        ({"r": "many"}, "field 'r': "),
        ({"lora_dropout": 1.5}, "field 'lora_dropout': "),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    base: Base, write: Write, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"adapter_config.json.*{message}"):
        import_public(write(public_tensors(list(WIDTHS)), **fields), base())


def test_what_says_the_same_in_other_words_is_taken(base: Base, write: Write) -> None:
    tensors = public_tensors(list(WIDTHS))
    plain, _ = import_public(write(tensors), base())
    same = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.2}
    other, _ = import_public(write(tensors, act_fn="swish", expert_lora=same, use_dora=False), base())
    assert torch.equal(other(TOKENS).logits, plain(TOKENS).logits)


class Bomb:
    """Runs code when it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_a_pickle_that_would_run_code_does_not(base: Base, write: Write, tmp_path: Path) -> None:
    folder = write(public_tensors(list(WIDTHS)) | {"more": Bomb(tmp_path / "ran")})
    with pytest.raises(ModelError, match=r"adapter_model.bin cannot be read as tensors"):
        import_public(folder, base())
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "adapter_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists(), "the bomb is a dud, so the test shows nothing"


def test_damaged_and_missing_files_are_named(base: Base, write: Write) -> None:
    folder = write(public_tensors(list(WIDTHS)))
    weights, config = folder / "adapter_model.bin", folder / "adapter_config.json"
    content, text = weights.read_bytes(), config.read_text(encoding="utf-8")
    for damaged in (content[: len(content) // 2], b"", b"\x80\x02.", b"words" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"adapter_model\.bin cannot be read"):
            import_public(folder, base())
    weights.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.bin cannot be read"):
        import_public(folder, base())
    for damaged_text, message in ((text[:-5], "cannot be read"), ("[1]", "holds no JSON object")):
        config.write_text(damaged_text, encoding="utf-8")
        with pytest.raises(ModelError, match=f"adapter_config.json {message}"):
            import_public(folder, base())


@pytest.fixture
def mixture(base: Base, trained: Trained) -> nn.Module:
    return trained(attach_adapter(base(), SPEC, seed=1)).eval()


def test_export_writes_the_known_names_and_import_brings_them_back(
    mixture: nn.Module, save: Save, base: Base, tmp_path: Path, tiny_model_folder: Path
) -> None:
    target = export_public(save(mixture, adapter=SPEC), tmp_path / "new" / "public")
    written = read_tensors(target / "adapter_model.bin")
    shapes = {key: list(value.shape) for key, value in written.items()}
    assert shapes == {key: list(value.shape) for key, value in public_tensors(list(WIDTHS)).items()}
    up = mixture.get_base_model().model.layers[0].mlp.lora_A_up_proj
    assert torch.equal(written[EXPERT_A], up[2])
    config = json.loads((target / "adapter_config.json").read_text(encoding="utf-8"))
    assert config.pop("lora_dropout") < 1e-8
    assert config == {
        "bias": "none",
        "peft_type": "MIXLORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tiny_model_folder.resolve()),
        "r": 3,
        "lora_alpha": 6,
        "target_modules": sorted(WIDTHS),
        "routing_strategy": "mixlora",
        "num_experts": 4,
        "top_k": 2,
        "act_fn": "silu",
        "router_init_range": 0.02,
        "router_aux_loss_coef": 0.01,
    }
    again, spec = import_public(target, base())
    assert spec.model_copy(update={"dropout": 0.0}) == SPEC
    assert torch.equal(again(TOKENS).logits, mixture(TOKENS).logits)
    assert [path.name for path in target.parent.iterdir()] == ["public"]


def test_a_public_folder_becomes_one_of_ours(
    base: Base,
    base_config: ModelConfig,
    tiny_tokenizer: PreTrainedTokenizerFast,
    write: Write,
    tmp_path: Path,
) -> None:
    targets = ["q_proj", "gate_proj", "down_proj"]
    public = write(public_tensors(targets), target_modules=targets)
    folder = convert_public(
        public,
        tmp_path / "ours",
        config=base_config,
        resolved=resolve_model(base_config),
        tokenizer=tiny_tokenizer,
        prompt=PromptConfig(),
    )
    model, head = load_adapter(folder, base())
    assert head is None
    assert torch.equal(model(TOKENS).logits, import_public(public, base())[0](TOKENS).logits)


def test_what_the_format_cannot_hold_is_not_written(
    mixture: nn.Module, base: Base, trained: Trained, save: Save, tmp_path: Path
) -> None:
    target = tmp_path / "public"
    with pytest.raises(ModelError, match="no place for the calibration head of 'calm'"):
        export_public(save(mixture, adapter=SPEC, head=CalibrationHead(320)), target)
    for update, message in (
        ({"attention": "mixlora"}, "no experts on attention"),
        ({"alpha": 6.5}, "wants a whole alpha, this adapter's is 6.5"),
    ):
        spec = SPEC.model_copy(update=update)
        folder = save(trained(attach_adapter(base(), spec, seed=1)), adapter=spec, folder=tmp_path / message)
        with pytest.raises(ModelError, match=message):
            export_public(folder, target)
    lora = AdapterConfig(r=2)
    with pytest.raises(ModelError, match="holds a 'lora' adapter"):
        export_public(
            save(trained(attach_adapter(base(), lora, seed=1)), adapter=lora, folder=tmp_path / "lora"), target
        )
    assert not target.exists()
    target.mkdir()
    with pytest.raises(ModelError, match="exists; name a folder that does not"):
        export_public(save(mixture, adapter=SPEC), target)
