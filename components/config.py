"""The run file's schema: one tree of pydantic models, every key documented, unknown keys refused.

Reading, overriding and reporting errors with file and line is `components/run_file.py`'s work; this module only says
what a valid run is. Defaults marked *inferred* or *unknown* are ours: the papers do not state them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MethodName = Literal["base", "sft", "calm"]
RecalibrationName = Literal["temperature"]
Scoring = Literal["letter", "text"]

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Base of every section: a misspelled key is an error, values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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


class PromptConfig(Strict):
    """How a question becomes text, and how its options are scored."""

    style: Literal["chat", "plain"] = "chat"
    """`chat`: the tokenizer's chat template. `plain`: the template alone."""
    system: str | None = None
    """System message, for `chat`."""
    scoring: Scoring = "text"
    """`text`: sum of the log-probabilities of the option's tokens. `letter`: the options are listed and one letter
    token stands for each."""
    template: str = "{question}"
    """Question text, with `{question}` and, where wanted, `{options}` (one `A. text` a line). With `letter` scoring
    the template must contain `{options}`."""
    answer_prefix: str = ""
    """Put before the answer, in the assistant's turn for `chat`; e.g. `Answer:`."""
    delimiter: str = ""
    """Between prompt and option text or letter, counted with the option; a space for most plain prompts."""

    @model_validator(mode="after")
    def _template_has_fields(self) -> PromptConfig:
        if "{question}" not in self.template:
            raise ValueError("template must contain {question}")
        if self.scoring == "letter" and "{options}" not in self.template:
            raise ValueError("letter scoring needs {options} in the template, else the letters mean nothing")
        return self


class ColumnMapping(Strict):
    """Which columns of a hub data set or local table hold what. Dotted names reach into nested columns."""

    question: str
    """Column with the question's text."""
    choices: str | list[str] | None = None
    """A column with the list of choices, or one column per choice."""
    answer: str | None = None
    """Column with the index, label or text of the right choice."""
    labels: str | None = None
    """Column with the label of each choice, when `answer` is a label such as `A` or `1`."""
    answers: str | None = None
    """Column with the accepted answers, for open-ended rows."""
    id: str | None = None
    """Column with an id of its own for each row; null numbers the rows."""
    group: str | None = None
    """Column whose value groups rows, e.g. an MMLU subject."""


class SourceConfig(Strict):
    """Where questions come from: the built-in facts, a local file, or a data set on the hub."""

    kind: Literal["facts", "file", "hub"]
    """Which of the three; the keys below say what each needs."""
    domain: Literal["geography", "chemistry"] | None = None
    """For `facts`."""
    path: Path | None = None
    """For `file`: .jsonl, .jsonl.gz, .parquet or .csv. Relative paths start at the run file's folder."""
    preset: str | None = None
    """For `hub`: a name of `components/data/presets.py`, which declares repository, splits and columns."""
    repository: str | None = None
    """For `hub` without a preset: `owner/name`; then `columns` is required."""
    subset: str | None = None
    """For `hub`: the data set's configuration name."""
    split: str | None = None
    """For `hub`: the split to read."""
    revision: str | None = None
    """For `hub`: branch, tag or commit."""
    columns: ColumnMapping | None = None
    """Column mapping; for `file` only when the columns are not the standard ones."""
    groups: list[str] | None = None
    """Keep only these groups (relations of the facts, MMLU subjects or the four named groups of subjects)."""
    limit: int | None = Field(None, ge=1)
    """Keep at most this many questions, drawn with the run's seed."""

    @model_validator(mode="after")
    def _kind_has_its_fields(self) -> SourceConfig:
        if self.kind == "facts" and self.domain is None:
            raise ValueError("kind 'facts' needs 'domain' (geography or chemistry)")
        if self.kind == "file" and self.path is None:
            raise ValueError("kind 'file' needs 'path'")
        if self.kind == "hub" and (self.preset is None) == (self.repository is None):
            raise ValueError("kind 'hub' needs either 'preset' or 'repository'")
        if self.kind == "hub" and self.repository is not None and self.columns is None:
            raise ValueError("a hub repository without a preset needs 'columns'")
        return self


class SplitSizes(Strict):
    """How one source is divided. Whole entities (or groups) go to one split, so no fact leaks from train to test."""

    train: int | None = Field(None, ge=1)
    """Questions in S_T, which fits the weights; null takes what the others leave."""
    calibration: int | None = Field(None, ge=0)
    """Questions in S_V, whose inputs (never labels) raise entropy. Null takes a quarter of the size of train
    (80/20, inferred from AutoBalance's configuration)."""
    validation: int = Field(200, ge=1)
    """Labelled questions that choose the stopping point and fit recalibration."""
    test: int = Field(300, ge=1)
    """Questions for the reported figures, never seen before."""


class DataConfig(Strict):
    """Questions to train on and to be judged by."""

    source: SourceConfig
    """The in-domain source; divided by `splits`."""
    splits: SplitSizes = SplitSizes()
    heldout_groups: list[str] = []
    """Groups (relations) of the source kept out of train and calibration: they become the split
    `validation_shift`, on which a stop rule can be chosen under shift."""
    test_source: SourceConfig | None = None
    """A separate in-domain test file, when the source has official splits; `splits.test` then limits it."""
    ood: dict[str, SourceConfig] = {}
    """Out-of-domain test sets by name; each is cut to `splits.test` questions."""
    overlap: Literal["report", "drop", "error"] = "report"
    """What to do with questions that stand in two splits: report them, drop them from the earlier split, or fail."""
    prompt: PromptConfig = PromptConfig()
    max_length: int = Field(512, ge=8)
    """Longest row in tokens; a longer one is an error, never cut in silence."""


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


class StopConfig(Strict):
    """When CALM ends and which step is kept.

    The paper's rule is unknown; going on too long overshoots into under-confidence.
    """

    rule: Literal["budget", "match", "keep_best"] = "keep_best"
    """`budget`: all steps, last one kept. `match`: end at the evaluation where mean confidence on labelled validation
    data first meets accuracy. `keep_best`: all steps, the one with the best `metric` kept."""
    metric: Literal["nll", "ece"] = "nll"
    """For `keep_best`."""
    split: Literal["validation", "validation_shift", "both"] = "validation"
    """Labelled data that decides; `validation_shift` needs `data.heldout_groups`."""


class CalmConfig(Strict):
    """CALM: bilevel training of weights (lower level) and calibration head (upper level)."""

    inner_steps: int = Field(5, ge=1)
    """T, gradient steps towards the lower level's surrogate solution (5: inferred from the reported cost)."""
    eta: Positive = 0.5
    """Strength of the descent condition on the residual (0.5: found, BOME's own default)."""
    phi: Literal["grad_norm", "residual"] = "grad_norm"
    """phi = eta * ||grad q||^2 or eta * q (both found in BOME's code)."""
    inner_learning_rate: Positive = 5e-3
    """Step size of the plain-gradient inner steps (unknown; ten times the adapter's rate)."""
    alpha_learning_rate: Positive = 3e-3
    """AdamW rate of the calibration head (unknown)."""
    entropy_over: Literal["options", "vocabulary"] = "options"
    """Support of the upper level's entropy. Over the vocabulary it rises through tokens that never compete."""
    head: Literal["vocabulary", "scalar"] = "vocabulary"
    """One offset and temperature per token, or one of each for all (the paper's scalar ablation)."""
    max_temperature: Annotated[float, Field(gt=1)] = 8.0
    """tau is clamped to [1 / max, max] (ours)."""
    stop: StopConfig = StopConfig()


class DeepSpeedConfig(Strict):
    """Sharding. Present: a DeepSpeed engine runs the model. Absent: plain PyTorch (data parallel when workers > 1)."""

    stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage."""


class ResourcesConfig(Strict):
    """What Ray is asked for."""

    workers: int = Field(1, ge=1)
    """Ray Train workers."""
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
    """Post-hoc recalibration of a method, each fitted on every labelled validation split the run has."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    calm: CalmConfig = CalmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> RunConfig:
        if len(set(self.methods)) != len(self.methods):
            raise ValueError("a method is named twice in 'methods'")
        for method in self.recalibrate:
            if method not in self.methods:
                raise ValueError(f"'recalibrate' names '{method}', which 'methods' does not run")
        if self.calm.stop.split != "validation" and not self.data.heldout_groups and "calm" in self.methods:
            raise ValueError(f"calm.stop.split is '{self.calm.stop.split}' but data.heldout_groups is empty")
        if self.training.batch_size % self.resources.workers:
            raise ValueError(
                f"training.batch_size {self.training.batch_size} cannot be divided among "
                f"{self.resources.workers} workers"
            )
        return self

    @property
    def folder(self) -> Path:
        """Where everything of this run goes."""
        return self.output_dir / self.run
