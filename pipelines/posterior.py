"""Stage `posterior`: what a method fits around its trained adapter, before it can be evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.tracking.logger import ending

if TYPE_CHECKING:
    from components.config import MethodName
    from components.models.base import ResolvedModel
    from pipelines.calibrate import Calibration


def fit_posterior(stages: Calibration, method: MethodName, resolved: ResolvedModel) -> None:
    """Fits the posterior of a method's adapter on the data it was trained on, unless that was done before.

    Args:
        stages: The run.
        method: A method whose predictions come from a posterior; its adapter is trained.
        resolved: The base model.

    Raises:
        CaltuneError: The adapter is damaged, or no posterior can be fitted to it.
    """
    stage = f"posterior/{method}"
    if stages.folder.is_done(stage):
        return
    from components.data.prepare import load_prepared
    from ray_jobs.posterior import PosteriorJob
    from ray_jobs.posterior import fit_posterior as fit

    data = load_prepared(stages.folder.path / "data")
    adapter = stages.folder.method(method) / "adapter"
    logger = stages.logger.child(f"posterior-{method}", {"stage": "posterior", "method": method})
    total = len(data.splits["train"])
    with (
        stages.folder.stage(stage) as notes,
        ending(logger),
        stages.reporter.task(f"fit the posterior of {method}", total) as advance,
    ):
        notes.update(fit(PosteriorJob(stages.config, data, resolved, adapter), lambda done: advance(done, "")))
        logger.log_metrics({f"posterior/{name}": float(value) for name, value in notes.items()}, 0)
        logger.log_artifact(adapter)
