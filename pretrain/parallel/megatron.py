"""The adapter for megatron-core: process groups, and this process's place in them.

World = tensor x pipeline x data, in megatron-core's order: tensor ranks are neighbours (they talk in every layer), then
data ranks, then pipeline stages. Of megatron-core, others import only its region mappings (tensor_ops.py).
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pretrain.errors import ConfigError
from pretrain.parallel import cpu_shim


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes, ranks and process groups of this process. Ranks count from 0 within their group."""

    world_size: int
    rank: int
    local_rank: int
    device: torch.device
    tensor_size: int
    tensor_rank: int
    pipeline_size: int
    pipeline_rank: int
    data_size: int
    data_rank: int
    sequence_parallel: bool
    world_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None
    """The first and the last pipeline rank; None on other ranks, and without a pipeline."""
    model_group: dist.ProcessGroup
    """Tensor x pipeline: the ranks that together hold one model."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes for all."""
        return self.rank == 0


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """The command line without the `--local_rank=N` that the deepspeed launcher inserts."""
    return [a for a in arguments if not a.startswith(("--local_rank=", "--local-rank="))]


def ensure_environment() -> None:
    """Completes the launcher's variables; without a launcher, describes a world of one process on a free port.

    Errors: ConfigError where they are there in part, or srun started several tasks that would each train alone.
    """
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"environment: RANK={os.environ['RANK']} is set, but not {', '.join(missing)}: expected all of a "
                "launcher's variables; start through launchers/, torchrun or deepspeed, or unset RANK to train alone"
            )
    else:
        if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"environment: WORLD_SIZE={world} is set, but not RANK: expected both, as launchers/, torchrun and "
                "deepspeed set them; or unset WORLD_SIZE to train alone"
            )
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1:
            raise ConfigError(
                f"srun started {tasks} tasks, but RANK is not set, so that each would train alone: "
                "start them through launchers/, torchrun or deepspeed, or export RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT."
            )
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": _free_port()}
        os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("LOCAL_RANK", "0")
    # torchrun's name for what DeepSpeed's CPU accelerator calls LOCAL_SIZE.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def initialize(
    tensor: int, pipeline: int, sequence_parallel: bool, timeout_sec: float, *, rendezvous_sec: float = 300.0
) -> Layout:
    """Creates every process group (NCCL with CUDA, else gloo) and returns this process's layout. Collective over all.

    Calls `ensure_environment` first. `rendezvous_sec` bounds the wait for all processes to come, `timeout_sec` each
    collective (model-parallel groups: rounded up to whole minutes, megatron-core's unit). Errors: ConfigError where the
    world is no multiple of tensor x pipeline.
    """
    ensure_environment()
    world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if world_size % (tensor * pipeline):
        raise ConfigError(
            f"{world_size} processes cannot be laid out as parallel.tensor={tensor} x parallel.pipeline={pipeline} x "
            f"data: start a multiple of {tensor * pipeline} processes, or lower parallel.tensor or parallel.pipeline."
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    cpu_shim.install(schedules=pipeline > 1)
    from megatron.core import parallel_state

    if dist.is_initialized():
        # Another layout of the same processes: tools/check_layouts.py compares many.
        _destroy_model_parallel()
    else:
        store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=rendezvous_sec)))
        store.set_timeout(timedelta(seconds=timeout_sec))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store, rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_sec),
            # Binding the device connects at once, which names a rank that is missing; a single rank has no peer.
            device_id=device if device.type == "cuda" and world_size > 1 else None,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        distributed_timeout_minutes=max(1, math.ceil(timeout_sec / 60)),
        create_gloo_process_groups=False,
    )
    return Layout(
        world_size=world_size,
        rank=dist.get_rank(),
        local_rank=local_rank,
        device=device,
        tensor_size=tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_size=pipeline,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        sequence_parallel=sequence_parallel,
        world_group=cast(dist.ProcessGroup, dist.group.WORLD),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        embedding_group=parallel_state.get_embedding_group(check_initialized=False) if pipeline > 1 else None,
        model_group=parallel_state.get_model_parallel_group(),
    )


T = TypeVar("T")


def circular_schedule(
    layout: Layout,
    items: Sequence[T],
    num_chunks: int,
    chunk: Callable[[T, int, torch.Tensor | None], torch.Tensor],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    backward: bool,
) -> list[torch.Tensor]:
    """Runs every item through `num_chunks` chunks on every pipeline rank, round and round. Collective over the ring.

    `chunk(item, t, received)` returns what the next rank receives, a tensor of `shape` and `dtype`; received is None in
    chunk 0 of the first rank. With `backward` the last chunk of the last rank returns a loss, which is divided by the
    number of items. Without, what it returns is collected: by item on the last rank, empty elsewhere.
    The number of items is a multiple of the pipeline's size.
    """
    from megatron.core.enums import ModelType
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules

    interleaved = num_chunks > 1
    config = ModelParallelConfig(
        tensor_model_parallel_size=layout.tensor_size,
        pipeline_model_parallel_size=layout.pipeline_size,
        virtual_pipeline_model_parallel_size=num_chunks if interleaved else None,
        microbatch_group_size_per_vp_stage=layout.pipeline_size,
        pipeline_dtype=dtype,
        # The default settings give wrong gradients with two ranks, without a message.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=False,
        # Corrupts tensors in flight on gloo.
        deallocate_pipeline_outputs=False,
    )
    # Read by the schedules, though only TransformerConfig has them. `shape` is this rank's share already.
    config.fine_grained_activation_offloading, config.hidden_size = False, shape[2]

    class Chunk(torch.nn.Module):
        def __init__(self, t: int) -> None:
            super().__init__()
            self.t, self.vp_stage = t, t if interleaved else None
            self.config, self.model_type = config, ModelType.encoder_or_decoder
            self.received: torch.Tensor | None = None

        def set_input_tensor(self, received: list[torch.Tensor | None]) -> None:
            self.received = received[0]

    def forward_step(iterator: Iterator[T], model: Chunk) -> tuple[torch.Tensor, Any]:
        # Sequence parallelism leaves views with the axes swapped, which cannot be sent.
        output = chunk(next(iterator), model.t, model.received).contiguous()
        return output, (lambda loss: (loss, {})) if backward else None

    chunks, iterators = [Chunk(t) for t in range(num_chunks)], [iter(items) for _ in range(num_chunks)]
    arguments: dict[str, Any] = {
        "forward_step_func": forward_step, "num_microbatches": len(items), "seq_length": shape[0],
        "micro_batch_size": shape[1], "forward_only": not backward,
    }  # fmt: skip
    if interleaved:
        outputs = schedules.forward_backward_pipelining_with_interleaving(
            model=chunks, data_iterator=iterators, **arguments
        )
    else:
        outputs = schedules.forward_backward_pipelining_without_interleaving(
            model=chunks[0], data_iterator=iterators[0], **arguments
        )
    return [] if backward else outputs


def shutdown() -> None:
    """Destroys the process groups. Only after a clean end: a failed process leaves without collectives."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _destroy_model_parallel() -> None:
    """Destroys megatron-core's groups and leaves the world. Collective over all.

    megatron-core only forgets them; each gloo group would keep its threads, which wake up a hundred times a second.
    """
    from megatron.core import parallel_state

    dist.barrier()
    for group in parallel_state._global_process_group_list or []:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
