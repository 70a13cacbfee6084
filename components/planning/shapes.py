"""The model on the meta device: shapes without values, from `config.json` alone, and how many weights it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from components.config import ModelConfig, RunConfig
from components.errors import ModelError
from components.models.adapter import attach_adapter, is_router, trainable_parameters
from components.models.base import ResolvedModel
from components.models.calibration_head import CalibrationHead
from components.training.build import make_head
from components.training.methods import Method

ATTENTION = "caltune_meta"
FLOAT32 = 4


@dataclass(frozen=True)
class Sizes:
    """What a method's model holds.

    Attributes:
        frozen_count: Frozen weights.
        frozen: Their bytes.
        theta_count: Trained weights of the model, routers included; float32.
        router_count: Those of routers.
        alpha_count: Trained values of the calibration head; 0 without one.
        head: Bytes of the calibration head's values, those that are constant included.
        gathered: Bytes of all weights but the input embedding's, in the precision in which they are gathered.
        gathered_count: Their number.
        largest: Bytes of the largest weight.
        largest_theta: Bytes of the largest trained weight.
        output_and_layer: Bytes of the output layer and of the largest decoder layer.
        layers: Decoder layers.
        vocabulary: Logits a position.
    """

    frozen_count: int
    frozen: int
    theta_count: int
    router_count: int
    alpha_count: int
    head: int
    gathered: int
    gathered_count: int
    largest: int
    largest_theta: int
    output_and_layer: int
    layers: int
    vocabulary: int

    @property
    def theta(self) -> int:
        """Bytes of the trained weights."""
        return self.theta_count * FLOAT32

    @property
    def alpha(self) -> int:
        """Bytes of the head's trained values."""
        return self.alpha_count * FLOAT32


@dataclass(frozen=True)
class MetaModel:
    """A method's model without values.

    Attributes:
        model: With its adapter, in training mode.
        head: Of a method that trains one.
        sizes: What it holds.
        layers: Decoder layers that it really has; fewer than `sizes.layers` where it was shortened.
    """

    model: nn.Module
    head: CalibrationHead | None
    sizes: Sizes
    layers: int


def build(resolved: ResolvedModel, config: RunConfig, method: Method, layers: int | None = None) -> MetaModel:
    """Makes a method's model on the meta device; no weights are read.

    Args:
        resolved: From `resolve_model`; the folder needs no more than `config.json`.
        config: The run.
        method: One that trains.
        layers: Keep this many decoder layers only; None keeps all.

    Raises:
        ModelError: The architecture cannot be built, or its decoder layers cannot be found or differ in their weights.
    """
    base = _base(resolved, config.model)
    found = _decoder_layers(base)
    if layers is not None:
        _shorten(base, found, layers)
    with torch.device("meta"):
        model = attach_adapter(base, method.adapter_spec(config), config.seed)
        head = make_head(method, config, base)
    sizes = _sizes(base, model, head, len(found), int(base.config.get_text_config().vocab_size))
    return MetaModel(model.train(), head, sizes, len(_decoder_layers(base)))


def layers_alike(resolved: ResolvedModel, config: ModelConfig) -> bool:
    """Whether every decoder layer has weights of the same shapes, so that a few of them stand for all."""
    shapes = [[p.shape for p in layer.parameters()] for layer in _decoder_layers(_base(resolved, config))]
    return all(of_layer == shapes[0] for of_layer in shapes)


def _base(resolved: ResolvedModel, config: ModelConfig) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    _register_attention()
    source = {"revision": resolved.revision or "main", "trust_remote_code": config.trust_remote_code}
    try:
        described = AutoConfig.from_pretrained(resolved.path_or_id, local_files_only=resolved.offline, **source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                described,
                dtype=getattr(torch, config.dtype),
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, StrictDataclassError) as problem:
        raise ModelError(f"{resolved.path_or_id}: config.json cannot be laid out: {problem}") from problem
    return model.requires_grad_(False)


def _decoder_layers(model: Any) -> nn.ModuleList:
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers to plan from")
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def _shorten(model: Any, layers: nn.ModuleList, keep: int) -> None:
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is layers:
                setattr(parent, name, nn.ModuleList(list(layers)[:keep]))
                return


def _sizes(base: Any, model: nn.Module, head: CalibrationHead | None, layers: int, vocabulary: int) -> Sizes:
    theta = trainable_parameters(model)
    trained = {id(p) for p in theta.values()}
    every = list(model.parameters())
    frozen = [p for p in every if id(p) not in trained]
    embedding = base.get_input_embeddings().weight
    output = base.get_output_embeddings().weight
    looked_up_only = [] if output is embedding else [id(embedding)]
    gathered = [p for p in every if id(p) not in looked_up_only]
    alpha = [p for p in head.parameters() if p.requires_grad] if head is not None else []
    of_layers = [sum(map(_bytes, layer.parameters())) for layer in _decoder_layers(base)]
    return Sizes(
        frozen_count=sum(p.numel() for p in frozen),
        frozen=sum(map(_bytes, frozen)),
        theta_count=sum(p.numel() for p in theta.values()),
        router_count=sum(p.numel() for name, p in theta.items() if is_router(name)),
        alpha_count=sum(p.numel() for p in alpha),
        head=sum(map(_bytes, head.parameters())) if head is not None else 0,
        gathered=sum(map(_bytes, gathered)),
        gathered_count=sum(p.numel() for p in gathered),
        largest=max(map(_bytes, every)),
        largest_theta=max(map(_bytes, theta.values())),
        output_and_layer=_bytes(output) + max(of_layers),
        layers=layers,
        vocabulary=vocabulary,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _register_attention() -> None:
    """Gives transformers an attention that keeps on the meta device what its own keeps on a GPU.

    There `scaled_dot_product_attention` runs as one kernel, which keeps queries, keys, values, output, the rows'
    log-sum-exp, and the mask as numbers of the queries' type; on the meta device it would fall apart into products and
    keep a matrix of tokens by tokens for every head.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv
    from transformers.masking_utils import sdpa_mask

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device)
        out, _ = fused(query, key, value, 0.0, False, attn_mask=attention_mask)
        return out.transpose(1, 2).contiguous(), None

    registered: list[tuple[Any, Callable[..., Any]]] = [
        (AttentionInterface, attention),
        (AttentionMaskInterface, sdpa_mask),
    ]
    for interface, function in registered:
        interface.register(ATTENTION, function)
