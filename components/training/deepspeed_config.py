"""The DeepSpeed configuration. No other file writes one."""

from __future__ import annotations

from typing import Any, Literal

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
