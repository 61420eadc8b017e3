"""What each rank of a test world runs: all cases of a world in one process group. Returns what the tests assert."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.parallel import megatron, zero
from pretrain.parallel.megatron import Layout
from pretrain.parallel.schedule import hyperparameters
from pretrain.parallel.tensor_ops import tensor_ops
from pretrain.parallel.zero import PARAMETER, StepResult, ZeroEngine
from tests.parallel.toy import ROWS, Regions, Toy, Trace, batch, config, plain_training

NUM_STEPS = 5


def _engine(run: Config, layout: Layout, *, matrices_alone: bool = False) -> ZeroEngine:
    """`matrices_alone`: nothing else is trained."""
    toy = _toy(layout)
    for parameter in toy.parameters():
        parameter.requires_grad_(parameter.use_muon or not matrices_alone)
    return ZeroEngine(toy, run, layout)


def _toy(layout: Layout) -> Toy:
    if layout.tensor_size == 1:
        return Toy()
    from megatron.core.tensor_parallel import mappings

    place = layout.tensor_size, layout.tensor_rank
    if layout.sequence_parallel:
        regions = Regions(
            *place,
            enter=mappings.gather_from_sequence_parallel_region,
            leave=mappings.reduce_scatter_to_sequence_parallel_region,
            split=mappings.scatter_to_sequence_parallel_region,
            join=partial(mappings.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False),
        )
    else:
        enter = mappings.copy_to_tensor_model_parallel_region
        regions = Regions(*place, enter, mappings.reduce_from_tensor_model_parallel_region)
    return Toy(regions)


def _step(
    engine: ZeroEngine, run: Config, step: int, micro_rows: list[int], *, driven: bool = False, **batch_keys: Any
) -> tuple[float, StepResult]:
    """One step on this rank's rows in micro-batches of the given sizes: global loss, and the engine's result.

    `driven`: the module's forward and backward are called as a pipeline schedule calls them.
    """
    ids, labels, num_loops = batch(step, **batch_keys)
    valid = (labels >= 0).sum()
    share = ROWS // engine.layout.data_size
    mine = slice(engine.layout.data_rank * share, (engine.layout.data_rank + 1) * share)
    total = torch.zeros(())
    for micro_ids, micro_labels in zip(ids[mine].split(micro_rows), labels[mine].split(micro_rows), strict=True):
        loss = (engine.module if driven else engine)(micro_ids, micro_labels, num_loops) / valid
        total += loss.detach()
        if driven:
            engine.scale_loss(loss).backward()
        else:
            engine.backward(loss)
    dist.all_reduce(total, group=engine.layout.data_group)
    values = hyperparameters(run.optimizer, run.schedule, step, run.total_steps)
    return total.item(), engine.step(values)


def _whole(engine: ZeroEngine) -> dict[tuple[str, str], Tensor]:
    """Every saved tensor by (name, key), brought together from all data-parallel and tensor-parallel ranks."""
    layout = engine.layout
    mine = {(name, key): tensor.clone() for name, key, tensor in engine.saved_tensors()}
    shards: list[Any] = [None] * layout.data_size
    dist.all_gather_object(shards, mine, group=layout.data_group)
    assert sum(map(len, shards)) == len({entry for shard in shards for entry in shard}), "a tensor has two owners"
    local = {entry: tensor for shard in shards for entry, tensor in shard.items()}
    dims = {name: p.tensor_partition_dim for name, p in engine.module.named_parameters()}
    for (name, key), tensor in sorted(local.items()):
        if layout.tensor_size > 1 and dims[name] is not None:
            parts = [torch.empty_like(tensor) for _ in range(layout.tensor_size)]
            dist.all_gather(parts, tensor.contiguous(), group=layout.tensor_group)
            local[name, key] = torch.cat(parts, dims[name])
    return local


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def _differences(engine: ZeroEngine, losses: list[float], norms: list[float], reference: Trace) -> dict[str, float]:
    tensors = _whole(engine)
    return {
        "loss": max(map(_relative, losses, reference.losses)),
        "norm": max(map(_relative, norms, reference.norms)),
        "weights": max(
            ((tensors[name, PARAMETER] - weight).norm() / weight.norm()).item()
            for name, weight in reference.weights.items()
        ),
    }


def _equals_plain_training(
    layout: Layout, run: Config, micro_rows: list[int], *, driven: bool = False
) -> dict[str, float]:
    engine = _engine(run, layout)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss, result = _step(engine, run, step, micro_rows, driven=driven)
        losses.append(loss)
        norms.append(result.grad_norm)
    differences = _differences(engine, losses, norms, plain_training(run, NUM_STEPS))
    engine.close()
    return differences


def _uneven_tokens(layout: Layout, stage: int) -> dict[str, float]:
    """Micro-batches of 4 rows, or of 1, 2 and 1, whose valid tokens differ many times over: against one batch."""
    valid_tokens = {0: 1, 1: 2, 2: 0, 3: 1, 4: 2, 7: 3}
    run = config("adamw", stage, clip_norm=None)
    reference = plain_training(config("adamw", clip_norm=1e9), 1, valid_tokens)
    share = ROWS // layout.data_size
    worst = 0.0
    for micro_rows in ([share], [1, share - 2, 1]):
        engine = _engine(run, layout)
        _, result = _step(engine, run, 0, micro_rows, valid_tokens=valid_tokens)
        worst = max(worst, _relative(result.grad_norm, reference.norms[0]))
        tensors = _whole(engine)
        for name, gradient in reference.gradients.items():
            first_moment = tensors[name, "exp_avg"] / (1 - run.optimizer.betas[0])
            worst = max(worst, ((first_moment - gradient).norm() / gradient.norm()).item())
        engine.close()
    return {"gradient": worst}


def _resumes_exactly(layout: Layout, run: Config) -> dict[str, bool]:
    """3 steps, save, 2 steps; then load into a new engine that has trained on something else, 2 steps."""
    share = ROWS // layout.data_size
    engine = _engine(run, layout)
    for step in range(3):
        _step(engine, run, step, [share])
    saved, adamw_steps = _whole(engine), engine.adamw_steps
    straight = [_step(engine, run, step, [share])[0] for step in (3, 4)]
    final = _whole(engine)
    engine.close()
    other = _engine(run, layout)
    _step(other, run, 5, [share])
    dims = {name: p.tensor_partition_dim for name, p in other.module.named_parameters()}

    def read(name: str, key: str) -> Tensor:
        whole = saved[name, key]
        return whole if dims[name] is None else whole.chunk(layout.tensor_size, dims[name])[layout.tensor_rank]

    other.load_tensors(read, adamw_steps=adamw_steps)
    loaded = _whole(other)
    resumed = [_step(other, run, step, [share])[0] for step in (3, 4)]
    end = _whole(other)
    other.close()
    return {
        "loaded": all(torch.equal(loaded[entry], saved[entry]) for entry in saved),
        "losses": straight == resumed,
        "state": final.keys() == end.keys() and all(torch.equal(final[e], end[e]) for e in final),
        "adamw_steps": adamw_steps == 3,
    }


def _skips_together(layout: Layout, run: Config) -> dict[str, bool]:
    """A loss of NaN on the last rank, then an infinite one with a finite gradient on the first; then a sound step."""
    share = ROWS // layout.data_size
    engine = _engine(run, layout)
    _step(engine, run, 0, [share])
    before, adamw_steps = _whole(engine), engine.adamw_steps
    results = []
    for bad_rank, value in ((layout.world_size - 1, math.nan), (0, math.inf)):
        ids, labels, num_loops = batch(1)
        mine = slice(layout.data_rank * share, (layout.data_rank + 1) * share)
        for _ in range(2):
            loss = engine(ids[mine], labels[mine], num_loops) / labels.numel()
            engine.backward(loss + value if layout.rank == bad_rank else loss)
        results.append(engine.step(hyperparameters(run.optimizer, run.schedule, 1, run.total_steps)))
    after = _whole(engine)
    untouched = all(torch.equal(before[entry], after[entry]) for entry in before)
    counted = engine.num_skipped == 2 and engine.adamw_steps == adamw_steps
    loss, result = _step(engine, run, 1, [share])
    reference = plain_training(run, 2)
    engine.close()
    return {
        "skipped": all(r.skipped and r.grad_norm == math.inf for r in results),
        "untouched": untouched,
        "counted": counted,
        "goes_on": not result.skipped and _relative(loss, reference.losses[1]) < 1e-5
        and _relative(result.grad_norm, reference.norms[1]) < 1e-5,
    }  # fmt: skip


def _unused_parameter_keeps_still(layout: Layout, stage: int) -> dict[str, bool]:
    """A parameter that gets no gradient in a step is not moved by the gradient of the step before."""
    run = config("muon", stage, muon_momentum=0.0, muon_momentum_start=0.0, muon_weight_decay=0.0)
    share = ROWS // layout.data_size
    engine = _engine(run, layout)
    _step(engine, run, 0, [share])
    before = _whole(engine)
    ids, labels, _ = batch(1)
    mine = slice(layout.data_rank * share, (layout.data_rank + 1) * share)
    engine.backward(engine(ids[mine], labels[mine], 1) / labels.numel())  # one loop, without gradient
    engine.step(hyperparameters(run.optimizer, run.schedule, 1, run.total_steps))
    after = _whole(engine)
    engine.close()
    return {"still": torch.equal(before["block.up", PARAMETER], after["block.up", PARAMETER])}


def _world(tensor: int) -> Layout:
    torch.set_num_threads(1)
    zero.PERSISTENT_ELEMENTS = 20  # so that stage 3 does partition the toy's matrices
    return megatron.initialize(tensor, 1, sequence_parallel=False, timeout_sec=60)


def data_parallel_cases() -> dict[str, Any]:
    """By name: differences from plain training (numbers) or what holds (booleans), for all stages and optimizers."""
    layout = _world(tensor=1)
    share = ROWS // layout.data_size
    report: dict[str, Any] = {}
    for stage in (1, 2, 3):
        for optimizer in ("adamw", "muon"):
            run, case = config(optimizer, stage), f"{optimizer}, stage {stage}"
            report[f"one batch, {case}"] = _equals_plain_training(layout, run, [share])
            report[f"accumulation, {case}"] = _equals_plain_training(layout, run, [share // 4] * 4)
            report[f"resume, {case}"] = _resumes_exactly(layout, run)
            report[f"skip, {case}"] = _skips_together(layout, run)
        report[f"uneven tokens, stage {stage}"] = _uneven_tokens(layout, stage)
        report[f"unused parameter, stage {stage}"] = _unused_parameter_keeps_still(layout, stage)
        if stage > 1:
            run = config("muon", stage, overlap_comm=True)
            report[f"overlap, stage {stage}"] = _equals_plain_training(layout, run, [share // 2] * 2)
    report["driven by a schedule"] = _equals_plain_training(layout, config("muon"), [share // 2] * 2, driven=True)
    megatron.shutdown()
    return report


def _place_in_groups(layout: Layout) -> dict[str, bool]:
    """Whether tensor 2 x pipeline 2 of 4 ranks adds up the ranks it should, in buffers made as megatron-core does."""
    groups = layout.tensor_group, layout.pipeline_group, layout.data_group, layout.model_group
    expected = [[1, 2, 0, 6], [1, 4, 1, 6], [5, 2, 2, 6], [5, 4, 3, 6]][layout.rank]
    buffers = [torch.full((1,), float(layout.rank), device=torch.cuda.current_device()).cuda() for _ in groups]
    for buffer, group in zip(buffers, groups, strict=True):
        dist.all_reduce(buffer, group=group)
    ranks = (layout.tensor_rank, layout.pipeline_rank, layout.data_rank)
    return {"ranks": ranks == (layout.rank % 2, layout.rank // 2, 0), "sums": [int(b) for b in buffers] == expected}


def _stages_share_norm_and_skip(layout: Layout) -> dict[str, bool]:
    """Two stages that each train a toy of their own on a batch of their own: one norm, and one decision to skip.

    The second has no parameter group of vectors, as a middle stage of sandwich norms without weights has none.
    """
    run = config("muon")
    engine = _engine(run, layout, matrices_alone=layout.pipeline_rank == 1)
    values = hyperparameters(run.optimizer, run.schedule, 0, run.total_steps)
    squares = 0.0
    for step in (0, 1):
        ids, labels, num_loops = batch(step)
        plain = Toy()
        (plain(ids, labels, num_loops) / labels.numel()).backward()
        trained = [p for p in plain.parameters() if p.use_muon or step == 0]
        squares += sum(float(p.grad.double().square().sum()) for p in trained)
    ids, labels, num_loops = batch(layout.pipeline_rank)
    engine.scale_loss(engine.module(ids, labels, num_loops) / labels.numel()).backward()
    sound = engine.step(values)
    factor = math.nan if layout.pipeline_rank == 1 else 1.0
    engine.scale_loss(engine.module(ids, labels, num_loops) * factor).backward()
    skipped = engine.step(values)
    engine.close()
    one_norm = _relative(sound.grad_norm, math.sqrt(squares)) < 1e-6
    return {"norm": one_norm, "skip": skipped.skipped and not sound.skipped}


def _sums_in_any_strides(layout: Layout) -> bool:
    """Whether sums over tensor ranks, forward and backward, are those of tensors whose axes were swapped, too."""
    ops, size = tensor_ops(layout), layout.tensor_size
    whole = torch.arange(2 * 4 * 3, dtype=torch.float32).view(2, 4, 3)
    local = ops.local_sequence(4)
    x = whole[:, local].clone().requires_grad_()
    factors = 1.0 + layout.tensor_rank + whole.transpose(0, 1)
    (ops.enter(x).transpose(0, 1) * factors).sum().backward()
    expected = sum(1.0 + rank + whole for rank in range(size))
    swapped = (whole.transpose(0, 1).contiguous() + layout.tensor_rank).transpose(0, 1)
    left = ops.leave(swapped.clone(memory_format=torch.preserve_format))
    return torch.equal(x.grad, expected[:, local]) and torch.equal(left, (size * whole + 1)[:, local])


def tensor_parallel_cases(second_port: int) -> dict[str, Any]:
    """The same in a world of tensor = 2, with and without sequence parallelism; then the groups of a pipeline."""
    layout = _world(tensor=2)
    sharded_sequence = replace(layout, sequence_parallel=True)
    halves = [ROWS // layout.data_size // 2] * 2
    report: dict[str, Any] = {}
    for stage in (1, 2, 3):
        run = config("muon", stage)
        report[f"tensor, stage {stage}"] = _equals_plain_training(layout, run, halves)
        report[f"sequence, stage {stage}"] = _equals_plain_training(sharded_sequence, run, halves)
    report["resume"] = _resumes_exactly(layout, config("muon", 3))
    report["skip"] = _skips_together(layout, config("muon", 1))
    report["strides"] = {"sums": _sums_in_any_strides(layout), "sequence": _sums_in_any_strides(sharded_sequence)}
    megatron.shutdown()
    os.environ["MASTER_PORT"] = str(second_port)
    layout = megatron.initialize(2, 2, sequence_parallel=False, timeout_sec=60)
    report["groups"] = _place_in_groups(layout)
    report["stages"] = _stages_share_norm_and_skip(layout)
    megatron.shutdown()
    return report
