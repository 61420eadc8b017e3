"""The adapter for DeepSpeed: a ZeRO engine of stage 1, 2 or 3 over the data-parallel group.

What is fixed here, and why (DeepSpeed 0.19.8):

* The DeepSpeed dictionary is built from the project's validated configuration, never from a user's keys: DeepSpeed
  ignores unknown ones.
* Parameters, gradients and optimizer state are fp32; `bf16` and `torch_autocast` stay off (train.precision=bf16 is a
  cast inside the layers), because DeepSpeed would see loop gradients that autograd had already summed in bf16.
* Gradient accumulation is unmanaged: any number of backwards, then `step`. A pipeline schedule that runs backward
  by itself fits the same mode (stage 1). Stage 1 reduces once, at the step; stages 2 and 3 at each backward.
* `gradient_clipping` is 0: the optimizer clips, by the norm of the raw gradient (pretrain.parallel.optimizer).
* Stage 0 is run as stage 1: DeepSpeed's stage 0 drops tensor-parallel shards from the norm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import ops
from torch import Tensor, nn

from pretrain.config.schema import Config, ZeroConfig
from pretrain.parallel.megatron import Layout
from pretrain.parallel.optimizer import PartitionedOptimizer
from pretrain.parallel.partition import ParamSpec, Partition, Pieces, contiguous_pieces, sliced_pieces
from pretrain.parallel.schedule import Hyperparameters

log = logging.getLogger(__name__)

PARAMETER = "parameter"
"""Key of a parameter's value among its saved tensors, beside the optimizer's state keys."""

PERSISTENT_ELEMENTS = 100_000
"""Stage 3 keeps smaller parameters (norms, gates) whole: to gather each would cost more than its memory."""


def deepspeed_config(zero: ZeroConfig, num_elements: int) -> dict[str, Any]:
    """DeepSpeed's dictionary for stage 1, 2 or 3 of a model of `num_elements` on this rank."""
    bucket = min(zero.bucket_elements, num_elements)  # DeepSpeed allocates it whole
    even_elements = max(2, bucket - bucket % 2)  # DeepSpeed aligns to 2
    return {
        # Batch sizes are the trainer's affair; DeepSpeed wants a number.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device in every forward
        "zero_optimization": {
            "stage": max(1, zero.stage),
            "overlap_comm": zero.overlap_comm,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": even_elements,
            "stage3_prefetch_bucket_size": bucket // 4,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        },
    }


class _ModelParallelUnit:
    """What DeepSpeed asks an mpu, answered from the layout. "Model parallel" is tensor x pipeline.

    It must not have `initialize_sequence_parallel`, by which DeepSpeed recognises Ulysses.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._layout.data_group

    def get_data_parallel_rank(self) -> int:
        return self._layout.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self._layout.data_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._layout.data_group)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._layout.model_group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._layout.model_group)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._layout.model_group)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._layout.tensor_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._layout.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._layout.tensor_size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._layout.pipeline_group

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._layout.pipeline_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._layout.pipeline_size


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, the same on all ranks."""

    grad_norm: float
    """Norm of the raw gradient, each parameter counted once in any layout; inf where it is not finite."""
    skipped: bool
    """A loss or gradient of some rank was not finite: weights and optimizer state are untouched."""


class ZeroEngine:
    """A model with its optimizer, sharded by ZeRO. One optimizer step is any number of `backward`, then `step`.

    `model` must have its final shapes, parameters in fp32 on `layout.device`, and carry `tensor_partition_dim`,
    `tensor_model_parallel`, `use_muon` and `sequence_parallel` on its parameters. A pipeline marks the second copy of
    tied embeddings with `ds_pipe_replicated`, so that the norm counts it once, and makes both copies' gradients equal
    before `step`. Construction is collective over all.
    """

    def __init__(self, model: nn.Module, config: Config, layout: Layout) -> None:
        if config.zero.stage == 0:
            log.warning("zero.stage=0 is run as zero.stage=1: DeepSpeed's stage 0 miscounts the gradient norm.")
        self.layout = layout
        self.stage = max(1, config.zero.stage)
        self.num_skipped = 0
        self._optimizer = PartitionedOptimizer(
            model,
            config.optimizer,
            orthogonalise_in=torch.float32 if config.train.precision == "fp32" else torch.bfloat16,
            tensor_group=layout.tensor_group,
            gradient_norm=lambda: self._zero._global_grad_norm,
        )
        names = {p: name for name, p in model.named_parameters()}
        shapes = {p: p.shape for p in names}  # stage 3 empties the parameters
        _sum_sequence_parallel_gradients(model, layout)
        # Its warnings are about clients' optimizers and skipped steps: the project reports those itself.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if layout.device.type == "cpu":
            # Its first use compiles a shared-memory all-reduce for half a minute, and fails without a compiler.
            ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self._optimizer,
            config=deepspeed_config(config.zero, sum(shape.numel() for shape in shapes.values())),
            mpu=_ModelParallelUnit(layout),
            dist_init_required=False,
        )
        self._zero = self._engine.optimizer
        if layout.pipeline_size > 1:
            _reduce_norm_once(self._zero)
        self._partitions = [
            (kind, Partition(flat, [_spec(names[p], shapes[p], p) for p in params], pieces, layout.data_group))
            for kind, flat, params, pieces in self._flat_partitions(shapes)
        ]
        self._optimizer.bind(self._partitions)
        log.info(
            "ZeRO stage %d over %d ranks: parameters, gradients (accumulated and reduced) and optimizer state in fp32, "
            "matrix products in %s.", self.stage, layout.data_size, config.train.precision,
        )  # fmt: skip

    def _flat_partitions(
        self, shapes: dict[nn.Parameter, torch.Size]
    ) -> Iterator[tuple[str, Tensor, list[nn.Parameter], Pieces]]:
        """Kind, flat tensor, parameters and pieces of each partition that DeepSpeed has made."""
        zero, num_ranks = self._zero, self.layout.data_size
        kinds = [group["kind"] for group in self._optimizer.param_groups]
        if self.stage == 3:
            for i, params in enumerate(zero.fp16_groups):
                pieces = sliced_pieces([shapes[p].numel() for p in params], num_ranks)
                yield kinds[zero.sub_group_to_group_id[i]], zero.fp32_partitioned_groups_flat[i], params, pieces
        else:
            for i, params in enumerate(zero.bit16_groups):
                numels = [shapes[p].numel() for p in params]
                pieces = contiguous_pieces(numels, zero.partition_size[i], num_ranks)
                yield kinds[i], zero.single_partition_of_fp32_groups[i], params, pieces

    @property
    def module(self) -> nn.Module:
        """The model; a pipeline schedule (stage 1) drives it directly. At stage 3 call the engine instead."""
        return self._engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Under stage 3 every rank must call it equally often, with equal loop counts.

        Stage 2 sums gradients in the order in which backward has them ready. So there too loop counts must be equal if
        parameters are used in some loops only.
        """
        return self._engine(*args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to differentiate where a schedule calls backward itself; `backward` applies it.

        Undoes DeepSpeed's average over data-parallel ranks, and turns a loss that is not finite into NaN so that its
        gradient, and with it the norm on every rank, is not finite either: one test then serves for both.
        """
        poison = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        return loss * (self.layout.data_size * poison)

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of `loss`, this rank's share of the global batch's loss: shares are summed.

        Stages 2 and 3: collective over the data-parallel group.
        """
        self._engine.backward(self.scale_loss(loss))

    def step(self, hyperparameters: Hyperparameters, *, discard: bool = False) -> StepResult:
        """One update from the gradients accumulated since the last, or none at all. Collective over all ranks.

        `discard`, equal on all ranks: the gradients are measured and dropped, and no update is made.
        """
        self._optimizer.set_hyperparameters(hyperparameters)
        self._optimizer.discard = discard
        if self.stage == 1:
            # DeepSpeed passes over what has no gradient on this rank, as a head that none of its rows came to, and
            # would sum the next parameter's with it.
            for parameter in self.module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._engine.step()
        if self.stage == 3:
            # A parameter without a gradient in the next step would otherwise be given this step's again.
            self._zero.grad_partitions_flat_buffer.zero_()
        skipped = bool(self._zero.overflow)
        self.num_skipped += skipped
        return StepResult(grad_norm=float(self._zero._global_grad_norm), skipped=skipped)

    def measure_gradients(self, wanted: bool) -> None:
        """Whether the next steps leave what `gradient_norms` reads."""
        self._optimizer.squared_norms = {} if wanted else None

    def gradient_norms(self, parts: Sequence[str]) -> dict[str, float]:
        """Norm of the raw gradient of each part in the last step, measured: of the parameters whose names begin so.

        `parts` are the same on all ranks and hold every parameter. Each parameter counts once in any layout. Collective
        over all ranks; {} where nothing was measured.
        """
        layout, module = self.layout, self.module
        squared = dict.fromkeys(parts, 0.0)
        for name, value in (self._optimizer.squared_norms or {}).items():
            parameter = module.get_parameter(name)
            sharded = getattr(parameter, "tensor_partition_dim", None) is not None
            repeated = getattr(parameter, "ds_pipe_replicated", False) or (layout.tensor_rank > 0 and not sharded)
            part = next(part for part in parts if name.startswith(f"{part}."))
            squared[part] += 0.0 if repeated else float(value)
        sums = torch.tensor(list(squared.values()), dtype=torch.float64).to(layout.device)
        dist.all_reduce(sums, group=layout.world_group)
        return {part: value**0.5 for part, value in zip(parts, sums.tolist(), strict=True) if value > 0}

    @property
    def adamw_steps(self) -> int:
        """Updates that AdamW's moments have seen: saved and restored beside the tensors."""
        return self._optimizer.adamw_steps

    def _tensors(self) -> Iterator[tuple[Partition, str, Tensor]]:
        for _, partition in self._partitions:
            yield partition, PARAMETER, partition.flat.detach()
        for entry in self._optimizer.state_entries():
            yield entry.partition, entry.key, entry.values

    def saved_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name, key, tensor) of the parameters and optimizer state that this rank is to save.

        Each comes whole, shaped like the tensor-parallel shard, on exactly one rank of the data-parallel group. Keys:
        `parameter`, and `exp_avg`, `exp_avg_sq` or `momentum`. A tensor is valid until the next one is asked for. Every
        rank of the data-parallel group must exhaust the iterator: it is collective.
        """
        for partition, key, values in self._tensors():
            for i, tensor in partition.collect(values).items():
                yield partition.specs[i].name, key, tensor

    @torch.no_grad()
    def load_tensors(self, read: Callable[[str, str], Tensor], *, adamw_steps: int) -> None:
        """Replaces weights and optimizer state, bit for bit, by `read(name, key)`: whole tensors as in `saved_tensors`.

        `read` is called once for each name and key of which this rank keeps a piece. Collective over all ranks.
        """
        self._load(read, self._tensors())
        self._optimizer.adamw_steps = adamw_steps

    @torch.no_grad()
    def load_parameters(self, read: Callable[[str], Tensor]) -> None:
        """Replaces the weights alone, and leaves the optimizer state. Collective over all ranks."""
        self._load(lambda name, _: read(name), (entry for entry in self._tensors() if entry[1] == PARAMETER))

    def _load(self, read: Callable[[str, str], Tensor], tensors: Iterator[tuple[Partition, str, Tensor]]) -> None:
        for partition, key, values in tensors:
            for spec, piece in zip(partition.specs, partition.local_pieces, strict=True):
                if piece.numel:
                    source = read(spec.name, key).reshape(-1)[piece.param_start : piece.param_start + piece.numel]
                    values[piece.flat_start : piece.flat_start + piece.numel] = source
        self._publish_weights()

    def _publish_weights(self) -> None:
        """Brings the module's parameters up to the flat fp32 partitions, as DeepSpeed does at the end of a step."""
        zero = self._zero
        if self.stage < 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for i in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:  # small ones, kept whole
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def close(self) -> None:
        """Removes DeepSpeed's hooks from the model and frees its buffers."""
        self._engine.destroy()


def _spec(name: str, shape: torch.Size, parameter: nn.Parameter) -> ParamSpec:
    return ParamSpec(name, shape, getattr(parameter, "tensor_partition_dim", None))


def _reduce_norm_once(zero: Any) -> None:
    """Makes DeepSpeed (stage 1) sum the norm over model-parallel ranks once a step instead of once a parameter group.

    Stages of a pipeline need not have the same groups: one in the middle, of matrices alone, has none of vectors, and
    the others would wait for it in the collective of theirs.
    """
    norm_of_groups = zero.scaled_global_norm

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        group, zero.model_parallel_group = zero.model_parallel_group, None
        try:
            squared = norm_of_groups(norm_type).square()
        finally:
            zero.model_parallel_group = group
        dist.all_reduce(squared, group=group)
        return squared.sqrt()

    zero.scaled_global_norm = scaled_global_norm


def _sum_sequence_parallel_gradients(model: nn.Module, layout: Layout) -> None:
    """Sums the gradients of replicated parameters over tensor-parallel ranks that each saw a part of the sequence.

    A hook on the parameter runs once per backward, on the sum over all its uses (all loops), before ZeRO takes it.
    """
    if not layout.sequence_parallel:
        return

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=layout.tensor_group)
        return gradient

    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(summed)
