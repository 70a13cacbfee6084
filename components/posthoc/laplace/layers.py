"""The LoRA matrices of a model, and what goes in and out of them in a forward pass.

Each matrix W maps an input a to an output W a, and with s the slope of a scalar at that output the gradient of W is the
sum over tokens of s a^T. One side of it is the model's width (d), the other LoRA's rank (r): matrix A is wide at its
input, matrix B at its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.errors import ModelError
from components.models.adapter import ADAPTER_NAME

_A, _B = f".lora_A.{ADAPTER_NAME}", f".lora_B.{ADAPTER_NAME}"


@dataclass(frozen=True)
class LoraLayer:
    """One LoRA matrix.

    Attributes:
        name: Its module's name without the adapter's own, as in the adapter's file.
        module: The layer.
        wide_input: Whether the model's width is at its input (A), else at its output (B).
    """

    name: str
    module: nn.Linear
    wide_input: bool

    @property
    def wide(self) -> int:
        """d, entries on the model's side."""
        return self.module.in_features if self.wide_input else self.module.out_features

    @property
    def narrow(self) -> int:
        """r, entries on LoRA's side."""
        return self.module.out_features if self.wide_input else self.module.in_features

    def sides(self, inputs: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """(the wide side, the narrow side) of inputs and output slopes."""
        return (inputs, slopes) if self.wide_input else (slopes, inputs)


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """The LoRA matrices of a model, in the order of its modules.

    Raises:
        ModelError: It has none, or one that is not of a linear layer.
    """
    layers = []
    for name, module in model.named_modules():
        if "lora_embedding_" in name and list(module.parameters(recurse=False)):
            raise ModelError(f"{name}: a posterior is fitted for adapters of linear layers only; see target_modules")
        for ending in (_A, _B):
            if name.endswith(ending):
                if not isinstance(module, nn.Linear):
                    raise ModelError(f"{name} is {type(module).__name__}: a posterior needs linear LoRA layers")
                layers.append(LoraLayer(name.removesuffix(f".{ADAPTER_NAME}"), module, ending == _A))
    if not layers:
        raise ModelError("the model has no LoRA matrices to fit a posterior for; set model.adapter.kind to lora")
    return layers


class Captured:
    """What a forward pass left at some layers; see `capturing`.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[LoraLayer]) -> None:
        self.layers = layers
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    @property
    def inputs(self) -> list[Tensor]:
        """What went into each layer, [R, T, in], outside the graph."""
        return [self._inputs[number] for number in range(len(self.layers))]

    def slopes(self, of: Tensor, again: bool) -> tuple[Tensor, ...]:
        """Gradient of a scalar at each layer's output, [R, T, out].

        Args:
            of: The scalar.
            again: Keep the graph for another one.
        """
        outputs = [self._outputs[number] for number in range(len(self.layers))]
        return torch.autograd.grad(of, outputs, retain_graph=again)

    def keep(self, number: int, inputs: Tensor, output: Tensor) -> None:
        """Takes down one layer's call."""
        if number in self._inputs or output.ndim != 3:
            name = self.layers[number].name
            raise ModelError(f"{name} is not called once for all tokens of the rows: no posterior can be fitted to it")
        # Nothing before the first layers has a gradient: the graph begins at their outputs.
        if not output.requires_grad:
            output.requires_grad_(True)
        self._inputs[number], self._outputs[number] = inputs.detach(), output


@contextmanager
def capturing(layers: Sequence[LoraLayer]) -> Iterator[Captured]:
    """Takes down inputs and outputs of layers in the one forward pass made within, with gradients switched on.

    No weight needs a gradient, so no time is spent on theirs.

    Raises:
        ModelError: A layer is called more than once, or not on [R, T, d].
    """
    captured = Captured(layers)

    def hook_of(number: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, output: captured.keep(number, args[0], output)

    handles = [layer.module.register_forward_hook(hook_of(number)) for number, layer in enumerate(layers)]
    try:
        with torch.enable_grad():
            yield captured
    finally:
        for handle in handles:
            handle.remove()
