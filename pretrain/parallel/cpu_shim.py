"""Lets megatron-core run on CPU and gloo. Not used where CUDA is available.

megatron-core assumes CUDA in four ways: buffers on `torch.cuda.current_device()` (mappings, point-to-point receives),
`.cuda()` and `torch.cuda.synchronize()`, the literal `device="cuda"` in its pipeline schedules, and the CUDA generator
in its random state tracker. Each is answered where it is looked up. A process-wide `TorchFunctionMode` would also do,
but it is per thread (backward may run in another) and taxes every torch call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class _TorchOnCpu(ModuleType):
    """`torch` as one megatron-core module sees it: everything as usual, but `zeros` lands on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, **{**kwargs, "device": "cpu"})


def _stay(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def install(*, schedules: bool) -> None:
    """Answers megatron-core's CUDA calls on the CPU, for the whole process; does nothing where CUDA is available.

    `schedules`: also the pipeline schedules, whose import is slow.
    """
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random as tracker

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = _nothing
    torch.Tensor.cuda = _stay  # type: ignore[assignment, method-assign]
    # torch.manual_seed itself calls torch.cuda.manual_seed: only the generator's method does not recurse.
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.set_rng_state = _set_rng_state  # type: ignore[assignment]
    tracker._get_cuda_rng_state = _get_rng_state
    tracker._set_cuda_rng_state = _set_rng_state
    if schedules:
        from megatron.core.pipeline_parallel import schedules as pipeline_schedules

        pipeline_schedules.torch = _TorchOnCpu("torch")
