"""The run file's schema: one tree of pydantic models, every key documented, unknown keys refused.

Reading, overriding and reporting errors with file and line is `components/run_file.py`'s work; this module only says
what a valid run is. Defaults marked *inferred* or *unknown* are ours: the papers do not state them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.config_base import Fraction, Positive, Strict
from components.config_baselines import CftConfig, IterateConfig, LabelSmoothingConfig, RegularizationConfig
from components.config_bayes import BlobAdapterConfig, BlobConfig, EnsembleConfig, McDropoutConfig
from components.config_data import DataConfig
from components.config_gate import DriftConfig, GateConfig
from components.config_generation import GenerationConfig, open_ended_misfit
from components.config_laplace import LaplaceConfig
from components.config_methods import CalmConfig, Uq4ctConfig
from components.config_tune import TuneConfig, check_space

MethodName = Literal[
    "base", "sft", "calm", "uq4ct", "calm_uq4ct",
    "label_smoothing", "cft", "rcft", "regularization", "iterate", "learned_ts",
    "mc_dropout", "ensemble", "blob", "laplace",
]  # fmt: skip
RecalibrationName = Literal["temperature", "flc_temperature", "vector_scaling", "isotonic"]
ROUTED_METHODS = ("uq4ct", "calm_uq4ct")
"""Methods whose model has routers, and with them a router confidence."""
HEAD_METHODS = ("calm", "calm_uq4ct", "regularization", "iterate", "learned_ts")
"""Methods that train a calibration head beside the weights; they share the section `calm`, its stop rule included."""
SAMPLED_METHODS = ("mc_dropout", "ensemble", "blob")
"""Methods that answer by the mean of several passes over LoRA matrices."""


class AdapterConfig(Strict):
    """What is trained on top of the base model."""

    kind: Literal["lora", "full"] = "lora"
    """`lora`: low-rank adapters through PEFT. `full`: every weight of the model."""
    r: int = Field(8, ge=1)
    """LoRA rank."""
    alpha: Positive = 16
    """LoRA scale numerator; the update is multiplied by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input during training."""
    target_modules: str | list[str] = "all-linear"
    """Module names that receive an adapter, or `all-linear`."""


class MixLoraConfig(Strict):
    """Mixture of LoRA experts (MixLoRA, arXiv 2404.15159), what `uq4ct` trains."""

    kind: Literal["mixlora"] = "mixlora"
    """Tells this section from `adapter` in saved files."""
    r: int = Field(8, ge=1)
    """Rank of every expert and of the attention's adapters."""
    alpha: Positive = 16
    """LoRA scale numerator; updates are multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the experts' inputs during training."""
    num_experts: int = Field(8, ge=1)
    """N, experts of each router (8: MixLoRA's default; UQ4CT's is unknown)."""
    top_k: int = Field(2, ge=1)
    """k, experts that each token goes through (2: found)."""
    attention: Literal["lora", "mixlora", "none"] = "lora"
    """Attention projections: one LoRA each as in MixLoRA's code, experts with a router each ("all matrices", as a
    reviewer of UQ4CT reads it), or nothing."""
    router_init_std: Positive = 0.02
    """Standard deviation of the routers' initial weights (found)."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A router's input is multiplied by U(1 - jitter, 1 + jitter) in training (0: found)."""
    flc_over: Literal["prompt", "last"] = "prompt"
    """Tokens that the router's confidence is averaged over: all of the prompt, or its last one (unknown)."""

    @model_validator(mode="after")
    def _chooses_among_experts(self) -> MixLoraConfig:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        return self


AdapterSpec = AdapterConfig | MixLoraConfig | BlobAdapterConfig
"""What a method trains on top of the base model."""


class ModelConfig(Strict):
    """The base model and what is trained on it."""

    name: str = "smollm2-135m-instruct"
    """Hub id, local folder, or `smollm2-135m-instruct` (works without a hub)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the frozen weights. Trainable weights are float32 always."""
    trust_remote_code: bool = False
    """Allow the model's own Python code from the hub to run."""
    adapter: AdapterConfig = AdapterConfig()
    """What every method but `uq4ct` and `calm_uq4ct` trains."""
    mixlora: MixLoraConfig = MixLoraConfig()
    """What `uq4ct` and `calm_uq4ct` train."""


class TrainingConfig(Strict):
    """The loop that every trained method shares."""

    steps: int = Field(40, ge=1)
    """Optimiser steps (outer steps for CALM)."""
    batch_size: int = Field(16, ge=1)
    """Questions a step over all workers together."""
    learning_rate: Positive = 5e-4
    """Peak rate of AdamW for the adapter."""
    warmup_fraction: Fraction = 0.1
    """Share of the steps with a linearly rising rate (0.1 in the same group's earlier code)."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Course of the rate after warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """On adapter weights; never on the calibration head (inferred)."""
    evaluate_every: int = Field(10, ge=1)
    """Steps between evaluations on validation data."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class DeepSpeedConfig(Strict):
    """Sharding. Present: a DeepSpeed engine runs the model. Absent: plain PyTorch (data parallel when workers > 1)."""

    stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage."""


class ResourcesConfig(Strict):
    """What Ray is asked for."""

    workers: int = Field(1, ge=1)
    """Ray Train workers."""
    min_workers: int | None = Field(None, ge=1)
    """Elastic training: starts, and goes on after a loss, with as few workers as this, and takes more in up to
    `workers` when there is room. Null waits for all of them."""
    max_failures: int = Field(3, ge=0)
    """How often lost workers are replaced, and training continued from its newest checkpoint, before it fails."""
    storage_path: str | None = None
    """Where workers leave checkpoints and adapters when they do not share the run's folder: a folder that all nodes
    mount, or a URI that pyarrow or fsspec opens (s3://bucket/prefix, gs://, abfs://). Null: the run's folder."""
    use_gpu: bool = False
    """One GPU a worker."""
    cpus_per_worker: int | None = Field(None, ge=1)
    """CPU cores a worker; null divides the machine's cores evenly."""
    deepspeed: DeepSpeedConfig | None = None


class EvaluationConfig(Strict):
    """How confidence is judged."""

    bins: int = Field(15, ge=1)
    """Bins of the calibration errors (15 in UQ4CT, 10 in CALM's group's code)."""
    bootstrap: int = Field(1000, ge=100)
    """Bootstrap draws for every interval."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Coverage of the intervals."""
    batch_tokens: int = Field(2048, ge=64)
    """Token budget of an evaluation batch, padding included."""
    actors: int = Field(1, ge=1)
    """Ray actors that share an evaluation, each with a model of its own, `resources.cpus_per_worker` CPU cores and with
    `resources.use_gpu` a GPU; 1 without a GPU evaluates in caltune's own process."""


class TrackingConfig(Strict):
    """Where runs are logged."""

    uri: str | None = None
    """MLflow tracking URI; MLFLOW_TRACKING_URI wins where set; null is `sqlite:///<output_dir>/mlflow.db`."""
    experiment: str = "caltune"
    """MLflow experiment; MLFLOW_EXPERIMENT_NAME wins where set."""
    enabled: bool = True
    """False logs nowhere."""


class RunConfig(Strict):
    """One run: what a run file holds."""

    run: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?$")
    """Name of the run and of its folder: lower-case letters, digits, hyphens, at most 47 characters."""
    output_dir: Path = Path("outputs")
    """Parent of the run's folder. Relative paths start at the current folder."""
    seed: int = Field(0, ge=0)
    """Seeds data, splits, initial weights, batches and bootstrap."""
    methods: list[MethodName] = ["base", "sft", "calm"]
    """Methods to run, in this order."""
    recalibrate: dict[MethodName, list[RecalibrationName]] = {}
    """Post-hoc recalibration of a method. `temperature`: one number, fitted on each set of labelled validation data
    that the run has. `flc_temperature`, for methods with routers: one for each question, from its router confidence and
    the option scores of the split `calibration`; reads no labels. `vector_scaling`: a scale and an offset for each
    position among the options, and `isotonic`: a rising step function of the answer's confidence, fitted as
    `temperature` is."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    calm: CalmConfig = CalmConfig()
    uq4ct: Uq4ctConfig = Uq4ctConfig()
    label_smoothing: LabelSmoothingConfig = LabelSmoothingConfig()
    cft: CftConfig = CftConfig()
    regularization: RegularizationConfig = RegularizationConfig()
    iterate: IterateConfig = IterateConfig()
    mc_dropout: McDropoutConfig = McDropoutConfig()
    ensemble: EnsembleConfig = EnsembleConfig()
    blob: BlobConfig = BlobConfig()
    laplace: LaplaceConfig = LaplaceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    generation: GenerationConfig = GenerationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    tracking: TrackingConfig = TrackingConfig()
    tune: TuneConfig | None = None
    """What `caltune tune` searches; other commands leave it aside."""
    gate: GateConfig | None = Field(None, exclude_if=lambda value: value is None)
    """What a model must show to become the registry's champion. Absent, it is not part of the resolved file."""
    drift: DriftConfig | None = Field(None, exclude_if=lambda value: value is None)
    """When fresh data call for retraining. Absent, it is not part of the resolved file."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> RunConfig:
        if len(set(self.methods)) != len(self.methods):
            raise ValueError("a method is named twice in 'methods'")
        for method, kinds in self.recalibrate.items():
            if method not in self.methods:
                raise ValueError(f"'recalibrate' names '{method}', which 'methods' does not run")
            if "flc_temperature" in kinds and method not in ROUTED_METHODS:
                raise ValueError(
                    f"'recalibrate' asks for 'flc_temperature' of '{method}', whose model has no routers to take a "
                    f"confidence from; ask for it of {' or '.join(ROUTED_METHODS)}, or use 'temperature'"
                )
        if self.calm.stop.split != "validation" and not self.data.heldout_groups and {*HEAD_METHODS} & {*self.methods}:
            raise ValueError(f"calm.stop.split is '{self.calm.stop.split}' but data.heldout_groups is empty")
        if "laplace" in self.methods and self.model.adapter.kind != "lora":
            raise ValueError("'laplace' is a posterior of LoRA weights: it needs model.adapter.kind 'lora'")
        if problem := open_ended_misfit(self):
            raise ValueError(problem)
        self._check_workers()
        self._check_sampled_methods()
        if self.tune is not None:
            if self.tune.method not in self.methods:
                raise ValueError(f"tune.method is '{self.tune.method}', which 'methods' does not run")
            if self.tune.split != "validation" and not self.data.heldout_groups:
                raise ValueError(f"tune.split is '{self.tune.split}' but data.heldout_groups is empty")
            check_space(self, self.tune)
        if self.gate is not None and (misfit := self.gate.misfit([*self.methods], ["id", *self.data.ood])):
            raise ValueError(misfit)
        return self

    def _check_workers(self) -> None:
        resources, batch = self.resources, self.training.batch_size
        if resources.min_workers is None:
            if batch % resources.workers:
                raise ValueError(f"training.batch_size {batch} cannot be divided among {resources.workers} workers")
            return
        if resources.min_workers > resources.workers:
            raise ValueError(f"resources.min_workers {resources.min_workers} exceeds workers {resources.workers}")
        if batch < resources.workers:
            raise ValueError(
                f"training.batch_size {batch} is less than a question for each of {resources.workers} workers"
            )
        noisy = [m for m in self.methods if m != "base" and self.noise_of(m)]
        if noisy:
            raise ValueError(
                f"resources.min_workers: {self.noise_of(noisy[0])} of '{noisy[0]}' is drawn by each worker for itself, "
                "so training cannot go on exactly with another number of them; leave min_workers out, or set it to 0 "
                "where the method allows that"
            )

    def _check_sampled_methods(self) -> None:
        sampled = [m for m in SAMPLED_METHODS if m in self.methods]
        if sampled and self.model.adapter.kind == "full":
            raise ValueError(
                f"'{sampled[0]}' averages over passes that differ in LoRA matrices, but model.adapter.kind is 'full'; "
                "set it to 'lora'"
            )
        if "blob" in sampled and self.resources.deepspeed is not None:
            raise ValueError(
                "'blob' takes a second step past the optimiser, on the KL divergence, which DeepSpeed's own copies of "
                "the weights would not see; leave resources.deepspeed out"
            )

    def noise_of(self, method: MethodName) -> str | None:
        """The key of what a method's workers draw at random while they train; None where nothing is."""
        if method == "blob":
            return "blob.init_scale"
        if method == "mc_dropout":
            return "mc_dropout.dropout" if self.mc_dropout.dropout else None
        section = "mixlora" if method in ROUTED_METHODS else "adapter"
        spec = self.model.mixlora if method in ROUTED_METHODS else self.model.adapter
        names = [name for name in ("dropout", "jitter") if getattr(spec, name, 0.0)]
        return f"model.{section}.{names[0]}" if names else None

    def weight_decay_of(self, method: MethodName) -> float:
        """Weight decay of a method's adapter."""
        return self.laplace.weight_decay if method == "laplace" else self.training.weight_decay

    @property
    def folder(self) -> Path:
        """Where everything of this run goes."""
        return self.output_dir / self.run
