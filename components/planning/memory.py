"""Bytes that one GPU holds in each phase of a training step, part by part.

What a step allocates beside the losses themselves follows from `components/training`: `parameter_space.py`,
`deepspeed_space.py`, `bilevel/bome.py`, and DeepSpeed 0.19. Each formula below says where it comes from. With N GPUs
and ZeRO stage s, t stands for the bytes of the trained weights (float32) and a for those of the calibration head.

Only what PyTorch's allocator hands out is counted; see `layouts.HEADROOM` for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from components.planning.dry_run import LossUsage
from components.planning.shapes import FLOAT32, Sizes
from components.planning.tally import Usage
from components.training.deepspeed_engine import BUCKET_ELEMENTS
from components.training.methods import Method

Part = Literal["weights", "adapter", "gradients", "optimiser", "activations", "bilevel", "logits", "buffers"]
PARTS: tuple[Part, ...] = (
    "weights", "adapter", "gradients", "optimiser", "activations", "bilevel", "logits", "buffers",
)  # fmt: skip

BUCKET = BUCKET_ELEMENTS * FLOAT32
"""Bytes of DeepSpeed's reduction bucket; gradients are float32."""

LIVE_ELEMENTS = 10**9
"""DeepSpeed's `stage3_max_live_parameters` and `stage3_max_reuse_distance`, which the engine leaves as they are: it
gathers ahead until so many weights are whole, and lets go of a weight that is not needed again within so many."""


@dataclass(frozen=True)
class Layout:
    """How a run is laid out.

    Attributes:
        gpus: N.
        stage: ZeRO stage; None for plain data parallel training.
        checkpointing: Whether layers compute their activations again in the backward pass.
    """

    gpus: int
    stage: int | None
    checkpointing: bool

    def share(self, bytes_: float, from_stage: int) -> float:
        """Bytes of something that ZeRO divides among the GPUs from a stage on."""
        return bytes_ / self.gpus if self.stage is not None and self.stage >= from_stage else bytes_


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: What happens.
        parts: Bytes by part.
    """

    name: str
    parts: Mapping[Part, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


def peak(sizes: Sizes, usage: LossUsage, method: Method, inner_steps: int, layout: Layout) -> Phase:
    """The phase of a step in which most is held.

    Args:
        sizes: What the model holds.
        usage: What the losses take with this layout's rows a GPU and checkpointing.
        method: One that trains.
        inner_steps: T, for a bilevel method.
        layout: GPUs, stage, checkpointing.
    """
    return max(phases(sizes, usage, method, inner_steps, layout), key=lambda phase: phase.total)


def phases(sizes: Sizes, usage: LossUsage, method: Method, inner_steps: int, layout: Layout) -> list[Phase]:
    """Every phase of a step, in order; arguments as for `peak`."""
    step = _Step(sizes, layout)
    if not method.trains_head:
        return [*step.gradient("gradient of the loss", usage.lower, 0.0), *step.apply()]
    t, a = step.vector, float(sizes.alpha)
    if method.levels == "alternate":
        found = [*step.gradient("gradient of g", usage.lower, 0.0), *step.apply()]
        return [*found, *step.gradient("gradient of f", usage.upper, 0.0, alpha=a), *step.apply(alpha=a)]
    if method.levels == "sum":
        found = [
            *step.gradient("gradient of g", usage.lower, 0.0, alpha=a),
            *step.gradient("gradient of f", usage.upper, t + a, alpha=a),
        ]
        return [*found, step.phase("direction", bilevel=3 * (t + a)), *step.apply(alpha=a)]
    found = step.gradient("gradient of g", usage.lower, 0.0, alpha=a)
    # Held from here on: grad g in both blocks and the snapshot of theta; `_at_surrogate` of bome.py.
    held = 2 * t + a
    if inner_steps > 1:
        # The last inner gradient lives until the next one has taken its name.
        held += t if inner_steps > 2 else 0.0
        found += step.gradient("inner step", usage.lower, held)
        held += 0.0 if inner_steps > 2 else t
    found += step.gradient("g at theta_T", usage.lower_forward, held, alpha=a, theta=False)
    # theta is back in place; grad g, grad g at theta_T and grad q remain, the last with theta's block of the first.
    held = t + 3 * a
    found += step.gradient("gradient of f", usage.upper, held, alpha=a)
    # grad f and the direction, which is a vector of its own.
    found.append(step.phase("direction", bilevel=held + 2 * (t + a)))
    return [*found, *step.apply(alpha=a)]


class _Step:
    """Building blocks of a step's phases."""

    def __init__(self, sizes: Sizes, layout: Layout) -> None:
        self.sizes, self.layout = sizes, layout
        self.sharded = layout.stage == 3
        # A vector over theta: whole on every rank up to stage 2, this rank's shards at stage 3.
        self.vector = layout.share(sizes.theta, 3)

    def phase(self, name: str, **parts: float) -> Phase:
        """A phase in which `parts` come on top of what is always there."""
        always = self._always()
        return Phase(name, {part: always.get(part, 0.0) + parts.get(part, 0.0) for part in PARTS})

    def _always(self) -> dict[Part, float]:
        t, share, sizes = self.sizes.theta, self.layout.share, self.sizes
        # DeepSpeed keeps masters from stage 1 on, though the trained weights are float32 themselves.
        masters = 0.0 if self.layout.stage in (None, 0) else share(t, 1)
        # At stage 3 it also keeps a place for every gradient shard, and its bucket (`__setup_for_real_optimizer`).
        shards, bucket = (share(t, 3), BUCKET) if self.sharded else (0.0, 0)
        return {
            "weights": share(sizes.frozen, 3),
            "adapter": share(t, 3) + masters,
            "gradients": shards,
            "optimiser": 2 * share(t, 1),
            "bilevel": sizes.head + 2 * sizes.alpha,
            "buffers": float(bucket),
        }

    def gradient(self, name: str, usage: Usage, held: float, *, alpha: float = 0.0, theta: bool = True) -> list[Phase]:
        """The moments of one gradient: when its loss takes most, and when it is complete.

        Args:
            name: What it is the gradient of.
            usage: What its loss takes.
            held: Bytes of bilevel vectors held meanwhile.
            alpha: Bytes of the gradient's block of alpha.
            theta: Whether it has a block of theta.
        """
        vector = self.vector if theta else 0.0
        if self.sharded:
            return self._sharded_gradient(name, usage, held, alpha, vector)
        # `sum_tensors_over_ranks` lays the gradients end to end once more.
        copies = 2 if self.layout.gpus > 1 else 1
        return [
            self.phase(
                name, bilevel=held, activations=usage.activations, logits=usage.logits, gradients=usage.gradients
            ),
            self.phase(f"{name}, summed", bilevel=held, gradients=copies * (vector + alpha)),
        ]

    def _sharded_gradient(self, name: str, usage: Usage, held: float, alpha: float, vector: float) -> list[Phase]:
        """At stage 3: shards from the start, and beside them one whole gradient and its padded copy at a time."""
        one = 2 * self.sizes.largest_theta if vector else 0
        gathered, flat = self._gathered(), self._flat()
        common = {"bilevel": held, "gradients": vector + one}
        # Once a small model is whole it stays so to the end of the step, and the last collective's buffer goes when the
        # output layer has taken its weights from it, before there are logits. With a large one DeepSpeed has begun to
        # gather for the backward pass by then, and goes on.
        small = self.sizes.gathered_count <= LIVE_ELEMENTS / 2
        without_logits = usage.before_logits if small else usage.without_logits
        return [
            self.phase(name, activations=without_logits, buffers=gathered + flat, **common),
            self.phase(
                name,
                activations=usage.activations,
                logits=usage.logits,
                buffers=gathered + (0.0 if small else flat),
                **common | {"gradients": common["gradients"] + alpha},
            ),
        ]

    def _gathered(self) -> float:
        """Bytes of whole weights that are alive at stage 3 when the backward pass begins.

        Autograd keeps the transposed weight of every linear layer until that layer's backward pass, and with it the
        gathered copy, though DeepSpeed has let go of it. With checkpointing a layer's is kept only while it is computed
        again. Beside these DeepSpeed holds as many weights as it may. Of a small model it holds all, and those are the
        ones that autograd keeps.
        """
        kept = self.sizes.output_and_layer if self.layout.checkpointing else self.sizes.gathered
        count = self.sizes.gathered_count
        if count <= LIVE_ELEMENTS / 2:
            return float(self.sizes.gathered)
        return min(kept, self.sizes.gathered) + self.sizes.gathered * min(1.0, LIVE_ELEMENTS / count)

    def _flat(self) -> float:
        """Bytes of the buffer that a collective gathers into, from which the weights are then copied.

        It takes weights in until it has as many as the prefetch bucket.
        """
        every = self.sizes.frozen + self.sizes.theta
        mean = every / (self.sizes.frozen_count + self.sizes.theta_count)
        return float(min(every, BUCKET_ELEMENTS * mean + self.sizes.largest))

    def apply(self, alpha: float = 0.0) -> list[Phase]:
        """The optimiser's step along a direction (`apply` of both spaces)."""
        t, own = float(self.sizes.theta), self.layout.share(self.sizes.theta, 1)
        if self.layout.stage is None:
            # The direction is the gradient itself; AdamW over lists of tensors makes one copy, the root of the moments.
            return [self.phase("optimiser's step", gradients=t + alpha, optimiser=t + alpha)]
        if self.layout.stage == 0:
            # <d, theta> is differentiated, so there is a gradient beside the direction, and one more laid end to end
            # for the sum over ranks.
            return [self.phase("optimiser's step", gradients=3 * t + alpha)]
        # AdamW on one flat tensor: root of the second moments, and that divided by the bias correction.
        if self.sharded:
            return [self.phase("optimiser's step", gradients=2 * own + alpha, optimiser=2 * own)]
        # Gradients go through the bucket, which is laid end to end once more to be summed; what has been summed before
        # waits in this rank's part.
        through = min(t, BUCKET) + (t - min(t, BUCKET)) / self.layout.gpus
        return [
            self.phase("gradients into ZeRO's buckets", gradients=t + through + alpha, buffers=BUCKET),
            self.phase("optimiser's step", gradients=t + 2 * own + alpha, optimiser=2 * own),
        ]
