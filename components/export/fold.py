"""Alpha as part of the output layer: row y of its weights divided by tau_y, its bias made b_y / tau_y + l_y.

Exact, but for rounding, where the output layer has a bias, or where the offsets are all equal, which softmax does not
see (the scalar form). An architecture whose output layer is built without a bias (Llama and most others) has no place
for offsets; whoever loads the file would drop them. So what is folded is compared with the head itself before it is
written, and `components/export/merged.py` refuses what differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from components.errors import ModelError
from components.models.calibration_head import CalibrationHead


def require_foldable(config: Any, architecture: str) -> None:
    """Refuses architectures that do something to the logits between the output layer and the head.

    Args:
        config: The model's configuration.
        architecture: Its class name, for the message.

    Raises:
        ModelError: The logits are soft-capped (Gemma 2): cap * tanh(z / cap) / tau is no cap of anything linear.
    """
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:
        raise ModelError(
            f"{architecture} soft-caps its logits after the output layer (final_logit_softcapping {cap}), and the "
            "calibration head comes after that cap: it cannot be folded into the layer before; export without --fold"
        )


@torch.no_grad()
def fold_head(model: Any, head: CalibrationHead) -> bool:
    """Puts a head into a model's output layer, in place; tied embeddings are untied, so that the input keeps its own.

    Args:
        model: A plain `transformers` causal language model in float32.
        head: Its calibration head.

    Returns:
        Whether the offsets went in too, because the output layer has a bias.

    Raises:
        ModelError: The output layer is not linear, or is of another width than the head.
    """
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or output.out_features != head.vocabulary_size:
        raise ModelError(
            f"{type(model).__name__}'s output layer is {output}, not a linear layer with the head's "
            f"{head.vocabulary_size} rows; export without --fold"
        )
    scale = torch.exp(-(head.rho + head.shared).double())
    output.weight = nn.Parameter((output.weight.double() * scale[:, None]).float(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}  # what save_pretrained leaves out of the file, found when the model was built
    bias: nn.Parameter | None = getattr(output, "bias", None)
    if bias is None:
        return False
    output.bias = nn.Parameter((bias.double() * scale + head.l.double()).float(), requires_grad=False)
    return True
