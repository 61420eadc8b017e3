"""What each of four processes runs for tests/test_token_layouts.py: loop counts of tokens in layouts."""

from __future__ import annotations

import torch

from pretrain.config.loss import LossConfig
from pretrain.config.model import AuxiliaryConfig
from pretrain.config.schema import Config
from pretrain.parallel import megatron, zero
from tools.check_layouts import Case, tiny_config
from tools.layout_runs import Difference, alone, largest, partition_dims, train

NUM_STEPS = 2
CASES = (
    Case("dp4 ZeRO-2", stage=2, micro_batch_size=2),
    Case("dp4 ZeRO-3", stage=3, micro_batch_size=2),
    Case("tp2xdp2 ZeRO-3", tensor=2, stage=3, micro_batch_size=4),
    Case("tp2xdp2 sequence parallel", tensor=2, sequence_parallel=True, micro_batch_size=4),
)
# Terms that look at pairs of loops, at loops counted from the end, and at every loop.
LOSSES = {
    "last third": LossConfig(objective="last_third", loop_heads=0.3, norm_penalty=0.1, state_prediction=0.5),
    "per loop": LossConfig(objective="per_loop", loop_heads=0.3, scale_anchor=0.1, subspace_penalty=0.2),
}


def config(case: Case, loss: LossConfig) -> Config:
    cfg = tiny_config("parcae_flt", "adamw", "fp32", case, "loop")
    cfg.model.recurrence.granularity = "token"
    cfg.model.recurrence.max_loops, cfg.model.recurrence.backprop_loops = None, 4
    cfg.model.recurrence.distribution, cfg.model.recurrence.mean_loops = "uniform", 3
    cfg.model.auxiliary = AuxiliaryConfig(loop_heads=1, state_predictor=loss.state_prediction > 0)
    cfg.loss = loss
    return cfg


def run() -> dict[str, float]:
    """Largest relative differences of losses, gradient norms and (over ten) weights from one process, by case."""
    torch.set_num_threads(1)
    zero.PERSISTENT_ELEMENTS = 20  # so that stage 3 does partition these small models
    single, found = alone(megatron.initialize(1, 1, False, 120.0)), {}
    for name, loss in LOSSES.items():
        reference = train(config(Case("one process"), loss), single, NUM_STEPS)
        for case in CASES:
            layout, cfg = megatron.initialize(case.tensor, 1, case.sequence_parallel, 120.0), config(case, loss)
            difference = Difference.between(train(cfg, layout, NUM_STEPS), reference, layout, partition_dims(cfg))
            found[f"{case.name}, {name}"] = largest([difference.loss, difference.norm, difference.weight / 10])
    megatron.shutdown()
    return found
