"""The looped language model for transformers: every family is a setting of one model (configuration_looped.py).

    x   = embed(tokens)                       h_0 = initial state
    e   = prelude(x), normalised if set       h_t = core(inject(h_{t-1}, e)),  t = 1..T
    y   = coda(C h_T);  logits = head(Norm(y))

T = `num_loops` is chosen at every call. An exit rule may end the loops of a token earlier (exit_looped.py). Parcae
arXiv 2604.12946, Fully Looped Transformer 2605.18797, Readout Blind Spot 2606.24898, Huginn 2502.05171. Needs torch 2.5
or newer and transformers 4.57 or newer.

Shapes: B rows, S new tokens, K all tokens, D width, H query heads, G key/value heads, C channels of a head, V
vocabulary, T loops.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache_looped import LoopedCache, Slot
from .configuration_looped import LoopedConfig
from .exit_looped import ExitTest
from .layers_looped import (
    Context,
    LoopedEmbedding,
    LoopedInjection,
    LoopedLayer,
    LoopedRMSNorm,
    initial_state,
    rope_tables,
)

PARTS = ("prelude", "core", "coda")
# The name of a cache among generate's arguments: transformers renamed it in 5.x.
_PREPARED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _PREPARED else "past_key_values"


@dataclass
class LoopedOutput(CausalLMOutputWithPast):
    """What a forward returns, beside transformers' loss, logits and cache; what was not asked for is None.

    logits: fp32 [B, S, V], or of the last `logits_to_keep` tokens. hidden_states: (e, h_1, ..., h_T, the head's input),
    [B, S, D or d_h] each.
    """

    loop_logits: Tensor | None = None
    """fp32 [T, B, S, V]: the logits that runs of 1, 2, ... T loops give."""
    exit_loops: Tensor | None = None
    """int64 [B, S]: loops that each token ran, where an exit rule is set."""


class LoopedForCausalLM(PreTrainedModel, GenerationMixin):
    """A looped language model with its head.

    Beside the usual arguments forward and generate take `num_loops`, `exit_rule` and `exit_threshold`; their defaults
    are in the configuration.
    """

    config: LoopedConfig
    # None in models that have no use for them.
    position_embedding: Any
    final_norm: Any
    head: Any

    config_class = LoopedConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _no_split_modules = ["LoopedLayer"]  # noqa: RUF012 - transformers reads these from the class

    def __init__(self, config: LoopedConfig) -> None:
        config.check()  # from_pretrained sets what it was given after the configuration has been made
        super().__init__(config)
        if config._attn_implementation not in (None, "sdpa"):
            raise ValueError(f"attn_implementation={config._attn_implementation!r}: expected 'sdpa'")
        # The decay of the diagonal injection is exact in every dtype.
        self._keep_in_fp32_modules_strict = ["A_log", "dt_bias"] if config.injection == "diagonal" else None
        self.embedding = LoopedEmbedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.context_length, config.width) if learned else None
        for part in PARTS:
            count = getattr(config, f"{part}_layers")
            setattr(self, part, nn.ModuleList(LoopedLayer(config, part, i) for i in range(count)))
        self.prelude_norm = LoopedRMSNorm(config.width, config) if config.prelude_norm else nn.Identity()
        self.injection = LoopedInjection(config)
        projected = config.output_projection
        self.output_projection = nn.Linear(config.core_width, config.width, bias=False) if projected else nn.Identity()
        has_norm = config.readout != "raw" or config.norm_before_coda
        self.final_norm = LoopedRMSNorm(config.width, config) if has_norm else None
        # A tied head has no module of its own, so that its matrix is stored once.
        self.head = None if config.tie_word_embeddings else nn.Linear(config.width, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the token embedding, and with it a tied head."""
        self.embedding = LoopedEmbedding.of(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where it is the token embedding."""
        return self.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replaces the head."""
        self.head = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in transformers; refused where layers have value embeddings, whose tables would keep their size."""
        if self.config.value_embeddings and (args or kwargs) and (args or (None,))[0] != self.config.vocab_size:
            raise NotImplementedError("resize_token_embeddings: the value embeddings of this model have a fixed size")
        return super().resize_token_embeddings(*args, **kwargs)

    def new_cache(self, mode: str | None = None) -> LoopedCache:
        """An empty cache; `mode` is full or last (default: config.cache_mode)."""
        return LoopedCache(mode or self.config.cache_mode)

    # --------------------------------------------------------------------------------------------- parts of a forward

    def look_up_values(self, part: str, input_ids: Tensor) -> list[Tensor | None]:
        """Value embeddings of each layer of `part`, [B, S, G C]; they do not depend on the loop."""
        return [layer.look_up(input_ids) for layer in getattr(self, part)]

    def run_layers(
        self, part: str, x: Tensor, ctx: Context, values: Sequence[Tensor | None], slots: str | None = None,
        loop: int = 0, running: Tensor | None = None, feedback: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, S, D] through the layers of `part`, whose keys and values go to the cache's `slots`."""
        for index, (layer, value) in enumerate(zip(getattr(self, part), values, strict=True)):
            x = layer(x, ctx, value, Slot(slots or part, index, loop), running, feedback)
        return x

    def encode(self, input_ids: Tensor, ctx: Context, positions: Tensor) -> Tensor:
        """e [B, S, D]: embedding, prelude and its norm."""
        x = self.embedding(input_ids)
        if self.config.scale_embeddings:
            x = x * self.config.width**0.5
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        x = self.run_layers("prelude", self.dropout(x), ctx, self.look_up_values("prelude", input_ids))
        return self.prelude_norm(x)

    def core_step(
        self, h: Tensor, drive: Any, ctx: Context, values: Sequence[Tensor | None], loop: int, running: Tensor | None
    ) -> Tensor:
        """One loop (0-based): h [B, S, d_h] -> h. Tokens that are not `running` keep their state."""
        u, fed = self.injection(h, drive, loop == 0)
        feedback = fed if self.config.feedback != "none" and loop > 0 else None
        updated = self.run_layers("core", u, ctx, values, loop=loop, running=running, feedback=feedback)
        return updated if running is None or loop == 0 else torch.where(running[..., None], updated, h)

    def decode(
        self, h: Tensor, ctx: Context, values: Sequence[Tensor | None], slots: str | None = None, loop: int = 0,
        running: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """State h [B, S, d_h] -> the head's input [B, S, D]: C, coda, and the readout's norm."""
        y = self.output_projection(h)
        if self.config.norm_before_coda:
            y = self.final_norm(y)
        y = self.run_layers("coda", y, ctx, values, slots, loop, running)
        return y if self.config.readout == "raw" else self.final_norm(y)

    def read_out(self, y: Tensor) -> Tensor:
        """The head's input [B, S, D] -> fp32 logits [B, S, V]."""
        logits = (self.embedding(y, as_head=True) if self.head is None else self.head(y)).float()
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # -------------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedCache | None = None,
        labels: Tensor | None = None,
        num_loops: int | None = None,
        initial_state: Tensor | None = None,
        output_hidden_states: bool | None = False,
        output_loop_logits: bool = False,
        exit_rule: str | None = None,
        exit_threshold: float | str | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
    ) -> LoopedOutput | tuple[Any, ...]:
        """Logits of input_ids [B, S] after `num_loops` loops, and what else is asked for (LoopedOutput).

        attention_mask [B, K] (0: padding, on either side); position_ids [B or 1, S] (default: tokens counted by the
        mask); initial_state [B, S, d_h] in place of the configured h_0; labels [B, S], shifted here, -100 where none
        counts; exit_rule and exit_threshold: see ExitTest. Errors: TypeError for a foreign cache, ValueError for
        arguments that do not fit.
        """
        num_loops = self._checked_loops(num_loops)
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep}: expected 0, for all, or a number of last tokens")
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError(f"logits_to_keep={logits_to_keep}: expected 0 where labels are given")
        exits = ExitTest.of(exit_rule, exit_threshold, self.config)
        cache = self._usable_cache(past_key_values, use_cache)
        # Tokens that have exited take their entries of the loop before from a cache, so one is needed for the call.
        ctx, positions, valid = self._context(
            input_ids, attention_mask, position_ids, LoopedCache() if cache is None and exits is not None else cache
        )
        e = self.encode(input_ids, ctx, positions)
        h = self._initial_state(initial_state, e, positions)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loops = Loops(self, input_ids, e, ctx, exits, valid, output_loop_logits, bool(output_hidden_states), keep)
        y = self.decode(loops.run(h, num_loops), ctx, loops.coda_values)
        logits = self.read_out(y[:, keep])
        if cache is not None:
            cache.length += input_ids.shape[1]
        output = LoopedOutput(
            loss=self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=(e, *loops.states, y) if output_hidden_states else None,
            loop_logits=torch.stack([*loops.logits, logits]) if output_loop_logits else None,
            exit_loops=loops.exit_loops,
            **{CACHE_NAME: cache},
        )
        return output.to_tuple() if return_dict is False else output

    def _checked_loops(self, num_loops: int | None) -> int:
        num_loops = self.config.num_loops if num_loops is None else num_loops
        if isinstance(num_loops, bool) or not isinstance(num_loops, int) or num_loops < 1:
            raise ValueError(f"num_loops={num_loops!r}: expected an integer >= 1")
        return num_loops

    def _loss(self, logits: Tensor, labels: Tensor | None, num_items: Tensor | int | None) -> Tensor | None:
        if labels is None:
            return None
        size = self.config.vocab_size
        return self.loss_function(logits=logits, labels=labels, vocab_size=size, num_items_in_batch=num_items)

    def _usable_cache(self, cache: LoopedCache | None, use_cache: bool | None) -> LoopedCache | None:
        if self.training and self.is_gradient_checkpointing and (use_cache or cache is not None):
            raise ValueError("use_cache: expected False where gradient checkpointing runs layers twice")
        if cache is None:
            # Not by default: it holds every loop, and only generation, which asks for it, has a use for it.
            return self.new_cache() if use_cache else None
        if not isinstance(cache, LoopedCache):
            raise TypeError(
                f"past_key_values is a {type(cache).__module__}.{type(cache).__name__}, expected a LoopedCache "
                "(model.new_cache()): other caches keep one slot per layer, and this model needs one per layer and loop"
            )
        return cache

    def _initial_state(self, given: Tensor | None, e: Tensor, positions: Tensor) -> Tensor:
        if given is None:
            return initial_state(self.config, e, positions)
        expected = (*e.shape[:2], self.config.core_width)
        if tuple(given.shape) != expected:
            raise ValueError(f"initial_state: shape {list(given.shape)}, expected {list(expected)}")
        return given.to(e.dtype)

    def _context(
        self, input_ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: LoopedCache | None
    ) -> tuple[Context, Tensor, Tensor | None]:
        """(context, positions [B or 1, S], which new tokens are none of the padding: bool [B, S] or None for all)."""
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids: shape {list(input_ids.shape)}, expected [rows, tokens >= 1]")
        config, device, (rows, length) = self.config, input_ids.device, input_ids.shape
        past = 0 if cache is None else cache.get_seq_length()
        if mask is not None and tuple(mask.shape) != (rows, past + length):
            raise ValueError(
                f"attention_mask: shape {list(mask.shape)}, expected {[rows, past + length]}"
            )
        if positions is not None and (positions.ndim != 2 or positions.shape not in ((1, length), (rows, length))):
            raise ValueError(f"position_ids: shape {list(positions.shape)}, expected {[rows, length]} or {[1, length]}")
        places = torch.arange(past + length, device=device)
        if positions is None:
            counted = places[None] if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
            positions = counted[:, past:]
        if config.positions == "learned":
            first, last = int(positions.min()), int(positions.max())
            if first < 0:
                raise ValueError(f"position {first}: expected none below 0")
            if last >= config.context_length:
                raise ValueError(f"position {last}: expected below context_length={config.context_length}")
        key_valid = None if mask is None or bool(mask.all()) else mask.bool()
        # Causal order is all that a first call needs, and one new token sees every key.
        plain = key_valid is None and (past == 0 or length == 1)
        full = None if plain else _dense_mask(places, past, None, key_valid)
        window = config.sliding_window
        windowed = None if window is None else _dense_mask(places, past, window, key_valid)
        cos, sin = rope_tables(config, positions) if config.positions == "rope" else (None, None)
        valid = None if key_valid is None else key_valid[:, past:]
        return Context(cos, sin, full, windowed, cache, causal=past == 0), positions, valid

    # ----------------------------------------------------------------------------------------------------- generation

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers, with a cache of this model's kind."""
        # Assisted generation of transformers 4 asks its assistant for a dynamic cache, which this one is.
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: expected None; set "
                "config.cache_mode to full or last, or pass past_key_values=model.new_cache(mode)"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = self.new_cache()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: LoopedCache | None = None,
        cache: LoopedCache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of the next forward: tokens that the cache has not seen, and the settings of the call."""
        cache = self._usable_cache(cache if past_key_values is None else past_key_values, use_cache=False)
        past = 0 if cache is None else cache.get_seq_length()
        total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
        if total == input_ids.shape[1]:  # else they are new tokens alone
            input_ids = input_ids[:, past:]
        if position_ids is not None:
            more = torch.arange(1, 1 + max(0, total - position_ids.shape[1]), device=position_ids.device)
            position_ids = torch.cat((position_ids, position_ids[:, -1:] + more), dim=1)[:, past:total]
        known = inspect.signature(self.forward).parameters.keys() - {"labels", "return_dict"}
        settings = {name: value for name, value in kwargs.items() if name in known}
        return settings | {
            "input_ids": input_ids.contiguous(), "past_key_values": cache, "attention_mask": attention_mask,
            "position_ids": position_ids,
        }  # fmt: skip


class Loops:
    """The loops of one forward: which tokens still run, and what is read out on the way."""

    def __init__(
        self,
        model: LoopedForCausalLM,
        input_ids: Tensor,
        e: Tensor,
        ctx: Context,
        exits: ExitTest | None,
        valid: Tensor | None,
        read_all: bool,
        keep_states: bool,
        keep: slice | Tensor,
    ) -> None:
        self.model, self.ctx, self.exits, self.read_all, self.keep = model, ctx, exits, read_all, keep
        self.keep_states = keep_states
        self.drive = model.injection(None, e, True)
        self.core_values = model.look_up_values("core", input_ids)
        self.coda_values = model.look_up_values("coda", input_ids)
        self.running: Tensor | None = None
        self.exit_loops: Tensor | None = None
        self.states: list[Tensor] = []
        self.logits: list[Tensor] = []
        """Of every loop but the last."""
        if exits is not None:
            self.running = torch.ones_like(input_ids, dtype=torch.bool) if valid is None else valid
            self.exit_loops = torch.ones_like(input_ids)

    def run(self, h: Tensor, num_loops: int) -> Tensor:
        """The state [B, S, d_h] after the last loop, or after the one in which the last token has exited."""
        for loop in range(num_loops):
            h = self.model.core_step(h, self.drive, self.ctx, self.core_values, loop, self.running)
            if self.keep_states:
                self.states.append(h)
            if loop + 1 == num_loops or not self._goes_on(h, loop):
                break
        return h

    def _goes_on(self, h: Tensor, loop: int) -> bool:
        """Reads out what is needed of a loop that may not be the last; whether any token runs another one."""
        logits = None
        if self.read_all or (self.exits is not None and self.exits.needs_logits):
            y = self.model.decode(h, self.ctx, self.coda_values, "readout", loop, self.running)
            logits = self.model.read_out(y)
        if self.exits is not None:
            assert self.running is not None and self.exit_loops is not None
            self.running = self.running & ~self.exits.exits(h, logits)
            if not self.running.any():
                return False
            self.exit_loops = self.exit_loops + self.running
        if self.read_all and logits is not None:
            self.logits.append(logits[:, self.keep])
        return True


def _dense_mask(places: Tensor, past: int, window: int | None, key_valid: Tensor | None) -> Tensor:
    """bool [1 or B, 1, S, K]: causal, within the window, and of keys that are no padding."""
    distance = places[past:, None] - places[None, :]
    mask = (distance >= 0) & (distance < (len(places) if window is None else window))
    if key_valid is None:
        return mask[None, None]
    # A padding query would see no key at all; let it see itself, so that its softmax stays finite.
    return mask & key_valid[:, None, None, :] | (distance == 0)
