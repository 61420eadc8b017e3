"""Text from a trained model, streamed to the terminal: of a run, a checkpoint or a folder in Hugging Face form.

    python -m tools.generate runs/tiny --prompt "The river" --num-loops 8
    python -m tools.generate out/tiny --prompt "The river" --exit-rule kl --exit-threshold 0.001

Shapes: B rows, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextStreamer

from pretrain.arguments import integer, number, pathname
from pretrain.errors import ConfigError, PretrainError
from pretrain.hf.configuration_looped import CACHE_MODES, EXIT_RULES, LoopedConfig, check_exit
from pretrain.hf.modeling_looped import LoopedForCausalLM
from pretrain.model.cache import LoopCache
from pretrain.model.looped import LoopedLM
from tools.hf_format import DTYPES, hf_config, hf_tensors
from tools.loading import Saved, Trained, check_loops, read_saved


@torch.no_grad()
def generate(
    model: LoopedLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    num_loops: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The prompts with `max_new_tokens` drawn tokens after each: int64 [B, S] -> [B, S + max_new_tokens].

    Probabilities are softmax(logits / temperature) after `num_loops` loops (default: mu); temperature 0 takes the most
    likely token. A row's draws depend on the seed and its place in the batch. Errors: ConfigError for a negative
    temperature, and where the result would be longer than the model's context.
    """
    _check_length(prompt.shape[1], max_new_tokens, model.cfg.context_length)
    if temperature < 0:
        raise ConfigError(f"temperature={temperature}: expected a number >= 0 (0: the most likely token)")
    generator = torch.Generator(prompt.device).manual_seed(seed)
    cache, tokens, fed = LoopCache(), prompt, prompt
    for _ in range(max_new_tokens):
        logits = model.logits(fed, num_loops, cache=cache)[:, -1]
        if temperature == 0:
            fed = logits.argmax(-1, keepdim=True)
        else:
            fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, fed), 1)
    return tokens


def _check_length(prompt_tokens: int, max_new_tokens: int, context: int) -> None:
    if prompt_tokens + max_new_tokens > context:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens}: expected at most {max(0, context - prompt_tokens)}, since the prompt "
            f"has {prompt_tokens} tokens and model.context_length={context}"
        )


def continue_text(
    trained: Trained,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    num_loops: int | None = None,
    seed: int = 0,
) -> str:
    """The prompt and its sampled continuation, up to the end of the document (the next document's <|bos|>) if it comes.

    Errors: as `generate`.
    """
    tokenizer = trained.tokenizer
    device = next(trained.model.parameters()).device
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    tokens = generate(
        trained.model, ids, max_new_tokens, temperature=temperature, num_loops=num_loops, seed=seed
    )  # fmt: skip
    new: list[int] = tokens[0, ids.shape[1] :].tolist()
    if tokenizer.bos_token_id in new:
        new = new[: new.index(tokenizer.bos_token_id)]
    text: str = tokenizer.decode(ids[0].tolist()[1:] + new)
    return text


def for_transformers(saved: Saved, *, dtype: torch.dtype, device: torch.device | str) -> LoopedForCausalLM:
    """The model as transformers runs it, in evaluation mode on `device`."""
    cfg = saved.config.model
    with torch.device("meta"):
        model = LoopedForCausalLM(LoopedConfig(**hf_config(cfg)))
    model.load_state_dict(hf_tensors(cfg, saved.tensors, dtype), assign=True)
    return model.to(device).eval()


def stream(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | None,
    settings: dict[str, Any],
    seed: int,
) -> str:
    """Prints the prompt and its continuation as it comes; returns a line about loops and speed.

    `prompt` None starts a document. `settings` are generate's. Errors: ConfigError for an empty prompt and where the
    result would be longer than the model's context.
    """
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt is empty: expected text; leave it out to start a document")
    ids = torch.tensor([tokenizer(prompt or "")["input_ids"]], device=model.device)
    _check_length(ids.shape[1], settings["max_new_tokens"], model.config.context_length)
    loops: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, __, output: loops.append(output.exit_loops))
    torch.manual_seed(seed)
    started = time.perf_counter()
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        eos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.bos_token_id, **settings,
    )  # fmt: skip
    hook.remove()
    count, sec = tokens.shape[1] - ids.shape[1], time.perf_counter() - started
    # The first forward reads the prompt; its last position and every later forward give one token each.
    ran = [float(x[0, -1]) if x is not None else float(settings["num_loops"]) for x in loops]
    return f"{count} tokens, {sum(ran) / len(ran):.2f} loops per token, {count / sec:.1f} tokens/s"


def main(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools.generate",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "path", type=pathname, metavar="MODEL", help="folder of a run, a checkpoint or an exported model",
    )  # fmt: skip
    parser.add_argument("--prompt", help="text to go on from (default: the start of a document)")
    parser.add_argument("--num-loops", type=integer(1, 4_096), help="default: the model's mean loops in training")
    parser.add_argument("--exit-rule", choices=EXIT_RULES, default="none", help="ends loops early (%(default)s)")
    parser.add_argument("--exit-threshold", help="a number >= 0, or never; needed with an exit rule")
    parser.add_argument("--cache-mode", choices=CACHE_MODES, default="full", help="of all loops, or of the last")
    parser.add_argument("--max-new-tokens", type=integer(1, 2**24), default=64, help="(%(default)s)")
    parser.add_argument(
        "--temperature", type=number(0, 10**6), default=0.8, help="0: the most likely token (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help="of the draws (%(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--tokenizer", type=pathname, help="folder (default: the model's, or that of its data)")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    try:
        dtype = DTYPES[args.dtype or ("bf16" if cuda else "fp32")]
        settings = _settings(args)
        saved = read_saved(args.path, args.tokenizer)
        model = for_transformers(saved, dtype=dtype, device="cuda" if cuda else "cpu")
        model.config.cache_mode = args.cache_mode
        settings["num_loops"] = args.num_loops or model.config.num_loops
        check_loops(saved.config.model, [settings["num_loops"]])
        print(stream(model, saved.tokenizer, args.prompt, settings, args.seed), file=sys.stderr)
    except PretrainError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """generate's arguments, checked before the model is read."""
    threshold = args.exit_threshold
    if (args.exit_rule == "none") != (threshold is None):
        raise ConfigError(
            f"--exit-threshold {threshold} with --exit-rule {args.exit_rule}: expected both, or none of them"
        )
    if threshold not in (None, "never"):
        try:
            threshold = float(threshold)
            check_exit(args.exit_rule, threshold)
        except ValueError:
            raise ConfigError(f"--exit-threshold {args.exit_threshold}: expected a number >= 0, or never") from None
    drawn = args.temperature > 0
    return {
        "max_new_tokens": args.max_new_tokens, "do_sample": drawn, "exit_rule": args.exit_rule,
        "exit_threshold": threshold, **({"temperature": args.temperature, "top_k": 0} if drawn else {}),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
