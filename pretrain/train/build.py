"""From a checked configuration to a trainer, and what a run or a dry run does with it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from pretrain.config.load import dump_config, load_config
from pretrain.config.resume import check_resume
from pretrain.config.schema import Config
from pretrain.data.loader import TrainLoader
from pretrain.data.place import DataPlace
from pretrain.data.sources import check_local_shards
from pretrain.data.validation import ValidationRows
from pretrain.errors import STOPPED_EXIT_CODE, CheckpointError, ConfigError, DistributedError
from pretrain.folder_lock import FolderLock
from pretrain.messages import add_log_file
from pretrain.model.init import init_parameters
from pretrain.model.layers import Layer
from pretrain.model.looped import LoopedLM
from pretrain.parallel import megatron
from pretrain.parallel.lost_contact import naming_lost_contact
from pretrain.parallel.megatron import Layout
from pretrain.parallel.pipeline import stage_of
from pretrain.parallel.tensor_ops import tensor_ops
from pretrain.parallel.zero import PARAMETER, ZeroEngine
from pretrain.planning import checkpoint_bytes
from pretrain.processes import start_resource_tracker
from pretrain.sampling import DepthSampler
from pretrain.train.callbacks import (
    Checkpointing,
    Console,
    Evaluation,
    Metrics,
    Observer,
    Ownership,
    Probe,
    Profiler,
    Rewind,
    Validation,
    WandbLogger,
)
from pretrain.train.checkpoint.find import find_checkpoint, open_checkpoint
from pretrain.train.checkpoint.folders import check_disk, checkpoints_folder
from pretrain.train.checkpoint.placement import Placement
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.metrics import METRICS_NAME, MetricsWriter, remove_rows_after
from pretrain.train.pipeline_step import make_runner
from pretrain.train.rates import Rates
from pretrain.train.run_folder import run_folder, write_run_folder
from pretrain.train.signals import StopSignals
from pretrain.train.state import TrainState
from pretrain.train.summary import summary
from pretrain.train.trainer import Callback, Trainer
from pretrain.train.watchdog import Watchdog

log = logging.getLogger(__name__)


def dry_run(cfg: Config) -> int:
    """Builds the model without memory, prints the start-up summary, and returns exit code 0.

    Refuses what a start would refuse: shards that are missing, a checkpoint that does not go with the configuration, a
    disk without room. It reads no shard, and no tensor of a checkpoint.
    """
    with torch.device("meta"):
        model = LoopedLM(cfg.model)
    check_local_shards(cfg)
    folder = run_folder(cfg)
    reader = find_checkpoint(folder, cfg.run, Ranks(), whole=False)
    _check_start(cfg, folder, reader)
    if reader is None and cfg.checkpoint.initial_weights is not None:
        placement = Placement.of_model(model, tensor_rank=0, tensor_size=1, model_ranks=Ranks())
        with open_checkpoint(Path(cfg.checkpoint.initial_weights), whole=False) as start:
            placement.check(start)
    world_size = int(os.environ.get("WORLD_SIZE", cfg.parallel.tensor * cfg.parallel.pipeline))
    print(summary(cfg, model, world_size))
    return 0


def run_training(cfg: Config, started_at: float) -> int:
    """Trains as `cfg` says, resuming where the run's folder holds a checkpoint. Collective.

    Returns exit code 0 after the last step, STOPPED_EXIT_CODE after a stop before it (a signal, train.max_hours).
    `started_at`: time.monotonic() of the start of the process.
    """
    _set_numerics(cfg)
    start_resource_tracker()
    folder = run_folder(cfg)
    with naming_lost_contact(), Watchdog(cfg.guards) as watchdog, contextlib.closing(FolderLock(folder)) as lock:
        watchdog.expect("the start, before the first step,")
        layout = _initialize(cfg, lock)
        if layout.is_main:
            add_log_file(folder / "log.txt")
        with _built(cfg, layout, folder, lock, started_at, watchdog) as trainer:
            stop_signals = StopSignals()
            stop_signals.install()  # until here there is nothing to save: a signal just ends the process
            trainer.stop_requested = stop_signals.stop_requested
            trainer.fit()
        megatron.shutdown()
    return 0 if trainer.state.step >= cfg.last_step else STOPPED_EXIT_CODE


def _set_numerics(cfg: Config) -> None:
    """Before CUDA starts. TF32 is for bf16 runs only: it would round the products of fp32 ones."""
    torch.set_float32_matmul_precision("highest" if cfg.train.precision == "fp32" else "high")
    if cfg.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _initialize(cfg: Config, lock: FolderLock) -> Layout:
    """The layout, once the main rank has the run's folder for itself; else CheckpointError on every rank."""
    refusal = None
    if os.environ.get("RANK", "0") == "0":
        try:
            lock.take()
        except CheckpointError as error:
            refusal = error
    try:
        layout = _meet(cfg)
    except DistributedError as error:
        raise refusal or error from error  # the other start has the port too
    Ranks.of().raise_any(None if refusal is None else str(refusal))
    return layout


def _meet(cfg: Config) -> Layout:
    """The process groups; DistributedError with what to do where the processes do not find each other."""
    parallel = cfg.parallel
    try:
        return megatron.initialize(
            parallel.tensor, parallel.pipeline, parallel.sequence_parallel, parallel.timeout_sec,
            rendezvous_sec=parallel.rendezvous_sec,
        )  # fmt: skip
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(
            f"the processes could not meet at {address} (MASTER_ADDR:MASTER_PORT) within parallel.rendezvous_sec="
            f"{parallel.rendezvous_sec:g} s: {error}. If another run uses that "
            "port, choose another one (--master_port of deepspeed and torchrun, or MASTER_PORT); else see whether all "
            "processes were started and can reach that address"
        ) from error


def build_model(cfg: Config, layout: Layout) -> LoopedLM:
    """This rank's part of the model with its initial weights, on the rank's device."""
    ops = tensor_ops(layout)
    model = LoopedLM(cfg.model, ops, stage_of(cfg.model.core_layers, layout))
    init_parameters(model, cfg.model, cfg.train.seed, ops)
    model.compute_dtype = torch.bfloat16 if cfg.train.precision == "bf16" else torch.float32
    model.checkpointing, model.loops_per_checkpoint = (
        cfg.train.activation_checkpointing, cfg.train.checkpoint_every_loops,
    )  # fmt: skip
    if cfg.train.compile:
        model.compile_core()
    if model.embedding is not None and not model.stage.first:
        # The second copy of a tied matrix: DeepSpeed's mark for what the gradient norm leaves out.
        model.embedding.weight.ds_pipe_replicated = True
    return model.to(layout.device)


@contextlib.contextmanager
def _built(
    cfg: Config, layout: Layout, folder: Path, lock: FolderLock, started_at: float, watchdog: Watchdog
) -> Iterator[Trainer]:
    """The trainer, with the state it goes on from; closed at the end, also after an exception (no collective then)."""
    ranks = Ranks.of()
    reader = find_checkpoint(folder, cfg.run, ranks)
    _check_start(cfg, folder, reader)
    model = build_model(cfg, layout)
    device = torch.cuda.get_device_name(layout.device) if layout.device.type == "cuda" else "cpu"
    log.info("%s\ndevice      %s", summary(cfg, model, layout.world_size), device)
    placement = Placement.of_model(
        model, tensor_rank=layout.tensor_rank, tensor_size=layout.tensor_size, model_ranks=Ranks.of(layout.model_group)
    )
    engine = ZeroEngine(model, cfg, layout)
    state = _load(cfg, reader, engine, placement)
    sampler = DepthSampler.from_config(
        cfg.model.recurrence, seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size
    )
    place = DataPlace(
        dp_rank=layout.data_rank, dp_size=layout.data_size, rank=layout.rank, local_rank=layout.local_rank,
        world_size=layout.world_size,
    )  # fmt: skip
    reads = _reads(cfg, model)
    with TrainLoader(cfg, place, start_step=state.step, reads=reads) as loader:
        if reader is not None:
            sampler.load_state_dict(state.sampler)
            loader.load_state_dict(state.data)
        saver = CheckpointWriter(folder, cfg.checkpoint, dump_config(cfg), ranks, timeout_sec=cfg.parallel.timeout_sec)
        held_out = ValidationRows(cfg, place, reads=reads) if cfg.validation.rows else None
        runner = make_runner(cfg, engine, layout, sampler, loader)
        # From here on the folder changes: what can fail has been tried. Checkpoints that are later than the start go
        # first, since a start that ends in between would go on from one of them, with its rows removed.
        saver.start_from(state.step)
        writer = _metrics_writer(cfg, folder, state) if layout.is_main else None
        # In the order of their calls: a row is written before the checkpoint that counts on it.
        callbacks = [
            *([Ownership(lock)] if layout.is_main else []),
            Rewind(folder, ranks, saver, placement),
            *(_reports(cfg, layout, folder, writer) if writer is not None else []),
            *([Validation(held_out, loader.bos_id)] if held_out is not None else []),
            *([Evaluation(cfg)] if cfg.evaluation.tasks else []),
            *([Probe(held_out, loader.bos_id, folder)] if held_out is not None else []),
            Checkpointing(saver, placement, writer),
        ]
        yield Trainer(
            cfg, layout, engine, loader, runner, state, callbacks, started_at, watchdog, lambda: saver.failed
        )


def _reads(cfg: Config, model: LoopedLM) -> bool:
    """Whether this rank looks at tokens or labels: embedding, head, value embeddings, document borders."""
    stage = model.stage
    looks_up = any(cast(Layer, layer).attention.value_table is not None for layer in model.core.values())
    return stage.first or stage.last or looks_up or cfg.data.mask_document_boundaries


def _check_start(cfg: Config, folder: Path, reader: CheckpointReader | None) -> None:
    """Before the model is built: what has changed since the checkpoint is logged or refused, the disk has room."""
    start_step = 0
    if reader is not None:
        start_step = reader.step
        _check_end(cfg, reader)
        changes = check_resume(load_config(reader.config_path), cfg)
        log.info("resuming from %s (step %d)", reader.folder, reader.step)
        for change in changes:
            log.info("changed since it was saved: %s", change)
    check_disk(checkpoints_folder(folder), checkpoint_bytes(cfg), cfg.checkpoint, start_step, cfg.last_step)


def _check_end(cfg: Config, reader: CheckpointReader) -> None:
    """ConfigError where the run is to end before the step from which it would go on."""
    train = cfg.train
    tokens = cfg.tokens_per_step
    for key, value, end, least in (
        ("stop_step", train.stop_step, train.stop_step, reader.step),
        ("max_steps", train.max_steps, train.max_steps, reader.step),
        ("max_tokens", train.max_tokens, cfg.total_steps, reader.step * tokens - tokens + 1),
    ):
        if value is not None and end is not None and end < reader.step:
            raise ConfigError(
                f"train.{key}={value}: expected at least {least}, since {reader.folder} is of step {reader.step}; "
                "to go on from an earlier checkpoint set run.resume=step and run.resume_step, to start over run.name"
            )


def _load(cfg: Config, reader: CheckpointReader | None, engine: ZeroEngine, placement: Placement) -> TrainState:
    """The state to go on from, with its weights and moments in the engine."""
    if reader is not None:
        with reader:  # mapped files would keep the disk space of a checkpoint that is deleted during the run
            placement.check(reader)
            state = reader.state()
            engine.load_tensors(placement.read_from(reader), adamw_steps=state.adamw_steps)
        return state
    if cfg.checkpoint.initial_weights is not None:
        with open_checkpoint(Path(cfg.checkpoint.initial_weights)) as start:
            placement.check(start)
            read = placement.read_from(start)
            engine.load_parameters(lambda name: read(name, PARAMETER))
            log.info("starting from the weights of %s", start.folder)
    return TrainState()


def _metrics_writer(cfg: Config, folder: Path, state: TrainState) -> MetricsWriter:
    """The run's folder made ready: configuration, environment, and metrics up to the step to go on from."""
    write_run_folder(folder, cfg)
    removed = remove_rows_after(folder / METRICS_NAME, state.step)
    if removed:
        log.info("%s: removed %d rows after step %d, to be measured again", METRICS_NAME, removed, state.step)
    return MetricsWriter(folder / METRICS_NAME)


def _reports(cfg: Config, layout: Layout, folder: Path, writer: MetricsWriter) -> list[Callback]:
    """What the main rank alone does."""
    rates = Rates(cfg, layout)
    observers: list[Observer] = [writer, WandbLogger(cfg.logging, cfg.run.name, folder / "wandb", asdict(cfg))]
    profilers = [Profiler(cfg.logging.profile_steps, folder)] if cfg.logging.profile_steps else []
    return [Metrics(observers, rates), Console(rates), *profilers]
