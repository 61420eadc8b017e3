"""Initial weights: a function of (seed, parameter name), so every layout starts from the same model.

scaled_zero (Parcae): std = sqrt(2 / (5 d)); matrices truncated-orthogonal with gain std * sqrt(max(rows, cols)); output
projections of attention and MLP zero; A_log 0, Abar sqrt(1/5), B identity, C orthogonal * sqrt(2/5).
scaled (RDM, Huginn's "takase" rule): truncated normal with that std; output projections sqrt(1 / (5 d L)).
normal: N(0, 0.02^2); output projections divided by sqrt(2 L). L counts layers with the mean number of loops, so that
the stream's scale at the start does not depend on how often the core is looped.
uniform: torch's defaults, which the blind-spot code leaves as they are: U(+-1 / sqrt(fan_in)) for every matrix, N(0, 1)
for the tables of tokens and positions.
"""

from __future__ import annotations

import hashlib
import math
from typing import cast

import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.model.layers import ModelParameter
from pretrain.model.ops import TensorOps, shard
from pretrain.model.state import embedding_std


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _truncated_normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-3 * std, b=3 * std, generator=generator)


def _uniform(shape: torch.Size, fan_in: int, generator: torch.Generator) -> Tensor:
    """torch's default of nn.Linear."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _orthogonal(shape: torch.Size, gain: float, generator: torch.Generator) -> Tensor:
    """Rows or columns orthonormal times gain, from a truncated normal draw."""
    draw = _truncated_normal(shape, 1.0, generator)
    tall = draw if shape[0] >= shape[1] else draw.T
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal().sign()  # makes the distribution uniform over orthogonal matrices
    return gain * (q if shape[0] >= shape[1] else q.T)


def _draw(name: str, shape: torch.Size, cfg: ModelConfig, generator: torch.Generator) -> Tensor:
    part = name.split(".")[0]
    width = cfg.width_of("core" if part in ("core", "injection") else part)
    std = math.sqrt(2 / (5 * width))
    is_head = name == "head.weight" or "loop_heads" in name
    if name in ("embedding.weight", "position_embedding.weight") or (is_head and cfg.init != "uniform"):
        return torch.randn(shape, generator=generator) * embedding_std(cfg)
    if name.startswith("auxiliary.") and not is_head:
        return torch.zeros(shape)  # predict the state itself; leave at every loop with the same probability
    if "value_table" in name:
        return torch.randn(shape, generator=generator)
    if "value_gate" in name:
        return _uniform(shape, shape[1], generator)
    if name == "injection.input.B.weight":
        return torch.eye(shape[0]) if shape[0] == shape[1] else _orthogonal(shape, 1.0, generator)
    if name == "output_projection.weight":
        return _orthogonal(shape, math.sqrt(2 / 5), generator)
    if cfg.init == "uniform":
        concatenated = name.startswith("injection.")  # one matrix that reads [h; e]
        return _uniform(shape, cfg.width_of("core") + cfg.width if concatenated else shape[1], generator)
    if name.startswith("injection."):
        return _truncated_normal(shape, std, generator)
    is_output = name.endswith(("attention.output.weight", "mlp.down.weight"))
    layers = cfg.effective_layers(cfg.recurrence.mean_loops)
    if cfg.init == "scaled_zero":
        return torch.zeros(shape) if is_output else _orthogonal(shape, std * math.sqrt(max(shape)), generator)
    if cfg.init == "scaled":
        return _truncated_normal(shape, math.sqrt(1 / (5 * width * layers)) if is_output else std, generator)
    return torch.randn(shape, generator=generator) * (0.02 / math.sqrt(2 * layers) if is_output else 0.02)


@torch.no_grad()
def init_parameters(model: nn.Module, cfg: ModelConfig, seed: int, ops: TensorOps) -> None:
    """Fills every matrix of `model` (this rank's shard of it); vectors keep the values their modules gave them."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith(("query_bias", "key_bias")):
            continue
        shape = list(parameter.shape)
        dim = cast(ModelParameter, parameter).tensor_partition_dim
        if dim is not None:
            shape[dim] *= ops.size
        full = _draw(name, torch.Size(shape), cfg, _generator(seed, name))
        parameter.copy_(shard(full, dim, ops))
