"""What a training leaves behind: the kept state as an adapter folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from components.config import SAMPLED_METHODS, AdapterSpec, MethodName, RunConfig
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.calibration_head import CalibrationHead
from components.training.loop import LoopResult
from components.training.methods import METHODS

if TYPE_CHECKING:
    from components.training.job import TrainingJob

EVALUATION = "evaluation"
"""Key of `evaluation_settings` among an adapter's details."""


def evaluation_settings(config: RunConfig, method: MethodName) -> dict[str, Any]:
    """What of a run file, beside the prompt, a method's answers depend on: who loads the adapter answers alike.

    Args:
        config: The run.
        method: The method.
    """
    passes: dict[str, Any] = (
        {method: getattr(config, method).model_dump(mode="json")} if method in SAMPLED_METHODS else {}
    )
    return {"max_length": config.data.max_length, "batch_tokens": config.evaluation.batch_tokens, **passes}


def save_result(
    job: TrainingJob,
    result: LoopResult,
    model: nn.Module,
    head: CalibrationHead | None,
    tokenizer: PreTrainedTokenizerBase,
    adapter: AdapterSpec,
) -> None:
    """Writes `adapter/` from the state that the stop rule kept; the head takes its values over.

    Args:
        job: What was trained.
        result: How it ended.
        model: With the adapter in it; its own values are not read.
        head: The calibration head, if there is one.
        tokenizer: Goes with the adapter.
        adapter: What was put into the model.

    Raises:
        ModelError: What was written cannot be read back whole.
    """
    values = {k.removeprefix("value/"): v for k, v in result.state.items() if k.startswith("value/")}
    if head is not None:
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if f"alpha.{name}" in values:
                    parameter.copy_(values[f"alpha.{name}"])
    record = AdapterRecord(
        # A member on its own is no ensemble, so it must not be taken for one.
        method=job.method if job.member is None else f"{job.method}-member-{job.member}",
        steps=result.kept_step,
        prompt=job.config.data.prompt,
        details={**job.details, "last_step": result.last_step, EVALUATION: evaluation_settings(job.config, job.method)}
        | ({} if job.member is None else {"member": job.member}),
        balance_weight=job.config.uq4ct.balance_weight if METHODS[job.method].lower == "uq4ct" else None,
    )
    save_adapter(
        job.folder / "adapter",
        model=model,
        state={k.removeprefix("theta."): v for k, v in values.items() if k.startswith("theta.")},
        head=head,
        tokenizer=tokenizer,
        config=job.config.model,
        adapter=adapter,
        resolved=job.resolved,
        record=record,
    )
