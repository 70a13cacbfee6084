"""A method's training from prepared data to an adapter folder, as one process (of one or several) lives it.

Who starts the processes (`ray_jobs/worker.py`) and how validation scores are judged (`components/evaluation`) is
handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from components.config import MixLoraConfig
from components.config_methods import StopConfig
from components.data.batching import collate
from components.data.prepare import PreparedData, load_prepared
from components.data.prompts import EncodedQuestion, PromptEncoder
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.base import load_model, load_tokenizer
from components.models.score_questions import SplitScores, score_questions
from components.models.scoring import ScoringModel, apply_head
from components.run_file import config_hash
from components.storage import Storage
from components.training.baseline_losses import CftLoss
from components.training.build import make_head, make_lower, make_step
from components.training.checkpoints import Checkpoints
from components.training.expert_load import LOAD_FILE, ExpertLoadLog
from components.training.feed import Feed, member_seed
from components.training.job import CHECKPOINTS, Process, Requests, TrainingJob, nothing_asked
from components.training.loop import (
    LoopResult,
    OnMilestone,
    OnStep,
    TrainingLoop,
    nothing_told,
)
from components.training.lower_losses import Uq4ctLoss
from components.training.methods import METHODS
from components.training.objectives.cft import BinAccuracy
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.parameter_space import ParameterSpace, TorchSpace, block_groups
from components.training.recompute import recompute_activations
from components.training.result import save_result
from components.training.resumption import FLOAT32_TOLERANCE, HALF_TOLERANCE, Resumption
from components.training.schedule import learning_rates
from components.training.stopping import SplitMetrics, StopRule

Judge = Callable[[SplitScores], SplitMetrics]


class Session:
    """Everything a process holds while a method trains.

    Args:
        job: What to train.
        process: Which process this is.
        judge: Turns validation scores into metrics.
        on_step: Told of every step on every rank.
        on_milestone: Told of every evaluation and checkpoint on every rank.
        requests: Asked after every step on every rank.
    """

    def __init__(
        self,
        job: TrainingJob,
        process: Process,
        judge: Judge,
        on_step: OnStep,
        on_milestone: OnMilestone = nothing_told,
        requests: Requests = nothing_asked,
    ) -> None:
        self.job, self.process, self.judge = job, process, judge
        self.method = METHODS[job.method]
        config = job.config
        self.data = load_prepared(job.data)
        self.tokenizer = load_tokenizer(job.resolved, config.model)
        self.encoder = PromptEncoder(self.tokenizer, config.data.prompt, config.data.max_length)
        base = load_model(job.resolved, config.model)
        self.spec = self.method.adapter_spec(config)
        self.model = attach_adapter(base, self.spec, member_seed(config.seed, job.member))
        if config.training.gradient_checkpointing:
            recompute_activations(self.model)
        head = make_head(self.method, config, base)
        self.head = None if head is None else head.to(process.device)
        flc_over = self.spec.flc_over if isinstance(self.spec, MixLoraConfig) else "prompt"
        self.module = ScoringModel(self.model, flc_over)
        self.space = self._place()
        self.lower = make_lower(self.method, config, self.module, self.head, self._feed)
        self.load_log = self._new_load_log()
        self.loop = TrainingLoop(
            self.space,
            make_step(self.method, config, self.space, self.lower, self.module, self.head, self._feed),
            config.training,
            rates_at=partial(learning_rates, config=config),
            stop=StopRule(config.calm.stop if self.method.trains_head else StopConfig(rule="budget")),
            checkpoints=self._checkpoints(),
            evaluate=self._evaluator(),
            on_step=on_step,
            resumption=self._resumption(),
            on_milestone=on_milestone,
            requests=requests,
        )

    def resume(self) -> int:
        """Takes the newest checkpoint over, if there is one.

        Returns:
            Steps already taken.

        Raises:
            CheckpointError: It belongs to a run with other settings, cannot be continued exactly, or none can be read.
        """
        taken = self.loop.resume()
        if self.load_log is not None:
            self.load_log.resume(taken)
        return taken

    @property
    def passed_over(self) -> list[str]:
        """Checkpoints that `resume` could not read, a sentence each."""
        return self.loop.checkpoints.passed_over

    def train(self) -> LoopResult:
        """Trains to the end and writes the adapter folder (rank 0).

        Returns:
            How it ended; on every rank.
        """
        self._measure_base()
        self.module.train()  # a resumed run begins with a step, not with the evaluation that switches back to training
        result = self.loop.run()
        if self.process.rank == 0:
            save_result(self.job, result, self.model, self.head, self.tokenizer, self.spec)
        return result

    def _place(self) -> ParameterSpace:
        """Puts the model on its device; the space of its parameters is plain PyTorch or a DeepSpeed engine."""
        config, scoring = self.job.config, self.module
        alpha = _trainable(self.head) if self.head is not None else {}
        theta = trainable_parameters(self.model)
        sharding, weight_decay = config.resources.deepspeed, config.weight_decay_of(self.job.method)
        if sharding is None:
            scoring.to(self.process.device)
            groups = block_groups(alpha, theta, weight_decay)
            return TorchSpace(alpha, theta, torch.optim.AdamW(groups, lr=config.training.learning_rate))

        from components.training.deepspeed_engine import make_engine
        from components.training.deepspeed_space import DeepSpeedSpace

        engine = make_engine(
            scoring,
            theta,
            stage=sharding.stage,
            learning_rate=config.training.learning_rate,
            weight_decay=weight_decay,
            micro_batch_size=config.training.batch_size // self.process.world_size,
        )
        upper = torch.optim.AdamW(block_groups(alpha, {}), lr=config.calm.alpha_learning_rate) if alpha else None
        # The losses call the module, not the engine: its hooks gather what is sharded.
        return DeepSpeedSpace(engine, alpha, theta, upper)

    def _measure_base(self) -> None:
        """CFT's E-step, on the fresh adapter, which changes nothing; a resumed run has it from its checkpoint."""
        if isinstance(self.lower, CftLoss) and self.lower.bins is None:
            scores = self._scores(self._encoded("train"))
            self.lower.bins = BinAccuracy.measure(scores.log_probs, scores.answers)

    def _new_load_log(self) -> ExpertLoadLog | None:
        if self.method.adapter != "mixlora" or self.process.rank != 0:
            return None
        return ExpertLoadLog(self.job.folder / LOAD_FILE, self.job.config.uq4ct.collapse_share)

    def _encoded(self, split: str) -> list[EncodedQuestion]:
        return self.encoder.encode_all(self.data.splits[split].questions)

    def _feed(self, split: str, options: Any) -> Feed:
        return Feed(
            self._encoded(split),
            self.job.config.training.batch_size,
            options,
            self.job.config.seed,
            pad_id=int(self.tokenizer.pad_token_id),  # type: ignore[arg-type]
            rank=self.process.rank,
            world_size=self.process.world_size,
            device=self.process.device,
        )

    def _evaluator(self) -> Callable[[], dict[str, SplitMetrics]]:
        splits = {name: self._encoded(name) for name in validation_splits(self.data)}

        def evaluate() -> dict[str, SplitMetrics]:
            self._log_load()
            scores = {name: self._scores(questions) for name, questions in splits.items()}
            return {name: self.judge(of) for name, of in scores.items()}

        return evaluate

    def _scores(self, questions: list[EncodedQuestion]) -> SplitScores:
        """Scores under the present weights, without dropout (collective)."""
        self.module.eval()
        scores = score_questions(
            self.module,
            self.head,
            questions,
            flc_of=self.module.flc,
            pad_id=int(self.tokenizer.pad_token_id),  # type: ignore[arg-type]
            token_budget=self.job.config.evaluation.batch_tokens,
            device=self.process.device,
        )
        self.module.train()
        return scores

    def _log_load(self) -> None:
        """Keeps what the experts received in the step just taken, if one was."""
        if self.load_log is not None and isinstance(self.lower, Uq4ctLoss) and self.lower.load is not None:
            self.load_log.add(self.loop.taken, self.lower.load)

    def _checkpoints(self) -> Checkpoints:
        storage = Storage(self.job.storage) / CHECKPOINTS if self.job.storage else None
        keep = self.job.config.training.keep_checkpoints
        return Checkpoints(self.job.folder / CHECKPOINTS, self._identity(), keep, storage)

    def _identity(self) -> str:
        hashes = [self.data.splits[name].content_hash for name in sorted(self.data.splits)]
        # Which other methods the run has decides nothing here: a suite may be given more while one is half trained.
        settings = config_hash(self.job.config, without=("methods", "recalibrate", *self.job.varied))
        name = self.job.method if self.job.member is None else f"{self.job.method}-{self.job.member}"
        return "-".join([settings, name, *(h[:12] for h in hashes)])

    def _resumption(self) -> Resumption:
        config = self.job.config
        sharding = config.resources.deepspeed
        return Resumption(
            self.lower.feed,
            self._probe(),
            noise=config.noise_of(self.job.method),
            zero_stage=sharding.stage if sharding else None,
            tolerance=FLOAT32_TOLERANCE if config.model.dtype == "float32" else HALF_TOLERANCE,
            before=self.lower if isinstance(self.lower, CftLoss) else None,
        )

    def _probe(self) -> Callable[[], float]:
        """Mean cross-entropy in nats of the answers of the first validation questions, without dropout."""
        first = self.data.splits["validation"].questions[: self.job.config.training.batch_size]
        questions = self.encoder.encode_all(first)
        batch = collate(questions, int(self.tokenizer.pad_token_id), "gold").to(self.process.device)  # type: ignore[arg-type]

        @torch.no_grad()
        def probe() -> float:
            self.module.eval()
            logits = apply_head(self.head, self.module(batch))
            self.module.train()
            return float(cross_entropy_sum(logits, batch)) / len(batch.entry_token)

        return probe


def validation_splits(data: PreparedData) -> tuple[str, ...]:
    """The labelled splits that choose stopping points and temperatures, in order."""
    return tuple(name for name in ("validation", "validation_shift") if name in data.splits)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
