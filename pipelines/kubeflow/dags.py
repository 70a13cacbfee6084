"""The two pipelines: `calibrate` makes a model and registers it if the gate passes; `retrain` does so when it is due.

    calibrate:  prepare -> for each method: train, evaluate, recalibrate -> compare -> gate -> register, or refuse
                (where the gate compares with the champion, the champion answers the same questions first)
    retrain:    prepare -> evaluate champion -> drift?  no: stop
                                                        yes: the same from training on -> gate -> register, promote

The run file is part of a compiled pipeline: its methods are the steps, its resources are theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kfp import compiler, dsl

from components.config import RunConfig
from components.config_gate import CHAMPION
from components.errors import UsageError
from components.run_file import to_yaml
from components.training.methods import METHODS
from pipelines.kubeflow import components as steps
from pipelines.kubeflow.settings import Settings, check, place

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

Which = Literal["calibrate", "retrain"]
DESCRIPTIONS = {
    "calibrate": "Train, recalibrate, evaluate and compare; register the model if it passes the gate.",
    "retrain": "Retrain when the champion has drifted on fresh data; promote the new model if it passes the gate.",
}


def pipeline_name(which: Which, config: RunConfig) -> str:
    """Name of a pipeline, and of its schedule unless another one is asked for."""
    return f"caltune-{which}-{config.run}"


def build(which: Which, config: RunConfig, settings: Settings) -> BaseComponent:
    """A pipeline for a run file.

    Args:
        which: The pipeline.
        config: The run, with all overrides.
        settings: Image, resources, and where training happens.

    Raises:
        UsageError: The run file lacks a section, or something of it cannot work on a cluster.
    """
    check(config, settings)
    if which == "retrain" and config.drift is None:
        raise UsageError("the run file has no section 'drift', which says when a retraining is due; {} takes defaults")
    graph = _Graph(config, settings)
    draw = graph.calibrate if which == "calibrate" else graph.retrain
    # Kubeflow reads the type of what is returned as it stands, and cannot make sense of the text "None".
    return dsl.pipeline(name=pipeline_name(which, config), description=DESCRIPTIONS[which])(lambda: draw())


def compile_pipeline(which: Which, config: RunConfig, settings: Settings, target: Path) -> None:
    """Writes a pipeline as YAML, the same text for the same run file.

    Raises:
        UsageError: See `build`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="kfp")
        compiler.Compiler().compile(build(which, config, settings), str(target))


class _Graph:
    """Draws the steps of both pipelines.

    Args:
        config: The run.
        settings: Image, resources, and where training happens.
    """

    def __init__(self, config: RunConfig, settings: Settings) -> None:
        self.config, self.settings = config, settings
        # No prefix or suffix: as the whole value of a parameter, Kubeflow puts the id in its place.
        self.job = settings.job or dsl.PIPELINE_JOB_ID_PLACEHOLDER

    def calibrate(self) -> None:
        """`calibrate`."""
        prepared = self._prepare()
        folder = prepared.outputs["Output"]
        gate = self.config.gate
        compared = gate is not None and any(rule.reference == CHAMPION for rule in gate.rules)
        first = self._evaluate_champion(folder, prepared) if compared else prepared
        judged = self._judge(folder, self._methods(folder, prepared, first))
        self._by_verdict(folder, judged, lambda: self._step("register", steps.register, folder=folder))

    def retrain(self) -> None:
        """`retrain`."""
        prepared = self._prepare()
        folder = prepared.outputs["Output"]
        champion = self._evaluate_champion(folder, prepared)
        drift = self._step("decide", steps.decide_drift, folder=folder, champion=champion.outputs["Output"])
        with dsl.If(drift.outputs["drifted"] == True, "drifted"):  # noqa: E712
            judged = self._judge(folder, self._methods(folder, prepared, prepared))
            self._by_verdict(folder, judged, lambda: self._ship(folder))
        with dsl.Else("not-drifted"):
            self._step("stop", steps.stop, folder=folder, reason=drift.outputs["reason"])

    def _prepare(self) -> PipelineTask:
        return self._step("prepare", steps.prepare, run_file=to_yaml(self.config), job=self.job)

    def _evaluate_champion(self, folder: Any, prepared: PipelineTask) -> PipelineTask:
        data = prepared.outputs["data"]
        return self._step("evaluate", steps.evaluate_champion, "evaluate-champion", folder=folder, data=data)

    def _methods(self, folder: Any, prepared: PipelineTask, last: PipelineTask) -> PipelineTask:
        """The steps of every method, one after the other because a run folder has one writer; the last of them."""
        data = prepared.outputs["data"]
        for method in self.config.methods:
            title = method.replace("_", "-")
            if METHODS[method].trains_adapter:
                trained = self._train(f"train-{title}", method, folder, data).after(last)
                last = self._step(
                    "evaluate",
                    steps.evaluate_adapter,
                    f"evaluate-{title}",
                    folder=folder,
                    method=method,
                    adapter=trained.outputs["adapter"],
                )
            else:
                measured = self._step(
                    "evaluate", steps.evaluate, f"evaluate-{title}", folder=folder, method=method, data=data
                )
                last = measured.after(last)
            if self.config.recalibrate.get(method):
                fitted = self._step(
                    "recalibrate", steps.recalibrate, f"recalibrate-{title}", folder=folder, method=method
                )
                last = fitted.after(last)
        return last

    def _train(self, title: str, method: str, folder: Any, data: Any) -> PipelineTask:
        settings = self.settings
        common = {"folder": folder, "method": method, "data": data}
        if settings.train_on == "ray":
            return self._step("train", steps.train_on_ray, title, address=settings.ray_address, **common)
        if settings.train_on == "rayjob":
            image = settings.trainer_image or settings.image
            placement = {"image": image, "memory": settings.memory, "hours": settings.hours}
            return self._step("train", steps.train_as_rayjob, title, **placement, **common)
        return self._step("train", steps.train, title, **common)

    def _judge(self, folder: Any, last: PipelineTask) -> PipelineTask:
        compared = self._step("compare", steps.compare, folder=folder).after(last)
        return self._step("gate", steps.gate, folder=folder).after(compared)

    def _by_verdict(self, folder: Any, judged: PipelineTask, ship: Callable[[], object]) -> None:
        with dsl.If(judged.outputs["passed"] == True, "passed"):  # noqa: E712
            ship()
        with dsl.Else("not-passed"):
            self._step("refuse", steps.refuse, folder=folder, reason=judged.outputs["reason"])

    def _ship(self, folder: Any) -> None:
        registered = self._step("register", steps.register, folder=folder)
        by = self.settings.job or dsl.PIPELINE_JOB_NAME_PLACEHOLDER
        self._step("promote", steps.promote, folder=folder, version=registered.outputs["Output"], by=by)

    def _step(self, step: str, made_by: Callable[..., PipelineTask], title: str | None = None, **inputs: Any) -> Any:
        task = made_by(**inputs)
        task.set_display_name(title or task.name)
        place(task, step, self.config, self.settings)
        return task
