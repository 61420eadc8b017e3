"""The model section: one looped language model with settings (stdlib only; nothing here imports torch).

    x   = embed(tokens)
    e   = prelude(x), normalised if `recurrence.prelude_norm`
    h_0 = state_init
    h_t = step(h_{t-1}, e)                for t = 1..T     (injection, core layers, optional feedback)
    y   = coda(C h_T);  logits = head(Norm(y))

Symbols of the papers: T = `num_loops`, mu = `mean_loops`, mu_b = `backprop_loops`, P/R/C = `prelude_layers` /
`core_layers` / `coda_layers`, d = `width`, V = `vocab_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pretrain.config.bounds import (
    TINY,
    Channels,
    CountOrZero,
    Epsilon,
    Layers,
    Loops,
    Positive,
    Range,
    Seed,
    ShareBelowOne,
    Tokens,
    require,
)

Family = Literal[
    "gpt", "lt", "lt_input", "lt_attention", "flt", "flt_res",
    "rdm", "add", "parcae", "parcae_flt", "blindspot",
]  # fmt: skip


@dataclass(kw_only=True)
class RecurrenceConfig:
    """What happens between and across loops, and how many loops there are."""

    injection: Literal["none", "input", "restart", "diagonal", "concat", "add"] = "diagonal"
    """How e enters a loop. none: u = h. input: u = Norm(e + h). restart: u = e. diagonal: u = Abar h + Bbar e
    (Parcae, constrained). concat: u = W [h; e] (RDM). add: u = h + e."""
    discretization: Literal["euler", "zoh"] = "euler"
    """Bbar of the diagonal injection. euler: dt B (the paper's). zoh: (1 - exp(-dt a)) / a B (exact)."""
    feedback: Literal["none", "attention_first", "attention", "residual"] = "none"
    """How h_{t-1} re-enters the layers from loop 2 on. attention: queries of every core layer (FLT);
    attention_first: of core layer 0 only; residual: x = Norm(x + h) before every core layer (FLT's "res")."""
    prelude_norm: bool = True
    """Normalise e once before the loops."""
    interloop_norm: bool = False
    """Normalise the state that is handed to the next loop; readouts see the state before it."""
    state_init: Literal["like_init", "input", "zero", "normal", "embed", "unit"] = "like_init"
    """h_0. like_init: truncated normal with the embedding's std, cut at 3 std; input: e; normal: N(0, 1);
    embed: N(0, 1) / sqrt(d); unit: N(0, 1) standardised over the width. injection=none asks for input."""
    state_seed: Seed = 0
    """Seed of h_0 in evaluation, where it depends on (state_seed, position, channel) alone."""
    output_projection: bool = True
    """The matrix C between the last state and the coda. Needed where the core's width differs."""
    readout: Literal["norm", "raw", "final_norm"] = "norm"
    """Readout of loop t. norm: head(Norm(y)); raw: head(y); final_norm: raw before the last loop, norm at it."""
    mean_loops: Annotated[float, Range(1, 1_000)] = 8.0
    """mu, the mean of the loop count in training and its default in evaluation (rounded)."""
    backprop_loops: Loops | None = None
    """mu_b, the most loops that get a gradient. null: ceil(mu / 2)."""
    distribution: Literal["poisson", "lognormal_poisson", "uniform", "fixed"] = "poisson"
    """Of the loop count: max(1, Poisson(mu)); Huginn's log-normal Poisson plus 1; uniform on [1, 2 mu - 1]; mu."""
    sampled_loops: Literal["all", "no_grad"] = "all"
    """What `distribution` is of. all: T, whose last min(T, mu_b) loops get a gradient (Parcae's algorithm 4).
    no_grad: n with mean mu - mu_b, from 0 on; all rows have mu_b loops with gradient after them (algorithm 3), so that
    `mean_loops` and `max_loops` are at least mu_b."""
    lognormal_sigma: Annotated[float, Range(TINY, 2)] = 0.5
    """Sigma of the log of the rate (lognormal_poisson only)."""
    granularity: Literal["sequence", "batch", "token"] = "sequence"
    """What shares one loop count. token: every token has its own, and a row runs to its deepest one; in the loops
    without gradient and again in those with one, a token has its updates first and then keeps its state, which still
    serves as key and value."""
    max_loops: Loops | None = None
    """Draws above are clipped to it. null: no bound."""
    curriculum: Literal["none", "linear", "one_minus_sqrt"] = "none"
    """Ramp of mu from 1 to `mean_loops`."""
    curriculum_steps: CountOrZero = 0
    """Length of the ramp in steps (curriculum other than none)."""

    def __post_init__(self) -> None:
        name = "model.recurrence."
        if self.distribution == "fixed":
            require(
                float(self.mean_loops).is_integer(), name + "mean_loops", self.mean_loops,
                "a whole number, since distribution=fixed runs exactly that many loops",
            )  # fmt: skip
        if self.sampled_loops == "no_grad":
            most = self.most_backprop_loops
            for key, value in (("mean_loops", self.mean_loops), ("max_loops", self.max_loops)):
                require(
                    value is None or value >= most, name + key, value,
                    f"at least {most} (backprop_loops), the gradient loops that sampled_loops=no_grad gives each row",
                )  # fmt: skip
        if self.curriculum != "none":
            require(
                self.curriculum_steps >= 1, name + "curriculum_steps", self.curriculum_steps,
                f"an integer >= 1, since curriculum={self.curriculum}",
            )  # fmt: skip

    @property
    def per_token(self) -> bool:
        """Whether every token has a loop count of its own."""
        return self.granularity == "token"

    @property
    def most_backprop_loops(self) -> int:
        """mu_b at the full mean loop count, after any curriculum."""
        return self.backprop_loops or math.ceil(self.mean_loops / 2)

    @property
    def default_loops(self) -> int:
        """The loop count of evaluation when none is asked for: mu, rounded."""
        return max(1, round(self.mean_loops))


@dataclass(kw_only=True)
class AuxiliaryConfig:
    """Parameters that auxiliary losses need; each goes with its weight in `loss`."""

    state_predictor: bool = False
    """The matrix of loss.state_prediction."""
    loop_heads: Annotated[int, Range(0, 64)] = 0
    """Norms and vocabulary matrices of loss.loop_heads: head i reads the state i loops before the last."""
    exit_gate: bool = False
    """The gate of loss.objective=exit_weighted."""

    @property
    def has_parameters(self) -> bool:
        """Whether the model has parameters that are used in some loops only."""
        return self.state_predictor or self.exit_gate or self.loop_heads > 0


@dataclass(kw_only=True)
class ModelConfig:
    """Sizes and settings of the looped model. `family` fills in the settings that the file leaves out."""

    family: Family = "parcae"
    """What carries the state from loop to loop, by its published name."""
    vocab_size: Tokens = 32_768
    """Ids the tokenizer can produce; rows of the table are padded to a multiple of `vocab_multiple`."""
    vocab_multiple: Tokens = 64
    """Rows of the embedding table come in multiples of it."""
    context_length: Tokens = 2_048
    """Tokens of a training sequence (and of the table of learned positions)."""
    width: Channels = 768
    """d, channels of the residual stream."""
    num_heads: Channels = 6
    """Query heads."""
    num_kv_heads: Channels | None = None
    """Key/value heads (GQA). null: num_heads."""
    head_dim: Channels | None = None
    """Channels of a head, the same in the core. null: width / num_heads."""
    ffn_width: Channels = 3_072
    """Hidden channels of an MLP."""
    prelude_layers: Layers = 2
    """P, layers before the loops."""
    core_layers: Annotated[int, Range(1, 512)] = 2
    """R, layers of one loop."""
    coda_layers: Layers = 2
    """C, layers after the loops."""
    core_width: Channels | None = None
    """d_h. null: width."""
    core_num_heads: Channels | None = None
    """null: num_heads, or core_width / head_dim where the widths differ."""
    core_ffn_width: Channels | None = None
    """null: ffn_width."""

    block: Literal["pre", "sandwich"] = "pre"
    """Norm placement. pre: x += f(Norm(x)). sandwich: x = Norm(x + f(Norm(x))) (Huginn)."""
    norm_eps: Epsilon = 1e-5
    """Added to the mean square in RMSNorm."""
    norm_weight: bool = True
    """Learned scale of RMSNorm."""
    mlp: Literal["relu2", "swiglu"] = "relu2"
    """relu2: W2 (relu2_scale * relu(W1 x)^2); swiglu: W2 (silu(Wg x) * W1 x)."""
    relu2_scale: Positive = 0.5
    """Factor of relu(x)^2: 0.5 in Parcae's code and checkpoints, 1 in FLT's."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary in every attention, or a learned table added to the embedding."""
    rope_base: Annotated[float, Range(TINY, 1e12)] = 50_000.0
    """theta of RoPE."""
    rope_layout: Literal["interleaved", "half"] = "interleaved"
    """Channel pairs: (2j, 2j+1), or (j, j + head_dim/2)."""
    rope_direction: Literal["forward", "backward"] = "forward"
    """backward rotates by minus the angle (FLT's code)."""
    rope_table: Literal["fp32", "bf16"] = "fp32"
    """bf16 rounds cos and sin, as FLT's checkpoints were trained; for imports only."""
    qk_norm: bool = True
    """Parameter-free RMS norm of queries and keys, after RoPE."""
    qk_norm_eps: Epsilon | None = None
    """null: the machine epsilon of fp32, 2^-23."""
    qk_bias: bool = False
    """Learned biases of queries and keys, before RoPE (Huginn)."""
    value_embeddings: bool = True
    """Gated value embeddings in every second layer of prelude, core, coda, the last one included (Parcae)."""
    value_gate_channels: Channels = 32
    """Channels of the normed layer input that the gate reads."""
    sliding_window: Tokens | None = None
    """Keys a query sees, itself included, in the layers marked S. null: all earlier ones."""
    window_pattern: str = "S"
    """S (sliding) and L (full), tiled over prelude, core, coda; the last layer is always full."""
    tie_embeddings: bool = True
    """The head is the embedding table."""
    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(width) (Huginn)."""
    logit_softcap: Positive | None = None
    """s in s * tanh(logits / s). null: none."""
    norm_before_coda: bool = False
    """Apply the final norm also before the coda (Huginn)."""
    dropout: ShareBelowOne = 0.0
    """In training, of the embedding, the attention weights and every MLP's output: where the code of the blind-spot
    paper has it, whose authors alone train with it. Attention then materialises its weights, [rows, heads, S, S]."""
    init: Literal["scaled_zero", "scaled", "normal", "uniform"] = "scaled_zero"
    """scaled_zero: truncated-orthogonal matrices, zero output projections (Parcae); scaled: truncated normal
    with std sqrt(2 / (5 d)) (RDM); normal: N(0, 0.02), output projections divided by sqrt(2 layers);
    uniform: torch's defaults, U(+-1 / sqrt(fan_in)) for every matrix (the blind-spot paper's)."""
    embedding_std: Positive | None = None
    """Of the tables of tokens and positions and, unless init is uniform, of an untied head. null: by `init`:
    sqrt(2 / (5 d)), 0.02 (normal) or 1 (uniform)."""
    recurrence: RecurrenceConfig = field(default_factory=RecurrenceConfig)
    auxiliary: AuxiliaryConfig = field(default_factory=AuxiliaryConfig)

    def __post_init__(self) -> None:
        self._check_heads()
        self._check_settings()

    def _check_heads(self) -> None:
        if self.head_dim is None:
            require(
                self.width % self.num_heads == 0, "model.num_heads", self.num_heads,
                f"a divisor of model.width={self.width}, or set model.head_dim",
            )  # fmt: skip
        require(
            self.num_heads % self.kv_heads == 0, "model.num_kv_heads", self.num_kv_heads,
            f"a divisor of model.num_heads={self.num_heads}",
        )  # fmt: skip
        if self.positions == "rope":
            origin = "" if self.head_dim else f" (model.width={self.width} / model.num_heads={self.num_heads})"
            expected = f"an even number, for RoPE{origin}"
            require(self.head_channels % 2 == 0, "model.head_dim", self.head_channels, expected)
        if self.core_width is not None and self.core_num_heads is None:
            require(
                self.core_width % self.head_channels == 0, "model.core_width", self.core_width,
                f"a multiple of the head's {self.head_channels} channels, or set model.core_num_heads",
            )  # fmt: skip
        require(
            self.heads_of("core") % self.kv_heads_of("core") == 0, "model.core_num_heads", self.core_num_heads,
            f"a multiple of the core's {self.kv_heads_of('core')} key/value heads",
        )  # fmt: skip

    def _check_settings(self) -> None:
        recurrence = self.recurrence
        require(
            set(self.window_pattern) <= {"S", "L"} and self.window_pattern != "", "model.window_pattern",
            self.window_pattern, "a word of the letters S and L",
        )  # fmt: skip
        if self.value_embeddings:
            narrowest = min(self.width, self.width_of("core"))
            require(
                self.value_gate_channels <= narrowest, "model.value_gate_channels", self.value_gate_channels,
                f"at most the width {narrowest}",
            )  # fmt: skip
        if self.width_of("core") != self.width:
            require(
                recurrence.output_projection, "model.recurrence.output_projection", False,
                f"true, since model.core_width={self.core_width} differs from model.width={self.width}",
            )  # fmt: skip
            require(
                recurrence.injection in ("diagonal", "concat"), "model.recurrence.injection", recurrence.injection,
                "diagonal or concat, the two that map from model.width to another model.core_width",
            )  # fmt: skip
            require(
                recurrence.state_init != "input", "model.recurrence.state_init", recurrence.state_init,
                f"one that does not copy e, since model.core_width={self.core_width} differs from model.width",
            )  # fmt: skip

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def kv_heads(self) -> int:
        """Key/value heads outside the core."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_channels(self) -> int:
        """Channels of one head."""
        return self.head_dim or self.width // self.num_heads

    @property
    def num_layers(self) -> int:
        """P + R + C, each layer counted once."""
        return self.prelude_layers + self.core_layers + self.coda_layers

    def effective_layers(self, num_loops: float) -> float:
        """P + T R + C."""
        return self.prelude_layers + num_loops * self.core_layers + self.coda_layers

    def width_of(self, part: str) -> int:
        """d outside the core, d_h in it. `part` is prelude, core or coda."""
        return self.core_width or self.width if part == "core" else self.width

    def heads_of(self, part: str) -> int:
        """Query heads of a layer of `part`."""
        if part != "core" or (self.core_num_heads is None and self.core_width is None):
            return self.num_heads
        return self.core_num_heads or self.width_of("core") // self.head_channels

    def kv_heads_of(self, part: str) -> int:
        """Key/value heads of a layer of `part`; in a core with its own head count GQA keeps its group size."""
        if part != "core" or self.heads_of("core") == self.num_heads:
            return self.kv_heads
        group = self.num_heads // self.kv_heads
        return max(1, self.heads_of("core") // group)

    def ffn_width_of(self, part: str) -> int:
        """MLP width of a layer of `part`."""
        return self.core_ffn_width or self.ffn_width if part == "core" else self.ffn_width

    def layer_index(self, part: str, index: int) -> int:
        """Position of a layer in the sequence prelude, core, coda."""
        return index + {"prelude": 0, "core": self.prelude_layers, "coda": self.prelude_layers + self.core_layers}[part]

    def has_value_embedding(self, part: str, index: int) -> bool:
        """Every second layer of prelude, core, coda, counted so that the last one has it."""
        return self.value_embeddings and (self.num_layers - 1 - self.layer_index(part, index)) % 2 == 0

    def window_of(self, part: str, index: int) -> int | None:
        """Sliding window of a layer in tokens, None for full causal attention."""
        layer = self.layer_index(part, index)
        if self.sliding_window is None or layer == self.num_layers - 1:
            return None
        return self.sliding_window if self.window_pattern[layer % len(self.window_pattern)] == "S" else None
