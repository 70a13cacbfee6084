"""Puts MixLoRA modules into a model: experts in every FFN, and LoRA, experts or nothing on attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from components.config import MixLoraConfig
from components.errors import ModelError
from components.models.mixlora.layer import MixLoraFfn, MixLoraLinear
from components.models.mixlora.routing import RoutingRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATED, FUSED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("fc1", "fc2")
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj")

FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2"), (GATED, SEPARATE)
    ),
    "phi": (PLAIN, ("q_proj", "k_proj", "v_proj", "dense")),
    "phi3": (FUSED, ("qkv_proj", "o_proj")),
}
"""Projections of FFN and attention by `model_type`. A family is listed once its FFN is known to compute what
`MixLoraFfn` does; an FFN with the right names may still scale or clamp."""


def inject_mixlora(model: PreTrainedModel, config: MixLoraConfig) -> RoutingRecorder:
    """Replaces every FFN and, with `attention: mixlora`, every attention projection. The model is changed in place.

    Args:
        model: A causal language model, its weights frozen or to be frozen by the caller.
        config: Experts, ranks, where.

    Returns:
        The recorder that all routers share.

    Raises:
        ModelError: A family that is not known, or a layer without the modules of its family.
    """
    kind = model.config.get_text_config().model_type
    if kind not in FAMILIES:
        raise ModelError(
            f"MixLoRA knows the FFN of {', '.join(FAMILIES)}; this model is '{kind}' "
            f"(looked for {'/'.join(GATED)}, {'/'.join(FUSED)} or {'/'.join(PLAIN)} in layers[i].mlp)"
        )
    ffn, _ = FAMILIES[kind]
    recorder = RoutingRecorder()
    for number, layer in enumerate(_layers(model, kind)):
        mlp = _child(layer, "mlp", f"layers[{number}]", kind)
        for name in ffn:
            _child(mlp, name, f"layers[{number}].mlp", kind, nn.Linear)
        activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
        if activation is None:
            raise ModelError(f"{kind}: looked for 'act_fn' or 'activation_fn' in layers[{number}].mlp, found neither")
        if config.attention == "mixlora":
            attention = _child(layer, "self_attn", f"layers[{number}]", kind)
            for name in attention_projections(model):
                base = _child(attention, name, f"layers[{number}].self_attn", kind, nn.Linear)
                setattr(attention, name, MixLoraLinear(base, config, recorder))
        layer.mlp = MixLoraFfn(mlp, activation, config, recorder)
    return recorder


def attention_projections(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the attention projections of a known family."""
    return FAMILIES[model.config.get_text_config().model_type][1]


def recorder_of(model: nn.Module) -> RoutingRecorder | None:
    """The recorder of a model with MixLoRA modules, None of one without."""
    return next((m.recorder for m in model.modules() if isinstance(m, MixLoraFfn)), None)


def _layers(model: Any, kind: str) -> Any:
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise ModelError(f"{kind}: looked for 'layers' in {type(model.base_model).__name__}, which has none")
    return layers


def _child(parent: Any, name: str, where: str, kind: str, wanted: type[nn.Module] = nn.Module) -> Any:
    child = getattr(parent, name, None)
    if not isinstance(child, wanted):
        found = "nothing" if child is None else type(child).__name__
        raise ModelError(f"{kind}: looked for {wanted.__name__} '{name}' in {where}, found {found}")
    return child
