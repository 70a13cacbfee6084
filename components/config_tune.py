"""The run file's `tune` section: what a search varies, what it looks for, and the check that its keys exist."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_serializer, model_validator

from components.config_base import Fraction, Positive, Strict
from components.config_population import PbtConfig, check_population

Value = bool | int | float | str
_OF_HEAD = ("calm.alpha_learning_rate", "calm.entropy_over", "calm.max_temperature", "calm.stop")
_OF_SOLVER = ("calm.inner_steps", "calm.inner_learning_rate", "calm.eta", "calm.phi")
SEARCHED_SECTIONS = {
    "sft": ("training", "model.adapter"),
    "calm": ("training", "model.adapter", "calm"),
    "uq4ct": ("training", "model.mixlora", "uq4ct"),
    "calm_uq4ct": ("training", "model.mixlora", "calm", "uq4ct"),
    "label_smoothing": ("training", "model.adapter", "label_smoothing"),
    "cft": ("training", "model.adapter", "cft"),
    "rcft": ("training", "model.adapter", "cft"),
    "regularization": ("training", "model.adapter", *_OF_HEAD, "calm.head", "regularization"),
    "iterate": ("training", "model.adapter", *_OF_HEAD, "calm.head", "iterate"),
    "learned_ts": ("training", "model.adapter", *_OF_HEAD, *_OF_SOLVER),
}
"""Sections and keys that a method's training reads. Data are prepared once for all trials, so their keys cannot be
searched."""


class Dimension(Strict):
    """The values that one key may take. Exactly one of the keys below."""

    uniform: tuple[float, float] | None = None
    """[low, high], any number between them equally likely."""
    log_uniform: tuple[Positive, Positive] | None = None
    """[low, high], equally likely on a logarithmic scale; for rates."""
    integer: tuple[int, int] | None = None
    """[low, high], whole numbers, both ends included."""
    choice: Annotated[list[Value], Field(min_length=2)] | None = None
    """A list of values."""

    @model_validator(mode="after")
    def _is_one_range(self) -> Dimension:
        given = [name for name in ("uniform", "log_uniform", "integer", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("needs exactly one of uniform, log_uniform, integer, choice")
        bounds = self.integer or self.log_uniform or self.uniform
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ValueError(f"[{bounds[0]}, {bounds[1]}] must be [low, high] with low below high")
        return self

    @model_serializer
    def _without_nulls(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}

    @property
    def ends(self) -> tuple[Value, ...]:
        """Lowest and highest value, or all values of a choice: if these are valid, so is what lies between."""
        return tuple(self.choice or self.integer or self.log_uniform or self.uniform or ())

    def holds(self, value: object) -> bool:
        """Whether a value lies in the range or is one of the choices."""
        if self.choice is not None:
            return value in self.choice
        bounds = self.integer or self.log_uniform or self.uniform
        return bounds is not None and isinstance(value, (int, float)) and bounds[0] <= value <= bounds[1]


class AshaConfig(Strict):
    """Stops a trial at a step where its validation NLL is worse than that of most trials at the same step.

    A stopped trial is not taken up again.
    """

    kind: Literal["asha"] = "asha"
    """Tells this scheduler from `pbt`."""
    grace_steps: int | None = Field(None, ge=1)
    """No trial is stopped before this step; null takes `training.evaluate_every`."""
    reduction_factor: Annotated[float, Field(gt=1)] = 3.0
    """One in this many goes on from grace_steps, from this many times grace_steps, and so on."""


def _kind_of(scheduler: Any) -> str | None:
    """Which kind a scheduler section is; one that does not say so is `asha`."""
    return scheduler.get("kind", "asha") if isinstance(scheduler, dict) else getattr(scheduler, "kind", None)


SchedulerConfig = Annotated[
    Annotated[AshaConfig, Tag("asha")] | Annotated[PbtConfig, Tag("pbt")], Discriminator(_kind_of)
]


class TuneConfig(Strict):
    """A search: `caltune tune`."""

    method: Literal[
        "sft", "calm", "uq4ct", "calm_uq4ct",
        "label_smoothing", "cft", "rcft", "regularization", "iterate", "learned_ts",
    ] = "calm"  # fmt: skip
    """The method searched; one of `methods`. One that averages over several passes is not searched, as a trial's
    evaluations look at a single pass: search `sft`, and take its values over."""
    trials: int = Field(24, ge=1)
    """Trials to run, failed and stopped ones included. The first takes the run file's own values."""
    concurrency: int = Field(1, ge=1)
    """Trials at a time; the cores are divided among them unless `resources.cpus_per_worker` says how many each gets.
    With `pbt` as many run as fit."""
    space: Annotated[dict[str, Dimension], Field(min_length=1)]
    """Dotted keys of the run file, each with its values, e.g. `calm.eta: {uniform: [0.1, 1.0]}`."""
    mode: Literal["constrained", "pareto"] = "constrained"
    """`constrained`: the lowest ECE whose accuracy is at most `accuracy_margin` below the reference. `pareto`: low ECE
    and high accuracy side by side; of the front, the point nearest the best of both becomes the result."""
    accuracy_margin: Fraction = 0.01
    """For `constrained`."""
    reference_accuracy: Fraction | None = None
    """For `constrained`, on validation data; null trains `sft` once and takes its accuracy."""
    split: Literal["validation", "validation_shift", "both"] = "validation"
    """Labelled data that decides, mean over the two for `both`; `validation_shift` needs `data.heldout_groups`."""
    confidence: Literal["softmax", "flc"] = "softmax"
    """Whose ECE: the option softmax's, or the router confidence's, for methods that have routers. A confidence that is
    the same for every question can have a low ECE too."""
    scheduler: SchedulerConfig | None = AshaConfig()
    """Early stopping (`kind: asha`) or population based training (`kind: pbt`); null trains every trial to its end."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> TuneConfig:
        if self.confidence == "flc" and self.method not in ("uq4ct", "calm_uq4ct"):
            raise ValueError(f"confidence 'flc' needs a method with routers (uq4ct, calm_uq4ct), not '{self.method}'")
        return self

    def figure(self, row: Mapping[str, float], metric: Literal["ece", "accuracy", "nll"]) -> float:
        """A metric of an evaluation on the data that decides.

        Args:
            row: The evaluation, `<split>/<metric>`.
            metric: `ece` is that of `confidence`; all in [0, 1], `nll` in nats from 0 on. May be NaN.
        """
        name = f"flc_{metric}" if metric == "ece" and self.confidence == "flc" else metric
        splits = ("validation", "validation_shift") if self.split == "both" else (self.split,)
        return sum(row[f"{split}/{name}"] for split in splits) / len(splits)


def check_space(config: BaseModel, tune: TuneConfig) -> None:
    """Checks that every searched key is one that the method reads, that it takes all of its values, and the scheduler.

    Args:
        config: The whole run; its `tune` is left aside.
        tune: The search.

    Raises:
        ValueError: Names the key and what is wrong, and a near name where there is one; or why the scheduler cannot.
    """
    known = dict(_leaves(type(config), ""))
    sections = SEARCHED_SECTIONS[tune.method]
    searchable = [key for key in known if any(f"{key}.".startswith(f"{section}.") for section in sections)]
    for key, dimension in tune.space.items():
        if key not in known:
            near = difflib.get_close_matches(key, searchable, n=1)
            hint = f", did you mean '{near[0]}'?" if near else f"; '{tune.method}' reads {', '.join(sections)}"
            raise ValueError(f"tune.space: the run file has no key '{key}'{hint}")
        if key not in searchable:
            raise ValueError(f"tune.space: '{key}' cannot be searched; '{tune.method}' reads {', '.join(sections)}")
        if dimension.choice is None and dimension.integer is None and float not in known[key]:
            other = "{integer: [low, high]}" if int in known[key] else "{choice: [...]}"
            raise ValueError(f"tune.space: '{key}' takes no fractions; use {other}")
        for value in dimension.ends:
            if isinstance(value, bool) and bool not in known[key]:
                raise ValueError(f"tune.space: '{key}' does not take {str(value).lower()}")
            problem = _problem_with(config, key, value)
            if problem:
                raise ValueError(f"tune.space: '{key}' does not take {value!r}: {problem}")
    if isinstance(tune.scheduler, PbtConfig):
        check_population(config, tune.scheduler, tune.space, tune.trials)


def with_values(tree: dict[str, Any], values: dict[str, Value]) -> dict[str, Any]:
    """A copy of a run file's content with values at dotted keys; what is not on their way is shared."""
    copy = dict(tree)
    for key, value in values.items():
        section, _, rest = key.partition(".")
        copy[section] = with_values(copy[section], {rest: value}) if rest else value
    return copy


def value_at(tree: dict[str, Any], key: str) -> Any:
    """What a run file's content has at a dotted key."""
    section, _, rest = key.partition(".")
    return value_at(tree[section], rest) if rest else tree[section]


def _problem_with(config: BaseModel, key: str, value: Value) -> str | None:
    try:
        type(config).model_validate(with_values(config.model_dump(mode="json", exclude={"tune"}), {key: value}))
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return None


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Dotted keys of a schema that hold a single value, with the types they take."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        members = tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in members)
        for member in members:
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from _leaves(member, f"{prefix}{name}.")
                break
        else:
            yield f"{prefix}{name}", members
