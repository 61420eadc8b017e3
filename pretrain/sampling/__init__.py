"""How often each row of a global batch runs the core, and in which order (numpy only).

    distributions.py   the law of the loop count T, and the ramp of its mean
    placement.py       random numbers by counter; which position of the batch gets which quantile
    sampler.py         DepthSampler: (seed, step) -> Depths of the global batch, equal on every rank
    plan.py            micro-batches in order of depth, and the LoopPlan of one micro-batch

Symbols of the papers: T = `num_loops`, n = `no_grad_loops`, k = `grad_loops`, mu = `mean_loops`,
mu_b = `backprop_loops`.
"""

from pretrain.sampling.plan import (
    LoopPlan,
    LoopStep,
    form_micro_batches,
    lockstep_loops,
    straggler_loss,
)
from pretrain.sampling.sampler import GRAD_LOOP_COST, Depths, DepthSampler

__all__ = [
    "GRAD_LOOP_COST",
    "DepthSampler",
    "Depths",
    "LoopPlan",
    "LoopStep",
    "form_micro_batches",
    "lockstep_loops",
    "straggler_loss",
]
