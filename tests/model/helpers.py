"""Training batches for the tests of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.config.schema import LossConfig
from pretrain.model.attention_mask import make_context
from pretrain.model.batch import Loops, MicroBatch
from pretrain.model.counter import StateKey
from pretrain.model.looped import LoopedLM, LoopInputs
from pretrain.model.loss import Totals
from pretrain.model.objective import LossOutput
from pretrain.sampling import Depths, LoopPlan


def make_batch(
    tokens: Tensor,
    labels: Tensor,
    no_grad: Sequence[int] | NDArray[np.int64],
    grad: Sequence[int] | NDArray[np.int64],
    state: Tensor | None = None,
    **options: int,
) -> tuple[MicroBatch, Loops, Tensor]:
    """(rows in descending order of loop counts, their loops, the order); counts per row [B] or per token [B, S].

    `options` as of LoopPlan.from_depths.
    """
    depths = Depths(np.asarray(no_grad), np.asarray(grad))
    per_token = depths.grad_loops.ndim == 2
    rows = Depths(depths.no_grad_loops.max(1), depths.grad_loops.max(1)) if per_token else depths
    plan = LoopPlan.from_depths(rows, **options)
    order = torch.from_numpy(plan.order)
    batch = MicroBatch(tokens[order], labels[order], order, initial_state=None if state is None else state[order])
    return batch, Loops.of(plan, depths), order


def train_loss(model: LoopedLM, batch: MicroBatch, loops: Loops, cfg: LossConfig | None = None) -> LossOutput:
    """The loss with this micro-batch as the global batch, and its gradients in the parameters."""
    model.zero_grad(set_to_none=True)
    totals = Totals(float((batch.labels >= 0).sum()), float(len(batch.rows)))
    output = model.training_loss(batch, loops, StateKey(seed=1, step=0, rows=batch.rows), cfg or LossConfig(), totals)
    output.loss.backward()
    return output


def train_states(model: LoopedLM, batch: MicroBatch, loops: Loops) -> list[Tensor]:
    """States after each gradient loop, as the training forward makes them."""
    ctx = model.context_of(batch, None)
    e, h_0 = model.start(batch, ctx, StateKey(1, 0, batch.rows))
    inputs = LoopInputs(model.injection.input(e), ctx, model.look_up_values("core", batch.tokens))
    return list(model.run_loops(h_0, inputs, loops))


def state_logits(model: LoopedLM, tokens: Tensor, state: Tensor, last: bool = True) -> Tensor:
    """fp32 logits [B, S, vocab_size] read out from a state."""
    ctx = make_context(model.cfg, tokens.shape[1], tokens.device, model.compute_dtype)
    return model.readout_logits(model.decode(state, ctx, model.look_up_values("coda", tokens), last=last))
