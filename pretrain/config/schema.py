"""Every section of a run's configuration. One dataclass per section; each field says its unit and what null means.

Stdlib only: a configuration is checked before torch is imported. `pretrain.config.check` applies the bounds in the
types, `__post_init__` what fields of a section must agree on, and `pretrain.config.validate` what sections must.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pretrain.config.bounds import (
    TINY,
    Count,
    CountOrZero,
    FolderName,
    LearningRate,
    Loops,
    Positive,
    Range,
    Seconds,
    Seed,
    Share,
    ShareBelowOne,
    Tokens,
    require,
)
from pretrain.config.loss import LossConfig
from pretrain.config.model import ModelConfig


@dataclass(kw_only=True)
class RunConfig:
    """Where the run lives."""

    name: str = "run"
    """Folder of the run below `dir`."""
    dir: FolderName = "runs"
    """Folder of the runs. Put it where there is room for checkpoints."""
    resume: Literal["auto", "never", "step"] = "auto"
    """auto: from the newest complete checkpoint of the run's folder, else from step 0; never: refuse a folder that
    holds checkpoints; step: exactly `resume_step`."""
    resume_step: CountOrZero | None = None
    """The step to resume from, with resume=step. null: by `resume`."""
    override: bool = False
    """On resume, let optimizer, schedule and loss settings differ from the saved run's (old and new are logged)."""

    def __post_init__(self) -> None:
        plain = self.name not in ("", ".", "..") and "/" not in self.name
        require(plain, "run.name", self.name, "a folder name without slashes")
        require(len(self.name.encode()) <= 200, "run.name", self.name, "a folder name of at most 200 bytes")
        if self.resume == "step":
            require(self.resume_step is not None, "run.resume_step", None, "a step, since run.resume=step")


@dataclass(kw_only=True)
class SourceConfig:
    """One data set of a mixture, written by data_prep/build_shards.py."""

    path: FolderName = "???"
    """Local folder (manifest.json, tokenizer/, train/, validation/), or the cache folder of `remote`."""
    remote: str | None = None
    """s3://, gs://, ... where the shards come from. null: they are in `path`."""
    weight: Positive = 1.0
    """Share of the rows, relative to the other sources'."""


@dataclass(kw_only=True)
class DataConfig:
    """Tokens in: fixed-length rows from MDS shards."""

    path: FolderName | None = None
    """Folder of the only source. null: `sources` lists them."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Data sets of a mixture, instead of `path`."""
    shuffle: bool = True
    """Shuffle the rows of each epoch anew. false: in the order they were written."""
    shuffle_seed: Seed | None = None
    """null: train.seed."""
    shuffle_block_rows: Count = 262_144
    """Rows among which the shuffle mixes shards (streaming's shuffle_block_size)."""
    canonical_nodes: Annotated[int, Range(1, 65_536)] = 1
    """Fixes the order for any number of nodes; a multiple or divisor of the node count keeps downloads node-local."""
    num_workers: Annotated[int, Range(0, 256)] = 2
    """Loader processes per rank. 0: read in the training process."""
    prefetch_factor: Annotated[int, Range(1, 1_024)] = 2
    """Batches that each worker holds ready."""
    cache_limit_bytes: Annotated[int, Range(1, 2**60)] | None = None
    """Bound of the local cache of remote shards. null: none."""
    predownload_rows: Count | None = None
    """Rows each worker downloads ahead. null: 8 of its batches."""
    mask_document_boundaries: bool = False
    """Attention stays within a document, and positions count from its start."""

    def __post_init__(self) -> None:
        if self.path is not None:
            require(not self.sources, "data.path", self.path, "null where data.sources is given: use one of the two")

    @property
    def all_sources(self) -> list[SourceConfig]:
        """The mixture; one source for `path`."""
        return [SourceConfig(path=self.path)] if self.path is not None else self.sources


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW alone, or Muon for the layers' matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; muon: Muon for the matrices of attention and MLP, AdamW for everything else."""
    lr: LearningRate = 8e-3
    """Peak learning rate of AdamW's parameters."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.8, 0.95)
    """AdamW's."""
    eps: Annotated[float, Range(TINY, 1e30)] = 1e-10
    """AdamW's."""
    weight_decay: Annotated[float, Range(0, 1_000)] = 0.0
    """AdamW's, on matrices outside embeddings, injection and C."""
    clip_norm: Annotated[float, Range(TINY, 1e12)] | None = 1.0
    """Bound of the gradient norm; with Muon it acts on AdamW's parameters only. null: no clipping."""
    muon_lr: LearningRate = 8e-3
    """Peak learning rate of Muon's matrices."""
    muon_momentum: ShareBelowOne = 0.95
    """Muon's momentum after its warm-up."""
    muon_momentum_start: ShareBelowOne = 0.85
    """Muon's momentum at step 0."""
    muon_momentum_warmup_steps: CountOrZero = 300
    """Steps from muon_momentum_start to muon_momentum. 0: none."""
    muon_steps: Annotated[int, Range(1, 100)] = 5
    """Polar-express iterations."""
    muon_weight_decay: Annotated[float, Range(0, 1_000)] = 0.2
    """Decayed linearly to 0 over the run; applied where update and weight agree in sign, and scaled by a matrix's
    shape like its update."""


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning rate as a function of the step, relative to its peak."""

    name: Literal["constant", "trapezoid", "cosine"] = "trapezoid"
    """constant; trapezoid: flat, then linear over the last `decay_fraction` (WSD); cosine."""
    warmup_steps: CountOrZero = 0
    """Steps from 0 to the peak, linear."""
    decay_fraction: Share = 0.5
    """Share of the steps in which trapezoid decays."""
    min_lr_ratio: Share = 0.0
    """Final over peak learning rate."""


@dataclass(kw_only=True)
class TrainConfig:
    """Length, batch and numerics of training."""

    max_steps: Count | None = None
    """End of the schedule in steps. null: from max_tokens."""
    max_tokens: Annotated[int, Range(1, 10**18)] | None = None
    """End of the schedule in tokens, rounded up to whole steps. null: from max_steps."""
    stop_step: Count | None = None
    """End the process after this step without moving the schedule. null: at the schedule's end."""
    global_batch_size: Annotated[int, Range(1, 2**24)] = 256
    """Rows per optimizer step over all ranks."""
    micro_batch_size: Annotated[int, Range(1, 2**24)] = 8
    """Rows per forward and backward of one rank."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Compute type of the matrix products. Parameters, gradients and optimizer state are fp32 in both."""
    seed: Seed = 0
    """Of weights, depths, initial states and (unless data.shuffle_seed is set) row order."""
    deterministic: bool = False
    """Refuse kernels whose result varies from run to run (slower on CUDA)."""
    compile: bool = False
    """torch.compile of the core's step, with the loop outside; needs tensor = pipeline = 1 and zero.stage <= 2. Two
    graphs for training, and for evaluation one for rows of the context's length and one for all shorter ones."""
    activation_checkpointing: Literal["none", "loop", "layer", "every_k_loops", "reentrant"] = "loop"
    """What is recomputed in backward (gradient loops): nothing; each loop; each layer; groups of
    `checkpoint_every_loops` loops. Only non-reentrant checkpointing is exact with looped weights; `reentrant` is
    known here so that the message can say so."""
    checkpoint_every_loops: Loops = 2
    """Loops per group of activation_checkpointing=every_k_loops."""
    skip_steps: list[Count] = field(default_factory=list)
    """Steps whose batch is read and not trained on."""
    max_hours: Annotated[float, Range(TINY, 87_600)] | None = None
    """Wall-clock budget after which the run saves and stops. null: none."""
    max_skipped_in_a_row: Count = 5
    """Steps in a row without an update (loss or gradient not finite, or a spike: guards.on_spike) that end the run."""

    def __post_init__(self) -> None:
        given = (self.max_steps is not None) + (self.max_tokens is not None)
        require(
            given == 1, "train.max_steps", self.max_steps,
            f"exactly one of train.max_steps and train.max_tokens (max_tokens={self.max_tokens})",
        )  # fmt: skip
        require(
            self.activation_checkpointing != "reentrant", "train.activation_checkpointing", "reentrant",
            "none, loop, layer or every_k_loops (all non-reentrant): reentrant checkpointing of a block that is used "
            "several times gives wrong weights under ZeRO",
        )  # fmt: skip


@dataclass(kw_only=True)
class GuardsConfig:
    """What is done about losses that jump, and about steps that do not end (docs/operations.md)."""

    on_spike: Literal["none", "skip", "rewind"] = "none"
    """What a spike of the loss leads to. skip: the step leaves the weights alone; rewind: weights and optimizer go back
    to an earlier checkpoint, and the batches since then are left out."""
    spike_window_steps: Annotated[int, Range(2, 10**6)] = 128
    """Losses of updates before it that a loss is compared with; not before there are so many."""
    spike_sigma: Positive = 6.0
    """A spike is this many standard deviations of the window above its mean."""
    rewind_steps: Count = 100
    """A rewind goes back at least so many steps, to the newest checkpoint at a multiple of checkpoint.every_steps."""
    max_rewinds: CountOrZero = 10
    """Of a run; the next one ends it."""
    step_sec: Seconds | None = 600.0
    """A step that takes longer hangs: every rank shows its threads and ends. null: no limit."""
    first_step_sec: Seconds | None = 1_800.0
    """The same for what else all ranks do: start, first step, validation, checkpoint, end. null: no limit."""


@dataclass(kw_only=True)
class ParallelConfig:
    """World size = tensor x pipeline x data; the data size follows from the number of processes."""

    tensor: Annotated[int, Range(1, 65_536)] = 1
    """Ranks that share each matrix."""
    pipeline: Annotated[int, Range(1, 512)] = 1
    """Ranks that share the core's layers; every loop passes all of them."""
    sequence_parallel: bool = False
    """Shard the sequence between the matrix products of tensor-parallel layers."""
    rendezvous_sec: Annotated[float, Range(1, 31_536_000)] = 300.0
    """How long processes wait for each other at the start."""
    timeout_sec: Annotated[float, Range(1, 31_536_000)] = 900.0
    """Bound of a collective; above guards.step_sec, whose message shows where every rank stands."""

    def __post_init__(self) -> None:
        require(
            self.tensor > 1 or not self.sequence_parallel, "parallel.sequence_parallel", True,
            f"false, or parallel.tensor > 1 (it is {self.tensor})",
        )  # fmt: skip


@dataclass(kw_only=True)
class ZeroConfig:
    """DeepSpeed ZeRO over the data-parallel group."""

    stage: Annotated[int, Range(0, 3)] = 1
    """1: optimizer state is sharded; 2: gradients too; 3: parameters too. 0 is run as 1, with a warning."""
    overlap_comm: bool = False
    """Reduce gradients during backward (stages 2 and 3, CUDA)."""
    bucket_elements: Annotated[int, Range(1, 2**31, below=True)] = 200_000_000
    """Gradient elements per reduction."""


@dataclass(kw_only=True)
class ValidationConfig:
    """Loss on the validation split at several loop counts, from one pass over each batch."""

    every_steps: Count | None = 1_000
    """null: only at the end. 0 is refused."""
    rows: CountOrZero = 512
    """Rows of the validation split that are read, from its start. 0: train without validation and state probe; the data
    then needs no validation split."""
    num_loops: list[Loops] = field(default_factory=list)
    """Loop counts to report. Empty: 1, 2, 4 and mu."""


@dataclass(kw_only=True)
class EvaluationConfig:
    """Benchmark tasks during the training (docs/evaluation.md)."""

    tasks: list[str] = field(default_factory=list)
    """`core`, `text:PATH`, `depth:NAME`, or folders of requests in `task_data`. Empty: none."""
    every_steps: Count | None = None
    """null: only at the end. 0 is refused."""
    task_data: FolderName | None = None
    """Folder with a folder of requests for each task."""
    core_bundle: FolderName | None = None
    """Folder of DCLM's tasks."""
    num_loops: list[Loops] = field(default_factory=list)
    """Loop counts to score at. Empty: those of the validation."""
    limit: Count | None = None
    """Documents of each task; problems of each depth. null: all; 128."""
    depths: list[Count] = field(default_factory=list)
    """Of the depth tasks. Empty: those of 1 .. 8, 10, 12, 16, 20, 24 and 32 that fit the context."""
    batch_tokens: Tokens = 8_192
    """Tokens in a batch of a rank, padding included."""


@dataclass(kw_only=True)
class ProbeConfig:
    """What the recurrent state does from loop to loop, measured during training (docs/readout_blind_spot.md)."""

    every_steps: Count | None = 250
    """null: never, as with validation.rows=0. A probe costs about a step of `rows` rows per rank."""
    rows: Count = 2
    """Validation rows of each data-parallel rank that it runs."""
    num_loops: Loops | None = None
    """Loops that it runs. null: mu."""
    growth_warning: Annotated[float, Range(1, 1e12, above=True)] = 10.0
    """Warn where the mean norm of the last state has grown by this factor since the first probe or the last warning."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Layout-independent checkpoints of weights, optimizer state and the run's position."""

    every_steps: Count | None = 1_000
    """null: only at the end (and on a signal)."""
    keep_last: Count = 3
    """Newest checkpoints to keep."""
    keep_every_steps: Count | None = None
    """Checkpoints at multiples of it are kept for ever. null: none."""
    background: bool = False
    """Write while training goes on."""
    initial_weights: FolderName | None = None
    """Folder of a checkpoint whose weights start this run at step 0. null: random weights."""


@dataclass(kw_only=True)
class LoggingConfig:
    """Console, metrics.jsonl, wandb, profiler."""

    every_steps: Count = 10
    """Console lines; metrics.jsonl has a row for every step."""
    progress_bar: bool = True
    """On a terminal."""
    wandb: Literal["offline", "online", "disabled"] | None = None
    """null: WANDB_MODE, or offline."""
    wandb_project: str = "looped-pretrain"
    """wandb's project; the run's name is `run.name`."""
    profile_steps: list[Count] = field(default_factory=list)
    """[first, last] step of a torch.profiler trace in the run's folder. Empty: none."""

    def __post_init__(self) -> None:
        steps = self.profile_steps
        require(
            not steps or (len(steps) == 2 and steps[0] <= steps[1]), "logging.profile_steps", steps,
            "[first, last] with 1 <= first <= last, or an empty list",
        )  # fmt: skip


@dataclass(kw_only=True)
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=1_000))
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def tokens_per_step(self) -> int:
        """Trained positions of one optimizer step."""
        return self.train.global_batch_size * self.model.context_length

    @property
    def total_steps(self) -> int:
        """End of the schedule in steps."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        assert self.train.max_tokens is not None
        return -(-self.train.max_tokens // self.tokens_per_step)

    @property
    def last_step(self) -> int:
        """The step after which this process ends."""
        return min(self.total_steps, self.train.stop_step or self.total_steps)
