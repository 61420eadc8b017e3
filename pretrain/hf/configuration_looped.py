"""Settings of the looped language model (config.json). One model serves every family; see modeling_looped.py."""

from __future__ import annotations

import math
from typing import Any

from transformers import PretrainedConfig

EXIT_RULES = ("none", "kl", "state", "margin")
CACHE_MODES = ("full", "last")

_CHOICES = {
    "block": ("pre", "sandwich"),
    "mlp": ("relu2", "swiglu"),
    "positions": ("rope", "learned"),
    "rope_layout": ("interleaved", "half"),
    "rope_direction": ("forward", "backward"),
    "rope_table": ("fp32", "bf16"),
    "injection": ("none", "input", "restart", "diagonal", "concat", "add"),
    "discretization": ("euler", "zoh"),
    "feedback": ("none", "attention", "attention_first", "residual"),
    "state_init": ("like_init", "input", "zero", "normal", "embed", "unit"),
    "readout": ("norm", "raw", "final_norm"),
    "exit_rule": EXIT_RULES,
    "cache_mode": CACHE_MODES,
}
_COUNTS = {
    **dict.fromkeys(("vocab_size", "context_length", "width", "num_heads", "num_kv_heads", "head_dim", "ffn_width"), 1),
    **dict.fromkeys(("core_width", "core_num_heads", "core_num_kv_heads", "core_ffn_width", "core_layers"), 1),
    **dict.fromkeys(("num_loops", "sliding_window", "value_gate_channels"), 1),
    **dict.fromkeys(("prelude_layers", "coda_layers"), 0),
}
_POSITIVE = ("norm_eps", "relu2_scale", "rope_base", "qk_norm_eps", "logit_softcap", "state_std")
_MAY_BE_NONE = ("sliding_window", "logit_softcap")


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_exit(rule: Any, threshold: Any) -> None:
    """ValueError unless `rule` is known and `threshold`, where there is one, is what it can be compared with."""
    if rule not in EXIT_RULES:
        raise ValueError(f"exit_rule={rule!r}: expected one of {', '.join(EXIT_RULES)}")
    if threshold is None:
        return
    if rule == "none":
        raise ValueError(f"exit_threshold={threshold!r}: expected None, since exit_rule is none")
    if threshold != "never" and not (is_number(threshold) and threshold >= 0):
        raise ValueError(f"exit_threshold={threshold!r}: expected a number >= 0 or 'never', since exit_rule={rule!r}")


class LoopedConfig(PretrainedConfig):
    """Sizes and settings of one looped model.

    Sizes (d, layers P/R/C before, in and after the loop):
        vocab_size, context_length, width (d), num_heads, num_kv_heads, head_dim, ffn_width, prelude_layers (P),
        core_layers (R), coda_layers (C); core_width, core_num_heads, core_num_kv_heads, core_ffn_width of the core.
    Layers:
        block               pre: x += f(Norm(x)); sandwich: x = Norm(x + f(Norm(x)))
        norm_eps, norm_weight, mlp (relu2 | swiglu), relu2_scale, dropout
        positions           rope | learned; rope_base, rope_layout (interleaved | half), rope_direction (forward |
                            backward), rope_table (fp32 | bf16)
        qk_norm, qk_norm_eps, qk_bias
        value_embeddings    gated, in every second layer of prelude, core, coda, the last one included; the gate reads
                            value_gate_channels
        sliding_window      keys seen by the layers marked S in window_pattern (tiled); the last layer sees all
    Embedding and head:
        tie_word_embeddings, scale_embeddings (by sqrt(d)), logit_softcap, norm_before_coda
    Loop:
        injection           none: u = h; input: u = Norm(e + h); restart: u = e; diagonal: u = Abar h + Bbar e;
                            concat: u = W [h; e]; add: u = h + e
        discretization      of the diagonal injection: euler | zoh
        feedback            of h_{t-1} into the layers from loop 2 on: none | attention (queries of every core layer) |
                            attention_first (of the first) | residual (x = Norm(x + h) before every layer)
        prelude_norm, interloop_norm, output_projection (C)
        state_init          h_0: like_init | input | zero | normal | embed | unit; state_seed, state_std (of like_init)
        readout             norm: head(Norm(y)); raw: head(y); final_norm: head(Norm(y)) at the last loop
    Use:
        num_loops           T when a call does not say
        exit_rule, exit_threshold   when a call does not say (none: all T loops)
        cache_mode          full: keys and values of every loop; last: of the last loop alone
    training: what further training needs and a forward does not; read by convert_from_hf.
    """

    model_type = "looped"
    attribute_map = {  # noqa: RUF012 - transformers reads it from the class
        "hidden_size": "width",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_width",
        "max_position_embeddings": "context_length",
    }

    family: str = "parcae"
    vocab_size: int = 32_768
    context_length: int = 2_048
    width: int = 768
    num_heads: int = 6
    num_kv_heads: int = 6
    head_dim: int = 128
    ffn_width: int = 3_072
    prelude_layers: int = 2
    core_layers: int = 2
    coda_layers: int = 2
    core_width: int = 768
    core_num_heads: int = 6
    core_num_kv_heads: int = 6
    core_ffn_width: int = 3_072
    block: str = "pre"
    norm_eps: float = 1e-5
    norm_weight: bool = True
    mlp: str = "relu2"
    relu2_scale: float = 0.5
    dropout: float = 0.0
    positions: str = "rope"
    rope_base: float = 50_000.0
    rope_layout: str = "interleaved"
    rope_direction: str = "forward"
    rope_table: str = "fp32"
    qk_norm: bool = True
    qk_norm_eps: float = 2.0**-23
    qk_bias: bool = False
    value_embeddings: bool = True
    value_gate_channels: int = 32
    sliding_window: int | None = None
    window_pattern: str = "S"
    scale_embeddings: bool = False
    logit_softcap: float | None = None
    norm_before_coda: bool = False
    injection: str = "diagonal"
    discretization: str = "euler"
    feedback: str = "none"
    prelude_norm: bool = True
    interloop_norm: bool = False
    output_projection: bool = True
    state_init: str = "like_init"
    state_seed: int = 0
    state_std: float = 1.0
    readout: str = "norm"
    num_loops: int = 8
    exit_rule: str = "none"
    exit_threshold: float | None = None
    cache_mode: str = "full"
    training: dict[str, Any] | None = None

    def __init__(self, **kwargs: Any) -> None:
        """The fields above, and those of every configuration of transformers; what is not given has its default."""
        for name in LoopedConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(LoopedConfig, name)))
        super().__init__(**{"tie_word_embeddings": True} | kwargs)
        self.check()

    def check(self) -> None:
        """ValueError naming the first field whose value no model can have."""

        def require(holds: bool, name: str, expected: str) -> None:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

        for name, known in _CHOICES.items():
            require(getattr(self, name) in known, name, "one of " + ", ".join(known))
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
            require(fits or (value is None and name in _MAY_BE_NONE), name, f"an integer >= {least}")
        for name in _POSITIVE:
            value = getattr(self, name)
            fits = is_number(value) and value > 0
            require(fits or (value is None and name in _MAY_BE_NONE), name, "a number > 0")
        require(is_number(self.dropout) and 0 <= self.dropout < 1, "dropout", "a number in [0, 1)")
        letters = isinstance(self.window_pattern, str) and bool(self.window_pattern)
        require(letters and set(self.window_pattern) <= set("SL"), "window_pattern", "a word of the letters S and L")
        for name, heads in (("num_kv_heads", self.num_heads), ("core_num_kv_heads", self.core_num_heads)):
            require(heads % getattr(self, name) == 0, name, f"a divisor of the {heads} query heads")
        require(self.positions == "learned" or self.head_dim % 2 == 0, "head_dim", "an even number, for RoPE")
        if self.value_embeddings:
            narrowest = min(self.width, self.core_width)
            require(self.value_gate_channels <= narrowest, "value_gate_channels", f"at most the width {narrowest}")
        check_exit(self.exit_rule, self.exit_threshold)

    @property
    def num_hidden_layers(self) -> int:
        """P + R + C, each layer counted once."""
        return self.prelude_layers + self.core_layers + self.coda_layers

    def sizes_of(self, part: str) -> tuple[int, int, int, int]:
        """(width, query heads, key/value heads, MLP width) of a layer of prelude, core or coda."""
        if part == "core":
            return self.core_width, self.core_num_heads, self.core_num_kv_heads, self.core_ffn_width
        return self.width, self.num_heads, self.num_kv_heads, self.ffn_width

    def layer_index(self, part: str, index: int) -> int:
        """Position of a layer in the sequence prelude, core, coda."""
        return index + {"prelude": 0, "core": self.prelude_layers, "coda": self.prelude_layers + self.core_layers}[part]

    def has_value_embedding(self, part: str, index: int) -> bool:
        """Every second layer, counted so that the last one has it."""
        return self.value_embeddings and (self.num_hidden_layers - 1 - self.layer_index(part, index)) % 2 == 0

    def window_of(self, part: str, index: int) -> int | None:
        """Sliding window of a layer in tokens, None for full causal attention."""
        layer = self.layer_index(part, index)
        if self.sliding_window is None or layer == self.num_hidden_layers - 1:
            return None
        return self.sliding_window if self.window_pattern[layer % len(self.window_pattern)] == "S" else None
