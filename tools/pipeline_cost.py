"""Measures what a pipeline wastes: row passes in micro-batches sorted by depth, and the idle time of its ranks.

The schedule is the one of training, on CPU processes whose chunks sleep in proportion to the rows that they compute,
twice as long backward; so the idle time is that of the schedule, whatever the machine. It stands beside the formula of
tools/estimate.py, for equal depths and for drawn ones.

    python tools/pipeline_cost.py [--ranks 2 4] [--micro-batches 8] [--rows 4] [--mean-loops 8]
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[:] = [str(Path(__file__).resolve().parents[1]), *sys.path[1:]]

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from pretrain.arguments import integer
from pretrain.config.model import RecurrenceConfig
from pretrain.config.schema import Config
from pretrain.messages import set_up_console
from pretrain.parallel import megatron
from pretrain.parallel.megatron import Layout, circular_schedule
from pretrain.planning import Plan
from pretrain.processes import end_with_parent
from pretrain.sampling import Depths, DepthSampler, LoopPlan, LoopStep, form_micro_batches

ROW_SEC = 10e-3
"""Sleep of a row in one loop on one rank, forward. Sending a tensor takes some 0.2 ms, on busy cores 2 ms."""
NUM_STEPS = 500
"""Draws that the wasted row passes are counted over."""


def sampler_of(micro_batches: int, rows: int, mean_loops: int) -> DepthSampler:
    """Depths of a batch of one data-parallel rank, by the default law."""
    return DepthSampler.from_config(
        RecurrenceConfig(mean_loops=mean_loops), seed=0, global_batch_size=micro_batches * rows
    )


def plans_of(depths: Depths, rows: int) -> list[LoopPlan]:
    """Micro-batches in the order of training."""
    return [LoopPlan.from_depths(depths.rows(index)) for index in form_micro_batches(depths, rows)]


def wasted(sampler: DepthSampler, rows: int) -> dict[str, float]:
    """Shares of core row passes that no row needs, over many steps, by how rows are put together."""
    executed = dict.fromkeys(("compacted", "whole", "unsorted"), 0)
    needed = 0
    for step in range(NUM_STEPS):
        depths = sampler.draw(step)
        needed += int(depths.num_loops.sum())
        for plan in plans_of(depths, rows):
            executed["compacted"] += plan.executed_row_passes
            executed["whole"] += rows * (len(plan.no_grad) + len(plan.grad))
        for start in range(0, len(depths), rows):
            some = depths.rows(np.arange(start, start + rows))
            executed["unsorted"] += rows * int(some.no_grad_loops.max() + some.grad_loops.max())
    return {name: 1 - needed / count for name, count in executed.items()}


# --------------------------------------------------------------------------------------------------------- idle time


class _Work(torch.autograd.Function):
    """Identity that takes `sec` forward and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sec: float) -> Tensor:
        ctx.sec = sec
        time.sleep(sec)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.sec)
        return gradients[0], None


def idle_share(layout: Layout, plans: list[LoopPlan]) -> float:
    """Share of a step that the pipeline ranks wait, their mean. Collective over the pipeline."""
    dist.barrier()
    begin, busy = time.perf_counter(), 0.0
    for backward in (False, True):
        num_chunks = max(len(_steps(plan, backward)) for plan in plans)
        if num_chunks:
            busy += _phase(layout, plans, num_chunks, backward)
    dist.barrier()
    share = torch.tensor(1 - busy / (time.perf_counter() - begin))
    dist.all_reduce(share)
    return float(share) / layout.pipeline_size


def _steps(plan: LoopPlan, backward: bool) -> tuple[LoopStep, ...]:
    return plan.grad if backward else plan.no_grad


def _phase(layout: Layout, plans: list[LoopPlan], num_chunks: int, backward: bool) -> float:
    """Runs one phase of a step; seconds of work on this rank."""
    busy = 0.0

    def chunk(plan: LoopPlan, t: int, received: Tensor | None) -> Tensor:
        nonlocal busy
        x = torch.zeros(1, 1, 1, requires_grad=backward) if received is None else received
        steps = _steps(plan, backward)
        loop = t - (num_chunks - len(steps))
        if loop >= 0:
            sec = ROW_SEC * steps[loop].computed
            x, busy = _Work.apply(x, sec), busy + (3 if backward else 1) * sec
        is_loss = backward and t == num_chunks - 1 and layout.pipeline_rank == layout.pipeline_size - 1
        return x.sum() if is_loss else x

    with torch.set_grad_enabled(backward):
        circular_schedule(layout, plans, num_chunks, chunk, (1, 1, 1), torch.float32, backward=backward)
    return busy


def formula(num_ranks: int, micro_batches: int, rows: int, mean_loops: int) -> float:
    """The bubble that tools/estimate.py prints."""
    cfg = Config()
    cfg.parallel.pipeline = num_ranks
    cfg.train.global_batch_size, cfg.train.micro_batch_size = micro_batches * rows, rows
    cfg.model.recurrence.mean_loops = mean_loops
    return Plan(cfg, num_ranks).bubble


def measure(num_ranks: int, micro_batches: int, rows: int, mean_loops: int, num_steps: int) -> tuple[float, float]:
    """Idle shares for equal depths and, mean of `num_steps`, for drawn ones. Runs in each of `num_ranks` processes."""
    layout = megatron.initialize(1, num_ranks, False, 120.0)
    sampler = sampler_of(micro_batches, rows, mean_loops)
    equal = Depths.truncated(np.full(micro_batches * rows, mean_loops), sampler.backprop_loops_at(0))
    idle_share(layout, plans_of(equal, rows))  # the first sends connect the ranks
    of_equal = idle_share(layout, plans_of(equal, rows))
    of_drawn = [idle_share(layout, plans_of(sampler.draw(step), rows)) for step in range(num_steps)]
    megatron.shutdown()
    return of_equal, float(np.mean(of_drawn))


# ------------------------------------------------------------------------------------------------------ command line


def _worker(rank: int, parent: int, port: int, num_ranks: int, args: argparse.Namespace) -> None:
    end_with_parent(parent, signal.SIGKILL)  # torch asks for INT, which a collective does not let through
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    sizes = args.micro_batches, args.rows, args.mean_loops
    equal, drawn = measure(num_ranks, *sizes, args.steps)
    if rank == 0:
        print(f"| {num_ranks} | {formula(num_ranks, *sizes):.1%} | {equal:.1%} | {drawn:.1%} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both measurements as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=integer(1, 64), nargs="+", default=[2, 4], help="pipeline ranks (%(default)s)")
    parser.add_argument("--micro-batches", type=integer(1, 10**6), default=8, help="per step (%(default)s)")
    parser.add_argument("--rows", type=integer(1, 10**6), default=4, help="of a micro-batch (%(default)s)")
    parser.add_argument("--mean-loops", type=integer(1, 1_000), default=8, help="(%(default)s)")
    parser.add_argument("--steps", type=integer(1, 10**6), default=5, help="steps of drawn depths (%(default)s)")
    args = parser.parse_args(argv)
    for ranks in args.ranks:
        if ranks < 2 or args.micro_batches % ranks:
            parser.error(
                f"--ranks={ranks}: expected 2 or more, of which --micro-batches={args.micro_batches} is a multiple"
            )
    set_up_console()
    print("| rows of a micro-batch | wasted row passes |\n|---|---|")
    shares = wasted(sampler_of(args.micro_batches, args.rows, args.mean_loops), args.rows)
    labels = {
        "compacted": "sorted by depth, those that have not joined left out",
        "whole": "sorted by depth, all computed from the first that joins on",
        "unsorted": "not sorted, all computed",
    }
    print("\n".join(f"| {labels[name]} | {share:.1%} |" for name, share in shares.items()))
    print("\n| pipeline ranks | bubble by the formula | idle, equal depths | idle, drawn depths |\n|---|---|---|---|")
    # Imported once: the processes are forks of this one.
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    for num_ranks in args.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start_processes(_worker, (os.getpid(), port, num_ranks, args), nprocs=num_ranks, start_method="fork")


if __name__ == "__main__":
    main()
