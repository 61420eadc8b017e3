"""Exact parameter counts, FLOPs and utilisation, from the configuration alone (stdlib; formulas in docs/accounting.md).

Conventions: a product with a matrix of N parameters costs 2 N per token forward and 4 N backward; attention 4 d S
forward and 8 d S backward per layer and token, halved for causality in everything reported; look-ups and elementwise
work cost nothing. Model FLOPs (MFU) are what the mathematics needs; hardware FLOPs (HFU) add what activation
checkpointing runs again. A row is one sequence of `context_length` tokens.

Symbols: d width, f MLP width, V vocabulary, S sequence, T loops, n and k loops without and with gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pretrain.config.model import ModelConfig
from pretrain.config.schema import Config

Use = Literal["product", "lookup", "elementwise"]

# ------------------------------------------------------------------------------------------------------- parameters


class Parameter(NamedTuple):
    """One parameter of the model, without its values."""

    shape: tuple[int, ...]
    use: Use = "elementwise"
    """product: multiplied with every token; lookup: a row is taken; elementwise: scales, biases, decays."""
    partition_dim: int | None = None
    """Dimension that tensor parallelism shards. None: replicated."""
    muon: bool = False
    """A layer's matrix, which Muon orthogonalises where optimizer.name=muon."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


def parameter_table(cfg: ModelConfig) -> dict[str, Parameter]:
    """Every parameter of `LoopedLM(cfg)` by its name, in no layout (tensor = pipeline = 1)."""
    recurrence, width, core_width = cfg.recurrence, cfg.width, cfg.width_of("core")
    vocab = cfg.padded_vocab_size
    table = {"embedding.weight": Parameter((vocab, width), "lookup", 0)}
    if cfg.positions == "learned":
        table["position_embedding.weight"] = Parameter((cfg.context_length, width), "lookup")
    for part, num_layers in (("prelude", cfg.prelude_layers), ("core", cfg.core_layers), ("coda", cfg.coda_layers)):
        for index in range(num_layers):
            table |= {f"{part}.{index}.{name}": p for name, p in _layer(cfg, part, index).items()}
    if recurrence.prelude_norm:
        table |= _norm(cfg, "prelude_norm", width)
    table |= {f"injection.{name}": p for name, p in _injection(cfg).items()}
    if recurrence.output_projection:
        table["output_projection.weight"] = Parameter((width, core_width), "product")
    if recurrence.readout != "raw" or cfg.norm_before_coda:
        table |= _norm(cfg, "final_norm", width)
    if not cfg.tie_embeddings:
        table["head.weight"] = Parameter((vocab, width), "product", 0)
    return table | {f"auxiliary.{name}": p for name, p in _auxiliary(cfg).items()}


def _auxiliary(cfg: ModelConfig) -> dict[str, Parameter]:
    width, auxiliary = cfg.width_of("core"), cfg.auxiliary
    table: dict[str, Parameter] = {}
    if auxiliary.state_predictor:
        table["state_predictor.weight"] = Parameter((width, width), "product")
    if auxiliary.exit_gate:
        table |= {"exit_gate.weight": Parameter((1, width), "product"), "exit_gate.bias": Parameter((1,))}
    for head in range(auxiliary.loop_heads):
        table |= _norm(cfg, f"loop_heads.{head}.norm", width)
        table[f"loop_heads.{head}.weight"] = Parameter((cfg.padded_vocab_size, width), "product", 0)
    return table


def _norm(cfg: ModelConfig, name: str, width: int) -> dict[str, Parameter]:
    return {f"{name}.weight": Parameter((width,))} if cfg.norm_weight else {}


def _layer(cfg: ModelConfig, part: str, index: int) -> dict[str, Parameter]:
    width, ffn_width = cfg.width_of(part), cfg.ffn_width_of(part)
    heads, kv_heads, channels = cfg.heads_of(part), cfg.kv_heads_of(part), cfg.head_channels

    def column(out_width: int) -> Parameter:
        return Parameter((out_width, width), "product", 0, muon=True)

    def row(in_width: int) -> Parameter:
        return Parameter((width, in_width), "product", 1, muon=True)

    layer = {
        "attention.query.weight": column(heads * channels),
        "attention.key.weight": column(kv_heads * channels),
        "attention.value.weight": column(kv_heads * channels),
        "attention.output.weight": row(heads * channels),
        "mlp.up.weight": column(ffn_width),
        "mlp.down.weight": row(ffn_width),
    }
    if cfg.mlp == "swiglu":
        layer["mlp.gate.weight"] = column(ffn_width)
    if cfg.qk_bias:
        layer["attention.query_bias"] = Parameter((heads, channels), partition_dim=0)
        layer["attention.key_bias"] = Parameter((kv_heads, channels), partition_dim=0)
    if cfg.has_value_embedding(part, index):
        layer["attention.value_table.weight"] = Parameter((cfg.padded_vocab_size, kv_heads * channels), "lookup", 1)
        layer["attention.value_gate.weight"] = Parameter((kv_heads, cfg.value_gate_channels), "product", 0)
    norms = ["attention_norm", "mlp_norm"]
    if cfg.block == "sandwich":
        norms += ["attention_post_norm", "mlp_post_norm"]
    if part == "core" and cfg.recurrence.feedback == "residual":
        norms.append("feedback_norm")
    for name in norms:
        layer |= _norm(cfg, name, width)
    return layer


def _injection(cfg: ModelConfig) -> dict[str, Parameter]:
    recurrence, width, core_width = cfg.recurrence, cfg.width, cfg.width_of("core")
    table: dict[str, Parameter] = {}
    if recurrence.injection == "diagonal":
        table["input.A_log"] = table["input.dt_bias"] = Parameter((core_width,))
        table["input.B.weight"] = Parameter((core_width, width), "product")
    elif recurrence.injection == "concat":
        table["input.weight"] = Parameter((core_width, width), "product")
        table["state.weight"] = Parameter((core_width, core_width), "product")
    elif recurrence.injection == "input":
        table |= _norm(cfg, "norm", core_width)
    if recurrence.interloop_norm:
        table |= _norm(cfg, "interloop_norm", core_width)
    return table


PARTS = (
    "embedding", "value_tables", "prelude", "injection", "core", "output_projection", "coda", "norms", "head",
    "auxiliary",
)  # fmt: skip


def part_of(name: str) -> str:
    """The part of `PARTS` that a parameter is counted in; norms are those outside layers and injection."""
    if name.endswith("value_table.weight"):
        return "value_tables"
    first = name.split(".")[0]
    return {"position_embedding": "embedding", "prelude_norm": "norms", "final_norm": "norms"}.get(first, first)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters as stored and as used."""

    parts: dict[str, int]
    """By part, in the order of `PARTS`; a part that the model lacks has 0."""

    @property
    def stored(self) -> int:
        """Every parameter once; a tied table counts as embedding."""
        return sum(self.parts.values())

    @property
    def recurrent(self) -> int:
        """Parameters that every loop applies: core and injection without the value tables."""
        return self.parts["core"] + self.parts["injection"]

    def effective(self, num_loops: float) -> float:
        """Parameters of the model unrolled over `num_loops` loops (N_once + T N_rec in arXiv 2604.21106)."""
        return self.stored + (num_loops - 1) * self.recurrent


def count_parameters(cfg: ModelConfig) -> ParameterCount:
    """Exact counts of `LoopedLM(cfg)`, padded vocabulary rows included."""
    parts = dict.fromkeys(PARTS, 0)
    for name, parameter in parameter_table(cfg).items():
        parts[part_of(name)] += parameter.numel
    return ParameterCount(parts)


# ------------------------------------------------------------------------------------------------------------ FLOPs


class TokenFlops(NamedTuple):
    """Forward FLOPs per token of the three pieces of a forward pass. A backward costs twice the forward."""

    encode: float
    """Prelude and the loop-invariant drive of the injection: once per row."""
    loop: float
    """Core and what the injection does to the state: once per loop."""
    readout: float
    """C, coda and head: once per readout."""


@dataclass(frozen=True)
class StepWork:
    """What some rows run, summed over them: one step of the global batch, or a micro-batch."""

    rows: float
    no_grad_loops: float
    """Row passes through the core without gradient, the sum of n."""
    grad_loops: float
    """Row passes through the core with gradient, the sum of k."""
    readouts: float
    """Rows that pass C, coda and head: one per row (terminal), or one per gradient loop that has a loss."""
    auxiliary: float = 0.0
    """Forward FLOPs per token of the auxiliary losses, summed over rows: `auxiliary_flops`."""

    @classmethod
    def of(
        cls, no_grad_loops: Iterable[int], grad_loops: Iterable[int], objective: str, auxiliary: float = 0.0, *,
        per_token: bool = False,
    ) -> StepWork:  # fmt: skip
        """Of rows with these n and k (`per_token`: of their deepest tokens), trained with `loss.objective`."""
        no_grad, grad = list(no_grad_loops), list(grad_loops)
        readouts = sum(readouts_per_row(k, objective, per_token) for k in grad)
        return cls(len(grad), sum(no_grad), sum(grad), readouts, auxiliary)


def readouts_per_row(grad_loops: int, objective: str, per_token: bool = False) -> int:
    """Readouts with a loss of a row with k gradient loops: 1, k, or the last third of them.

    `per_token`: its tokens have k loops and fewer, and their last thirds together are all readouts but the first two.
    """
    last_third = max(1, grad_loops - 2) if per_token else grad_loops - 2 * grad_loops // 3
    return {"terminal": 1, "per_loop": grad_loops, "exit_weighted": grad_loops, "last_third": last_third}[objective]


def auxiliary_flops(cfg: Config, grad_loops: Iterable[int]) -> float:
    """Forward FLOPs per token of the auxiliary losses, summed over rows with these k.

    The eigenvectors of the subspace penalty (once per step, d_h^3) are left out.
    """
    model, loss, width = cfg.model, cfg.loss, cfg.model.width_of("core")
    anchors, total = min(loss.contrastive_tokens, model.context_length), 0.0
    for k in grad_loops:
        if loss.state_prediction:
            total += max(k - loss.state_prediction_loops, 0) * 2 * width**2
        if loss.contrastive:
            total += max(k - 1, 0) * 2 * anchors**2 * width / model.context_length
        if loss.subspace_penalty:
            total += k * 2 * width * loss.subspace_rank
        if loss.loop_heads:
            total += min(model.auxiliary.loop_heads, max(k - 1, 0)) * 2 * model.vocab_size * width
        if loss.objective == "exit_weighted":
            total += k * 2 * width
    return total


def forward_flops(cfg: ModelConfig, *, halve_attention: bool = True) -> TokenFlops:
    """Mean forward FLOPs per token of a row; `halve_attention` False counts keys that the causal mask hides."""
    table = parameter_table(cfg)
    head = 2 * cfg.vocab_size * cfg.width  # rows of the padding are not multiplied

    def products(*prefixes: str) -> int:
        return 2 * sum(p.numel for name, p in table.items() if p.use == "product" and name.startswith(prefixes))

    def attention(part: str, num_layers: int) -> float:
        return sum(_attention_flops(cfg, part, index, halve_attention) for index in range(num_layers))

    return TokenFlops(
        encode=products("prelude.", "injection.input.") + attention("prelude", cfg.prelude_layers),
        loop=products("core.", "injection.state.") + attention("core", cfg.core_layers),
        readout=products("output_projection.", "coda.") + attention("coda", cfg.coda_layers) + head,
    )


def _attention_flops(cfg: ModelConfig, part: str, index: int, halve: bool) -> float:
    """4 d keys: scores and weighted values, with the mean number of keys that a query of the row sees."""
    length = cfg.context_length
    keys: float = length
    if halve:
        window = min(cfg.window_of(part, index) or length, length)
        keys = window * (1 - window / (2 * length))  # S/2 for full causal attention
    return 4 * cfg.heads_of(part) * cfg.head_channels * keys


def model_flops(cfg: ModelConfig, work: StepWork, *, halve_attention: bool = True) -> float:
    """Model FLOPs of forward and backward over all rows of `work`; loops without gradient count forward only."""
    flops = forward_flops(cfg, halve_attention=halve_attention)
    passes = 3 * work.rows * flops.encode + 3 * work.readouts * flops.readout
    passes += (work.no_grad_loops + 3 * work.grad_loops) * flops.loop + 3 * work.auxiliary
    return passes * cfg.context_length


def hardware_flops(cfg: Config, work: StepWork, *, halve_attention: bool = True) -> float:
    """Model FLOPs of `work` plus what backward runs again. Give it the row passes executed, idle ones included."""
    model = model_flops(cfg.model, work, halve_attention=halve_attention)
    return model + recomputed_flops(cfg, work, halve_attention=halve_attention)


def recomputed_flops(cfg: Config, work: StepWork, *, halve_attention: bool = True) -> float:
    """Forward FLOPs that run a second time: checkpointed loops or layers, the chunked head's logits, and in a pipeline
    the prelude, which both of its phases need.

    A recomputation stops at the last tensor that backward needs, so in pre-norm layers without dropout it leaves out
    the product that ends the checkpointed piece, W_down.
    """
    model, train = cfg.model, cfg.train
    flops = forward_flops(model, halve_attention=halve_attention)
    stops_early = model.block == "pre" and model.dropout == 0

    def without_end(flops_of_layers: float, part: str, num_ends: float) -> float:
        skipped = 2 * model.width_of(part) * model.ffn_width_of(part) if stops_early else 0
        return flops_of_layers - num_ends * skipped

    again: float = 0
    if train.activation_checkpointing in ("loop", "every_k_loops"):
        loops = 1 if train.activation_checkpointing == "loop" else train.checkpoint_every_loops
        again = work.grad_loops * without_end(flops.loop, "core", 1 / loops)
    elif train.activation_checkpointing == "layer":
        layers = _layers_alone(model, flops)
        again = work.rows * without_end(layers.encode, "prelude", model.prelude_layers)
        again += work.grad_loops * without_end(layers.loop, "core", model.core_layers)
        again += work.readouts * without_end(layers.readout, "coda", model.coda_layers)
    if recomputes_head(cfg):
        again += work.readouts * 2 * model.vocab_size * model.width
    if cfg.parallel.pipeline > 1 and work.no_grad_loops > 0:
        again += work.rows * flops.encode
    return again * model.context_length


def _layers_alone(cfg: ModelConfig, flops: TokenFlops) -> TokenFlops:
    """The share of prelude, core and coda layers in `flops`: without injection, C and head."""
    width, core_width = cfg.width, cfg.width_of("core")
    drive = 2 * width * core_width if cfg.recurrence.injection in ("diagonal", "concat") else 0
    state = 2 * core_width**2 if cfg.recurrence.injection == "concat" else 0
    projection = 2 * width * core_width if cfg.recurrence.output_projection else 0
    head = 2 * cfg.vocab_size * width
    return TokenFlops(flops.encode - drive, flops.loop - state, flops.readout - projection - head)


def recomputes_head(cfg: Config) -> bool:
    """Whether backward forms the logits again; the fused cross entropy (fp32) has its gradients from the forward."""
    plain = cfg.model.logit_softcap is None and cfg.loss.z_loss == 0 and cfg.loss.objective == "terminal"
    return not (plain and cfg.parallel.tensor == 1 and cfg.train.precision == "fp32")


# ------------------------------------------------------------------------------------------------------ utilisation

# Dense bf16 tensor-core FLOP/s with fp32 accumulation, from NVIDIA's data sheets (the sheets' figures "with sparsity"
# halved). A name matches where it holds all words of a key; the first match counts.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2_500.0),  # GB200 NVL72: 5 PFLOP/s sparse per GPU
    ("B200", 2_250.0),  # HGX B200: 36 PFLOP/s sparse for 8
    ("GH200", 989.4),
    ("H200 NVL", 835.5),  # 1,671 sparse
    ("H200", 989.4),  # 1,979 sparse
    ("H100 PCIe", 756.5),  # 1,513 sparse
    ("H100 NVL", 835.5),  # 1,671 sparse, per GPU
    ("H100", 989.4),  # SXM: "NVIDIA H100 80GB HBM3"; 1,979 sparse
    ("H800 PCIe", 756.5),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 311.9),  # SXM and PCIe: 312
    ("A800", 311.9),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)
# A slice of a GPU, and chips that share a desktop card's name at other clocks: their peak is not known.
_OTHER_CHIPS = {"mig", "laptop", "d", "ti"}


def device_peak_flops(name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device named as by `torch.cuda.get_device_name()`; None where it is not known."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & _OTHER_CHIPS:
        return None
    for key, tflops in _PEAK_TFLOPS:
        if words.issuperset(key.lower().split()):
            return tflops * 1e12
    return None


def utilization(flops: float, sec: float, num_devices: int, peak_flops: float | None) -> float | None:
    """MFU (of model FLOPs) or HFU (of hardware FLOPs) of work that took `sec`; None where the peak is not known."""
    return None if peak_flops is None else flops / (sec * num_devices * peak_flops)
