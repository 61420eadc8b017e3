"""What each of four processes runs for tests/test_layouts.py. Returns what the tests assert."""

from __future__ import annotations

import numpy as np
import torch

from pretrain.parallel import megatron, zero
from pretrain.parallel.megatron import Layout
from pretrain.sampling import Depths
from tools.check_layouts import CASES, ROWS, Case, tiny_config
from tools.layout_runs import Difference, alone, largest, partition_dims, train

FAMILY = "parcae_flt"
LOOPS = (1, 3, 8, 1)


class LoopsByStep:
    """In place of a DepthSampler: the same count for all rows of a step, four loops of it with gradient."""

    granularity = "batch"

    def draw(self, step: int) -> Depths:
        return Depths.truncated(np.full(ROWS, LOOPS[step]), backprop_loops=4)


def run() -> dict[str, dict[str, float]]:
    """Largest relative differences by case."""
    torch.set_num_threads(1)
    zero.PERSISTENT_ELEMENTS = 20  # so that stage 3 does partition these small models
    single = alone(megatron.initialize(1, 1, False, 120.0))
    report = {"gradients": checkpointing(), "loops": changing_loops(single)}
    megatron.shutdown()
    return report


def layout_of(case: Case) -> Layout:
    return megatron.initialize(case.tensor, case.pipeline, case.sequence_parallel, 120.0)


def policies(case: Case) -> list[str]:
    """Of activation checkpointing, those that the layout does not refuse."""
    return ["none", "loop", "layer", *(["every_k_loops"] if case.pipeline == 1 else [])]


def checkpointing() -> dict[str, float]:
    """Of the first moments after one step, which are the gradients: each policy against none, in the same layout."""
    found = {}
    for case in CASES:
        layout, traces = layout_of(case), {}
        for policy in policies(case):
            cfg = tiny_config(FAMILY, "adamw", "fp32", case, policy)
            cfg.model.init = "normal"  # no gradient is zero in the first step
            traces[policy] = train(cfg, layout, num_steps=1)
            gradients = {name: x for (name, key), x in traces[policy].tensors.items() if key == "exp_avg"}
            assert all(x.any() for x in gradients.values())
            plain = traces["none"].tensors
            differences = [float((x - plain[name, "exp_avg"]).norm() / x.norm()) for name, x in gradients.items()]
            found[f"{case.name}, {policy}"] = largest([0.0, *differences])
    return found


def changing_loops(single: Layout) -> dict[str, float]:
    """Of losses, norms and (over ten) weights from one process: a block looped 1, 3, 8 times in successive steps."""
    sampler, found = LoopsByStep(), {}
    reference = train(tiny_config(FAMILY, "adamw", "fp32", Case("one process")), single, len(LOOPS), sampler)
    for case in (case for case in CASES if case.name.startswith("dp4")):
        layout = layout_of(case)
        for policy in policies(case):
            cfg = tiny_config(FAMILY, "adamw", "fp32", case, policy)
            trace = train(cfg, layout, len(LOOPS), sampler)
            difference = Difference.between(trace, reference, layout, partition_dims(cfg))
            found[f"{case.name}, {policy}"] = largest([difference.loss, difference.norm, difference.weight / 10])
    return found
