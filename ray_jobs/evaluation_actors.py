"""Scoring through Ray Data: a pool of actors, one model copy each, fed with the batches of a single process.

The batches are formed here, by length, as `score_questions` forms them, and a row of the data set is a whole batch. So
their composition, on which the last digits of a score depend, depends neither on the number of actors nor on how Ray
Data divides the rows.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from components.config import RunConfig
from components.data.prompts import EncodedQuestion
from components.errors import CaltuneError
from components.evaluation.scorer import Scorer, ScorerSpec
from ray_jobs.cluster import connect, resources_per_actor

if TYPE_CHECKING:
    from components.models.score_questions import SplitScores

log = logging.getLogger(__name__)

SCORED = ("log_probs", "mass", "flc")
"""Fields of `SplitScores` that an actor computes."""
RESULT = pa.schema(
    {
        "number": pa.int64(),
        "log_probs": pa.list_(pa.list_(pa.float64())),
        "mass": pa.list_(pa.float64()),
        "flc": pa.list_(pa.float64()),  # null for a model without routers
        "error": pa.binary(),
    }
)
"""A scored batch, or the pickled reason why it could not be."""
Encoded = Mapping[str, Sequence[EncodedQuestion]]
Batches = list[tuple[str, list[int]]]


class ScoringActor:
    """What each process of the pool keeps: one copy of the model.

    Args:
        spec: What to load.
        threads: CPU threads of the model.
        device: Where the model goes.
    """

    def __init__(self, spec: ScorerSpec, threads: int, device: str) -> None:
        import torch

        torch.set_num_threads(threads)
        self._load: Callable[[], Scorer] = lambda: Scorer(spec, device)
        self._scorer: Scorer | None = None

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Scores one batch: a row of `number` and `questions` to a row of `number` and the fields of `SplitScores`."""
        (row,) = batch.to_pylist()
        try:
            # Loaded here and not above: Ray would report a damaged model as a dead actor, and start another.
            self._scorer = self._scorer or self._load()
            # Batches formed of one batch's questions are that batch.
            found = vars(self._scorer.scores(pickle.loads(row["questions"])))
            result = {name: None if found[name] is None else found[name].tolist() for name in SCORED}
        except (CaltuneError, FloatingPointError) as problem:
            result = {"error": pickle.dumps(problem)}  # raised here, Ray Data would carry its text alone
        except Exception as problem:
            log.exception("a batch could not be scored")
            words = f"the evaluation failed in an actor: {type(problem).__name__}: {problem} (traceback in Ray's log)"
            result = {"error": pickle.dumps(CaltuneError(words))}
        return pa.Table.from_pylist([{"number": row["number"], **result}], schema=RESULT)


def score_on_actors(
    spec: ScorerSpec, config: RunConfig, encoded: Encoded, on_progress: Callable[[int], None]
) -> dict[str, SplitScores]:
    """Scores splits on `evaluation.actors` actors, all splits through one pool.

    An actor that is lost is started again and its batches are scored again, as often as it takes. Without any progress
    for half an hour Ray Data gives up, so that there is an end where the cluster stays full, or where a batch takes its
    actor down each time.

    Args:
        spec: What every actor loads; the paths in it must be there on every node.
        config: The run, which says how many actors there are and what each gets.
        encoded: Questions by split.
        on_progress: Called in this thread with the number of questions done since the last call.

    Returns:
        Scores by split, row for row those of a single process with as many threads as an actor.

    Raises:
        CaltuneError: What a model or a batch was refused for in an actor, or there was no progress for too long.
        FloatingPointError: A score is NaN.
        UsageError: Ray has not the room for so many actors.
    """
    import ray
    from ray.data.exceptions import ExecutionTimeoutError

    connect()
    batches = _batches(encoded, spec.batch_tokens)
    found: dict[int, dict[str, Any]] = {}
    _quieten()
    results = _results(spec, config, encoded, batches)
    try:
        for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in table.to_pylist():
                if row["error"] is not None:
                    raise pickle.loads(row["error"])
                found[row["number"]] = row
                on_progress(len(batches[row["number"]][1]))
    except (ray.exceptions.RayError, ExecutionTimeoutError) as problem:
        raise _explained(problem) from problem
    return {split: _assembled(split, questions, batches, found) for split, questions in encoded.items()}


def _batches(encoded: Encoded, token_budget: int) -> Batches:
    """Split and indices of the questions of each batch."""
    from components.data.batching import batches_by_length

    return [(split, group) for split, qs in encoded.items() for group in batches_by_length(qs, token_budget)]


def _results(spec: ScorerSpec, config: RunConfig, encoded: Encoded, batches: Batches) -> Any:
    """The data set of results, not yet computed."""
    import ray.data

    actors = config.evaluation.actors
    cores, gpus = resources_per_actor(config.resources, actors)
    rows = [
        {"number": number, "questions": pickle.dumps([encoded[split][i] for i in group])}
        for number, (split, group) in enumerate(batches)
    ]
    # `from_items` and nothing lazy: reading would take tasks with cores of their own, which the actors may hold (E1).
    return ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        ScoringActor,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(batches))),
        fn_constructor_kwargs={
            "spec": spec,
            "threads": cores,
            "device": "cuda" if gpus else "cpu",
        },
        num_cpus=cores,
        num_gpus=gpus,
    )


def _quieten() -> None:
    """Switches off Ray Data's own bars and its account of each execution: progress is ours to show."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it warns of bars that are off
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _assembled(
    split: str, questions: Sequence[EncodedQuestion], batches: Batches, found: Mapping[int, Mapping[str, Any]]
) -> SplitScores:
    """Results back in the order of the questions."""
    from components.models.score_questions import SplitScores

    log_probs = np.full((len(questions), max(len(q.options) for q in questions)), -np.inf)
    mass, flc = np.zeros(len(questions)), np.zeros(len(questions))
    with_flc = True
    for number, (of, indices) in enumerate(batches):
        if of != split:
            continue
        row = found[number]
        rows = np.array(row["log_probs"])
        log_probs[indices, : rows.shape[1]], mass[indices] = rows, row["mass"]
        with_flc = row["flc"] is not None
        if with_flc:
            flc[indices] = row["flc"]
    return SplitScores(log_probs, mass, np.array([q.answer for q in questions]), flc if with_flc else None)


def _explained(problem: Exception) -> CaltuneError:
    """What Ray says, in one sentence."""
    from ray.data.exceptions import ExecutionTimeoutError

    if isinstance(problem, ExecutionTimeoutError):
        return CaltuneError(
            "the evaluation made no progress for half an hour and was given up: Ray has not started its actors, or "
            "they are lost on each attempt, as for want of memory; see the cluster's use, or lower "
            "evaluation.batch_tokens or evaluation.actors"
        )
    last = (str(problem).strip().splitlines() or [type(problem).__name__])[-1]
    return CaltuneError(f"the evaluation failed: {last}")
