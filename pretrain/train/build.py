"""From a checked configuration to a trainer, and what a run or a dry run does with it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from pretrain.config.load import dump_config, load_config
from pretrain.config.resume import check_resume
from pretrain.config.schema import Config
from pretrain.data.loader import TrainLoader
from pretrain.data.place import DataPlace
from pretrain.data.validation import ValidationRows
from pretrain.model.init import init_parameters
from pretrain.model.looped import LoopedLM
from pretrain.parallel import megatron
from pretrain.parallel.megatron import Layout
from pretrain.parallel.tensor_ops import tensor_ops
from pretrain.parallel.zero import PARAMETER, ZeroEngine
from pretrain.sampling import DepthSampler
from pretrain.train.callbacks import Checkpointing, Console, Metrics, Observer, Profiler, Validation, WandbLogger
from pretrain.train.checkpoint.find import find_checkpoint, open_checkpoint
from pretrain.train.checkpoint.folders import check_disk, checkpoints_folder
from pretrain.train.checkpoint.placement import Placement
from pretrain.train.checkpoint.ranks import Ranks
from pretrain.train.checkpoint.reader import CheckpointReader
from pretrain.train.checkpoint.writer import CheckpointWriter
from pretrain.train.metrics import METRICS_NAME, MetricsWriter, remove_rows_after
from pretrain.train.rates import Rates
from pretrain.train.run_folder import run_folder, set_up_logging, write_run_folder
from pretrain.train.state import TrainState
from pretrain.train.step import StepRunner
from pretrain.train.summary import checkpoint_bytes, summary
from pretrain.train.trainer import Callback, Trainer

log = logging.getLogger(__name__)


def dry_run(cfg: Config) -> int:
    """Builds the model without memory, prints the start-up summary, and returns exit code 0."""
    with torch.device("meta"):
        model = LoopedLM(cfg.model)
    world_size = int(os.environ.get("WORLD_SIZE", cfg.parallel.tensor * cfg.parallel.pipeline))
    print(summary(cfg, model, world_size))
    return 0


def run_training(cfg: Config) -> int:
    """Trains as `cfg` says, resuming where the run's folder holds a checkpoint; returns exit code 0. Collective."""
    _set_numerics(cfg)
    parallel = cfg.parallel
    layout = megatron.initialize(
        parallel.tensor, parallel.pipeline, parallel.sequence_parallel, parallel.timeout_sec
    )
    folder = run_folder(cfg)
    set_up_logging(folder, layout)
    with _built(cfg, layout, folder) as trainer:
        trainer.fit()
    megatron.shutdown()
    return 0


def _set_numerics(cfg: Config) -> None:
    """Before CUDA starts. TF32 is for bf16 runs only: it would round the products of fp32 ones."""
    torch.set_float32_matmul_precision("highest" if cfg.train.precision == "fp32" else "high")
    if cfg.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def build_model(cfg: Config, layout: Layout) -> LoopedLM:
    """This rank's part of the model with its initial weights, on the rank's device."""
    ops = tensor_ops(layout)
    model = LoopedLM(cfg.model, ops)
    init_parameters(model, cfg.model, cfg.train.seed, ops)
    model.compute_dtype = torch.bfloat16 if cfg.train.precision == "bf16" else torch.float32
    model.checkpointing, model.loops_per_checkpoint = (
        cfg.train.activation_checkpointing, cfg.train.checkpoint_every_loops,
    )  # fmt: skip
    if cfg.train.compile:
        model.compile_core()
    return model.to(layout.device)


@contextlib.contextmanager
def _built(cfg: Config, layout: Layout, folder: Path) -> Iterator[Trainer]:
    """The trainer, with the state it goes on from; closed at the end, also after an exception (no collective then)."""
    ranks = Ranks.of()
    check_disk(checkpoints_folder(folder), checkpoint_bytes(cfg), cfg.checkpoint, 0, cfg.last_step)
    model = build_model(cfg, layout)
    if layout.is_main:
        log.info("%s", summary(cfg, model, layout.world_size))
    placement = Placement.of_model(
        model, tensor_rank=layout.tensor_rank, tensor_size=layout.tensor_size, model_ranks=Ranks.of(layout.model_group)
    )
    engine = ZeroEngine(model, cfg, layout)
    reader = find_checkpoint(folder, cfg.run, ranks)
    state = TrainState() if reader is None else _resume(cfg, reader, layout, engine, placement)
    if reader is None and cfg.checkpoint.initial_weights is not None:
        _load_weights(cfg, engine, placement)
    place = DataPlace(
        dp_rank=layout.data_rank, dp_size=layout.data_size, rank=layout.rank, local_rank=layout.local_rank,
        world_size=layout.world_size,
    )  # fmt: skip
    sampler = DepthSampler.from_config(
        cfg.model.recurrence, seed=cfg.train.seed, global_batch_size=cfg.train.global_batch_size
    )
    loader = TrainLoader(cfg, place, start_step=state.step)
    try:
        if reader is not None:
            sampler.load_state_dict(state.sampler)
            loader.load_state_dict(state.data)
        runner = StepRunner(cfg, engine, layout, sampler, loader)
        hooks = _callbacks(cfg, layout, folder, placement, ranks, state, ValidationRows(cfg, place), loader.bos_id)
        yield Trainer(cfg, layout, engine, loader, runner, state, hooks)
    finally:
        loader.close()


def _callbacks(
    cfg: Config,
    layout: Layout,
    folder: Path,
    placement: Placement,
    ranks: Ranks,
    state: TrainState,
    validation_rows: ValidationRows,
    bos_id: int,
) -> list[Callback]:
    """In the order of their calls: a row is written before the checkpoint that counts on it."""
    rates = Rates(cfg, layout)
    callbacks: list[Callback] = []
    sync_metrics = _nothing
    if layout.is_main:
        write_run_folder(folder, cfg)
        removed = remove_rows_after(folder / METRICS_NAME, state.step)
        if removed:
            log.info("%s: removed %d rows after step %d, to be measured again", METRICS_NAME, removed, state.step)
        writer = MetricsWriter(folder / METRICS_NAME)
        sync_metrics = writer.sync
        observers: list[Observer] = [writer, WandbLogger(cfg.logging, cfg.run.name, folder / "wandb", asdict(cfg))]
        callbacks += [Metrics(observers, rates), Console(rates)]
        if cfg.logging.profile_steps:
            first, last = cfg.logging.profile_steps
            callbacks.append(Profiler(first, last, folder))
    saver = CheckpointWriter(folder, cfg.checkpoint, dump_config(cfg), ranks, timeout_sec=cfg.parallel.timeout_sec)
    return [*callbacks, Validation(validation_rows, bos_id), Checkpointing(saver, placement, sync_metrics)]


def _nothing() -> None:
    return None


def _resume(
    cfg: Config, reader: CheckpointReader, layout: Layout, engine: ZeroEngine, placement: Placement
) -> TrainState:
    """The saved state, with weights and moments in the engine; what has changed in `cfg` is logged or refused."""
    changes = check_resume(load_config(reader.config_path), cfg)
    placement.check(reader)
    if layout.is_main:
        log.info("resuming from %s (step %d)", reader.folder, reader.step)
        for change in changes:
            log.info("changed since it was saved: %s", change)
    state = reader.state()
    engine.load_tensors(placement.read_from(reader), adamw_steps=state.adamw_steps)
    return state


def _load_weights(cfg: Config, engine: ZeroEngine, placement: Placement) -> None:
    with open_checkpoint(Path(str(cfg.checkpoint.initial_weights))) as reader:
        placement.check(reader)
        read = placement.read_from(reader)
        engine.load_parameters(lambda name: read(name, PARAMETER))
        log.info("starting from the weights of %s", reader.folder)
