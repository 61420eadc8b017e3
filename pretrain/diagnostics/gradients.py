"""What a readout's gradient g = dL/dh says about each direction of the state h.

For a readout with r(a h) = r(h) for all a > 0, <g, h> = 0: the loss cannot see the radius. RMSNorm has that property up
to its eps. With z = w h / sqrt(m + eps), m = mean h^2, and g_z = dL/dz, exactly

    <g_h, h> = <g_z, z> eps / (m + eps)

In fp32 the left side is rounding noise for a normalised readout: measure in fp64.

Shapes: g, h [..., d].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.diagnostics.states import TINY
from pretrain.model.attention_mask import Context
from pretrain.model.looped import LoopedLM
from pretrain.model.loss import head_sums


class Radial(NamedTuple):
    """Over tokens with a gradient."""

    fraction: float
    """Mean |<g, h>| / (||g|| ||h||)."""
    signed: float
    """Mean of the same without the bars: above 0 where a smaller radius would lower the loss."""


class Supervision(NamedTuple):
    """Where the squared gradient lies, as shares of its sum over tokens; and the coordinates that hardly see any."""

    radial: float
    subspace: float
    weak_coordinates: float
    """Share of coordinates with |g_i| / max_j |g_j| below `WEAK`, the mean over tokens: depends on the basis."""


WEAK = 1e-2


def radial_cosine(g: Tensor, h: Tensor) -> Tensor:
    """<g, h> / (||g|| ||h||) per token, in fp64; 0 where either is 0."""
    g, h = g.double(), h.double()
    return (g * h).sum(-1) / (g.norm(dim=-1) * h.norm(dim=-1)).clamp(min=TINY)


def radial(g: Tensor, h: Tensor) -> Radial:
    """The radial gradient fraction and its signed mean."""
    has_gradient = g.ne(0).any(-1)
    if not has_gradient.any():
        return Radial(0.0, 0.0)
    cosine = radial_cosine(g, h)[has_gradient]
    return Radial(float(cosine.abs().mean()), float(cosine.mean()))


def normalised_radial_fraction(g_z: Tensor, z: Tensor, g_h: Tensor, h: Tensor, eps: float) -> Tensor:
    """|<g_z, z>| eps / (m + eps) / (||g_h|| ||h||) per token: the exact fraction of a readout RMSNorm(h) = z."""
    g_z, z, g_h, h = g_z.double(), z.double(), g_h.double(), h.double()
    shrinkage = eps / (h.square().mean(-1) + eps)
    return (g_z * z).sum(-1).abs() * shrinkage / (g_h.norm(dim=-1) * h.norm(dim=-1)).clamp(min=TINY)


def supervision(g: Tensor, h: Tensor, basis: Tensor) -> Supervision:
    """Shares of the radial direction and of the span of `basis` (orthonormal [d, k])."""
    g, h = g.double(), h.double()
    total = g.square().sum().clamp(min=TINY)
    size = g.abs()
    seen = size.amax(-1, keepdim=True)
    weak = (size < WEAK * seen)[seen[..., 0] > 0].double().mean()
    along = radial_cosine(g, h) * g.norm(dim=-1)
    return Supervision(
        radial=float(along.square().sum() / total),
        subspace=float((g @ basis.double()).square().sum() / total),
        weak_coordinates=float(weak.nan_to_num()),
    )


def readout_gradient(
    model: LoopedLM, h: Tensor, ctx: Context, tokens: Tensor, labels: Tensor, last: bool
) -> tuple[Tensor, Tensor]:
    """(sum of the tokens' cross entropies, its gradient [B, s, d_h]) by the readout of one state h, and by it alone.

    `last` as in LoopedLM.decode. Computed in the type of `h`, which must be the model's compute type. The gradient is
    that of the sum, so without a coda each token's part is its own loss's. Collective over tensor-parallel ranks.
    """
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        y = model.decode(h, ctx, model.look_up_values("coda", tokens), last=last)
        y = model.ops.enter(y).flatten(0, 1)
        sums = model.vocabulary_head(head_sums, y, labels.flatten(), None, model.head_settings(), model.ops)
        (gradient,) = torch.autograd.grad(sums.cross_entropy, h)
    return sums.cross_entropy.detach(), gradient
