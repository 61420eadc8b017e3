"""Muon's orthogonalisation of a matrix: five polar-express iterations instead of an SVD.

Sources: Muon, K. Jordan 2024 (update scale sqrt(max(1, rows / columns))); polar express, Amsel et al. 2025,
arXiv 2505.16932, Algorithm 1. The per-row or per-column variance normalisation of NorMuon is left out.
"""

from __future__ import annotations

import math
from itertools import chain, islice, repeat

import torch
import torch.distributed as dist

# (a, b, c) of p(X) = a X + b X X^T X + c X X^T X X^T X, one triple per iteration, from Algorithm 1 of the paper, where
# all but the limit are divided by (1.01, 1.01^3, 1.01^5) against rounding that lifts a singular value above 1.
_SAFETY = 1.01
_COEFFICIENTS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_LIMIT = (1.875, -1.25, 0.375)


def polar_express(matrix: torch.Tensor, num_steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Approximately U V^T of `matrix` = U S V^T, [rows, columns], in `matrix`'s type; the iterations run in `dtype`.

    A zero matrix stays zero.
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = (x / (x.norm() * _SAFETY + 1e-7)).to(dtype)
    safe = ((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _COEFFICIENTS)
    for a, b, c in islice(chain(safe, repeat(_LIMIT)), num_steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def muon_direction(
    matrix: torch.Tensor,
    num_steps: int,
    dtype: torch.dtype,
    tensor_dim: int | None,
    tensor_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Orthogonalised and scaled update for `matrix` (momentum, or Nesterov's look-ahead), shaped like it.

    A tensor-parallel shard along `tensor_dim` is orthogonalised as the whole matrix: gathered, and its slice returned.
    Collective over `tensor_group` in that case.
    """
    if tensor_dim is None or tensor_group is None or dist.get_world_size(tensor_group) == 1:
        return polar_express(matrix, num_steps, dtype) * update_scale(matrix.shape)
    shards = [torch.empty_like(matrix) for _ in range(dist.get_world_size(tensor_group))]
    dist.all_gather(shards, matrix.contiguous(), group=tensor_group)
    whole = torch.cat(shards, tensor_dim)
    direction = polar_express(whole, num_steps, dtype) * update_scale(whole.shape)
    return direction.chunk(len(shards), tensor_dim)[dist.get_rank(tensor_group)]


def update_scale(shape: torch.Size) -> float:
    """sqrt(max(1, rows / columns)) of a whole matrix, which multiplies its learning rate: update and weight decay."""
    return math.sqrt(max(1.0, shape[0] / shape[1]))
