"""AdamW, or Muon for the layers' matrices and AdamW for the rest, on ZeRO's flat partitions.

DeepSpeed calls `step` once per flat partition, with gradients that are reduced and otherwise raw. Its own Muon
(deepspeed.runtime.zero.muon, 0.19.8) is not used. That one replaces gradients by updates while it partitions them, so
that the norm, the non-finite test and clipping see the update; it keeps momentum in buffers that do not line up with
the partition, so that no tool can save it by name; at stage 3 it gives up reduce-scatter; it orthogonalises each
tensor-parallel shard by itself. Here Muon is an ordinary optimizer step: momentum is element-wise on the partition,
matrices are brought together on one data-parallel rank each (which also shares out the work), orthogonalised, and
returned. One path serves stages 1, 2, 3, tensor and pipeline parallelism.

DeepSpeed recognises its Muon by "muon" in the class name and by `use_muon` on parameters: hence the class name below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pretrain.config.schema import OptimizerConfig
from pretrain.parallel.muon import muon_direction, update_scale
from pretrain.parallel.partition import Partition
from pretrain.parallel.schedule import Hyperparameters

_STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: "muon" (optimizer.name=muon and `use_muon`), else "adamw".

    Under AdamW alone the layers' matrices (`use_muon`) form a group of their own where weight_decay > 0, and only they
    are decayed.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if getattr(p, "use_muon", False)]
    assert all(p.ndim == 2 for p in matrices), "use_muon marks matrices"
    others = [p for p in trainable if not getattr(p, "use_muon", False)]
    if config.name == "muon":
        groups = [_group("muon", matrices), _group("adamw", others)]
    elif config.weight_decay > 0:
        groups = [_group("adamw", matrices, config.weight_decay), _group("adamw", others)]
    else:
        groups = [_group("adamw", trainable)]
    return [group for group in groups if group["params"]]


def _group(kind: str, params: list[nn.Parameter], weight_decay: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "params": params, "lr": 0.0, "momentum": 0.0, "weight_decay": weight_decay}


@dataclass(frozen=True)
class StateEntry:
    """One optimizer state tensor of a partition, shaped like its `flat`."""

    partition: Partition
    key: str
    values: Tensor


class PartitionedOptimizer(torch.optim.Optimizer):
    """The client optimizer that DeepSpeed drives. Hyperparameters of a step are set by `set_hyperparameters`."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        orthogonalise_in: torch.dtype,
        tensor_group: dist.ProcessGroup,
        gradient_norm: Callable[[], Tensor],
    ) -> None:
        """`gradient_norm`: norm of the raw gradient of all parameters in the step that is under way."""
        super().__init__(parameter_groups(model, config), defaults={})
        self._config = config
        self._orthogonalise_in = orthogonalise_in
        self._tensor_group = tensor_group
        self._partitions: dict[Tensor, Partition] = {}
        self._gradient_norm = gradient_norm
        self.squared_norms: dict[str, Tensor] | None = None
        """Where not None, `step` adds each parameter's squared gradient norm, of this rank's piece, under its name."""
        self.discard = False
        """Whether `step` leaves weights and state as they are."""

    def bind(self, partitions: Sequence[tuple[str, Partition]]) -> None:
        """Takes the partitions (kind, partition) that DeepSpeed has made, and creates their zero state."""
        for kind, partition in partitions:
            flat = partition.flat
            self._partitions[flat] = partition
            self.state[flat] = {key: torch.zeros_like(flat, requires_grad=False) for key in _STATE_KEYS[kind]}
            if kind == "adamw":
                self.state[flat]["step"] = torch.zeros((), device=flat.device)

    def set_hyperparameters(self, values: Hyperparameters) -> None:
        """Sets what the next step uses."""
        for group in self.param_groups:
            if group["kind"] == "muon":
                group.update(lr=values.muon_lr, momentum=values.muon_momentum, weight_decay=values.muon_weight_decay)
            else:
                group["lr"] = values.lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the partitions that stand in `param_groups` from their `grad`, which it may overwrite.

        Collective over the data-parallel group (and the tensor-parallel one) for Muon's partitions.
        """
        for group in [] if self.discard else self.param_groups:
            update = self._muon if group["kind"] == "muon" else self._adamw
            for flat in group["params"]:
                if self.squared_norms is not None:
                    self._measure(self.squared_norms, self._partitions[flat], flat.grad)
                update(group, flat, flat.grad)

    @staticmethod
    def _measure(norms: dict[str, Tensor], partition: Partition, gradient: Tensor) -> None:
        for spec, piece in zip(partition.specs, partition.local_pieces, strict=True):
            own = gradient[piece.flat_start : piece.flat_start + piece.numel]
            norms[spec.name] = own.square().sum(dtype=torch.float64)

    def _adamw(self, group: dict[str, Any], flat: Tensor, gradient: Tensor) -> None:
        state, config = self.state[flat], self._config
        if config.clip_norm is not None:
            gradient.mul_((config.clip_norm / (self._gradient_norm() + 1e-6)).clamp(max=1.0))
        adamw(
            [flat], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            fused=True, amsgrad=False, maximize=False, beta1=config.betas[0], beta2=config.betas[1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=config.eps,
        )  # fmt: skip

    def _muon(self, group: dict[str, Any], flat: Tensor, update: Tensor) -> None:
        partition, momentum = self._partitions[flat], self.state[flat]["momentum"]
        momentum.lerp_(update, 1.0 - group["momentum"])
        update.lerp_(momentum, group["momentum"])  # Nesterov
        directions = {
            i: muon_direction(
                matrix, self._config.muon_steps, self._orthogonalise_in,
                partition.specs[i].tensor_dim, self._tensor_group,
            )
            for i, matrix in partition.collect(update).items()
        }  # fmt: skip
        partition.distribute(directions, update)
        # Cautious weight decay (arXiv 2510.12402): only where the update shrinks the weight too. As in Parcae's code a
        # matrix has one learning rate, scaled by its shape, for update and decay.
        decay = (update * flat >= 0).to(flat.dtype).mul_(flat).mul_(group["weight_decay"])
        tensor_size = dist.get_world_size(self._tensor_group)
        for spec, piece in zip(partition.specs, partition.local_pieces, strict=True):
            decay[piece.flat_start : piece.flat_start + piece.numel] *= update_scale(spec.whole_shape(tensor_size))
        flat.sub_(update.add_(decay), alpha=group["lr"])

    def state_entries(self) -> Iterator[StateEntry]:
        """Every state tensor, in the same order on all ranks."""
        for flat, partition in self._partitions.items():
            for key, values in self.state[flat].items():
                if key != "step":
                    yield StateEntry(partition, key, values)

    @property
    def adamw_steps(self) -> int:
        """Updates that AdamW's moments have seen (skipped steps do not count); 0 without AdamW parameters."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    @adamw_steps.setter
    def adamw_steps(self, value: int) -> None:
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(value)
