"""From a batch of questions to log-probabilities of their options: the forward pass that every stage shares.

Only the scored positions go through `lm_head`; softmax and the calibration head are computed in float32. Shape letters
as in `components/data/batching.py`, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn

from components.data.batching import PADDING, Batch
from components.errors import ModelError
from components.models.calibration_head import CalibrationHead
from components.models.mixlora.flc import functional_confidence
from components.models.mixlora.inject import recorder_of
from components.models.mixlora.routing import Routing

LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Configuration keys of architectures that scale the logits after `lm_head` (Cohere, Granite, Falcon-H1, ...)."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
ALIBI_MODELS = {"bloom", "mpt"}


class ScoringModel(nn.Module):
    """A causal language model asked for its logits at chosen positions only.

    Args:
        model: A `transformers` causal language model, with or without an adapter.
        flc_over: Tokens that `flc` averages over, for a model with MixLoRA.

    Attributes:
        routing: What the routers decided in the last forward pass; None for a model without any.

    Raises:
        ModelError: An architecture whose scores would be wrong without any sign of it.
    """

    def __init__(self, model: nn.Module, flc_over: Literal["prompt", "last"] = "prompt") -> None:
        super().__init__()
        self.model, self.flc_over = model, flc_over
        self.routing: Routing | None = None
        self._recorder = recorder_of(model)
        check_architecture(self._causal_lm)
        self._window = _attention_window(self._causal_lm.config.get_text_config())

    @property
    def _causal_lm(self) -> Any:
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def forward(self, batch: Batch) -> Tensor:
        """Logits at the batch's scored positions, float32 [P, V].

        Raises:
            ModelError: A row with several options reaches beyond the model's attention window, which the block mask
                would switch off.
        """
        causal_lm = self._causal_lm
        self._check_window(batch)
        hidden = self._hidden(causal_lm, batch)
        chosen = hidden.flatten(0, 1).index_select(0, batch.positions)
        logits = causal_lm.get_output_embeddings()(chosen).float()
        # Gemma 2 caps its logits after lm_head.
        cap = getattr(causal_lm.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def flc(self, batch: Batch) -> Tensor | None:
        """Router confidence of each row in the last forward pass, float32 [R]; None for a model without routers.

        Args:
            batch: The batch of that pass.
        """
        return None if self.routing is None else functional_confidence(self.routing, batch.segments, self.flc_over)

    def _hidden(self, causal_lm: Any, batch: Batch) -> Tensor:
        """Last hidden states [R, T, d]; keeps what the routers decided."""

        def run() -> Tensor:
            return causal_lm.base_model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask(next(self.model.parameters()).dtype),
                position_ids=batch.position_ids,
                use_cache=False,
            ).last_hidden_state

        if self._recorder is None:
            return run()
        token_mask = batch.segments != PADDING
        with self._recorder.recording(token_mask) as records:
            hidden = run()
        self.routing = Routing(tuple(records), token_mask)
        return hidden

    def _check_window(self, batch: Batch) -> None:
        if self._window is None or batch.single_option:
            return
        longest = int(batch.position_ids.max()) + 1
        if longest > self._window:
            raise ModelError(
                f"{type(self._causal_lm).__name__} attends to the last {self._window} tokens only, but a question "
                f"takes {longest}; set data.max_length to {self._window} at most"
            )


def check_architecture(causal_lm: Any) -> None:
    """Refuses models for which `lm_head` at chosen positions, or options side by side in a row, give wrong scores.

    Args:
        causal_lm: A `transformers` causal language model, adapter unwrapped.

    Raises:
        ModelError: The logits are scaled after `lm_head`, a layer reads the tokens in order instead of by the mask
            (state-space, linear attention, convolution), positions come from the place in the row (ALiBi), or the
            model does not tell its body from its output layer.
    """
    config, name = causal_lm.config.get_text_config(), type(causal_lm).__name__
    if causal_lm.base_model is causal_lm or causal_lm.get_output_embeddings() is None:
        raise ModelError(f"{name} does not tell its body from its output layer, so its options cannot be scored")
    for key in LOGIT_SCALES:
        scale = getattr(config, key, None)
        if scale not in (None, 1):
            raise ModelError(f"{name} scales its logits after the output layer ({key} {scale}): not supported")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if strange or causal_lm._is_stateful:
        kinds = ", ".join(strange) or "recurrent state"
        raise ModelError(f"{name} has layers that attention masks do not reach ({kinds}): not supported")
    if config.model_type in ALIBI_MODELS or getattr(config, "alibi", False):
        raise ModelError(f"{name} takes positions from the place in the row (ALiBi): not supported")


def _attention_window(config: Any) -> int | None:
    """Tokens that the narrowest layer attends to; None where every layer sees all."""
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    sliding = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    chunk = getattr(config, "attention_chunk_size", None) if "chunked_attention" in kinds else None
    return min((int(size) for size in (sliding, chunk) if size), default=None)


@dataclass(frozen=True)
class OptionScores:
    """What a batch's options scored.

    Attributes:
        log_probs: float32 [R, K]; sum of the option's token log-probabilities, -inf where there is no such option.
        mass: float32 [R]; probability that the options hold together, before renormalising over them (E55). With text
            scoring the sum of the options' own probabilities, which counts twice what two options share: above 1 is
            possible where options are equal or one begins with another.
    """

    log_probs: Tensor
    mass: Tensor


def token_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Log-probability of every scored token.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: Says which tokens are scored where.

    Returns:
        float32 [E].
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    return logits[batch.entry_position, batch.entry_token] - normaliser[batch.entry_position]


def option_scores(logits: Tensor, batch: Batch) -> OptionScores:
    """Scores of every option, differentiable.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: The batch the logits come from.
    """
    rows, slots = batch.option_mask.shape
    log_probs = torch.zeros(rows * slots, dtype=logits.dtype, device=logits.device)
    log_probs = log_probs.index_add(0, batch.entry_slot, token_log_probs(logits, batch)).view(rows, slots)
    log_probs = log_probs.masked_fill(~batch.option_mask, -torch.inf)
    return OptionScores(log_probs, log_probs.exp().sum(dim=-1))


def apply_head(head: CalibrationHead | None, logits: Tensor) -> Tensor:
    """Adjusted logits z / tau + l, or the logits themselves without a head."""
    return logits if head is None else head(logits)
