"""The DeepSpeed configuration, which no other file writes, and the engine made with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from components.training.parameter_space import block_groups

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ZeroStage = Literal[0, 1, 2, 3]

BUCKET_ELEMENTS = 2**24
"""Elements that DeepSpeed reduces or gathers in one collective (64 MiB in float32). Its default of 5e8 sets 2 GB aside
on every device."""


def zero_config(stage: ZeroStage, micro_batch_size: int) -> dict[str, Any]:
    """Configuration of an engine whose optimiser is handed to it and whose losses come from `DeepSpeedSpace`.

    Args:
        stage: 0 replicates everything, 1 shards the optimiser state, 2 the gradients too, 3 the weights too.
        micro_batch_size: Rows that a rank sees a step. DeepSpeed only reports it.

    Returns:
        What `deepspeed.initialize` takes as `config`. Gradients are neither clipped nor accumulated, and no precision
        is set: weights keep the type that they come in.
    """
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
    if stage in (1, 2):
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    if stage == 3:
        zero |= {
            # Every weight is sharded, the small ones too: a weight kept whole would not see its shard move.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
            # Would replace torch.nn.functional.linear for the whole process, models outside the engine included.
            "memory_efficient_linear": False,
        }
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # DeepSpeed clips to norm 1 where nothing is said
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def make_engine(
    model: nn.Module,
    theta: Mapping[str, nn.Parameter],
    stage: ZeroStage,
    learning_rate: float,
    weight_decay: float,
    micro_batch_size: int,
) -> DeepSpeedEngine:
    """Puts a model under DeepSpeed, with AdamW on theta. Collective; rank 0's weights go to every rank.

    Args:
        model: What the losses call. It is changed in place: moved to the rank's device and, at stage 3, sharded.
        theta: The parameters of the model to train, by name, in float32. The others are frozen, in any precision.
            Routers are a parameter group of their own, see `block_groups`.
        stage: ZeRO stage.
        learning_rate: Of theta, until `set_learning_rates`.
        weight_decay: Decoupled, on theta without its routers.
        micro_batch_size: Rows that a rank sees a step.

    Returns:
        The engine. The process group is joined where there is one, else made from the launcher's environment.

    Raises:
        ValueError: A parameter of theta is not float32.
    """
    wrong = [name for name, p in theta.items() if p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"trained parameters must be float32, these are not: {wrong[:3]}")

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        # Else DeepSpeed compiles an all-reduce that only inference uses: half a minute, and a compiler must be there.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model.requires_grad_(False)
    for p in theta.values():
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(block_groups({}, theta, weight_decay), lr=learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(stage, micro_batch_size))
    return engine


def link_moments(engine: DeepSpeedEngine) -> None:
    """Tells every weight where its moments lie, so that they can be read and written; nothing to do at stages 0 and 3.

    At stages 1 and 2 DeepSpeed does so once, after the first step of the first parameter group, when the other groups
    have no moments yet.
    """
    if engine.zero_optimization_stage() not in (1, 2):
        return
    from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

    zero = engine.optimizer
    for weights, master in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(weights, master, zero.state)
