"""Gradient checkpointing: layers keep their input only and compute the rest again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from components.models.mixlora.inject import recorder_of


def recompute_activations(model: nn.Module) -> None:
    """Switches it on, for training mode; routers then choose the same experts for the same tokens again (E14).

    Args:
        model: From `attach_adapter`.
    """
    how: dict[str, Any] = {"use_reentrant": False}  # the other kind refuses torch.autograd.grad
    recorder = recorder_of(model)
    if recorder is not None:
        how["context_fn"] = recorder.checkpoint_contexts
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)  # type: ignore[operator]
    # For the other kind transformers has the embeddings ask for gradients, so that every pass would build a graph.
    model.disable_input_require_grads()  # type: ignore[operator]
