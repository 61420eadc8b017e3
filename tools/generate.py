"""Sampling of text from a trained model, with the key/value cache of every loop.

    python -m tools.generate runs/tiny "The river" --num-loops 8

Shapes: B rows, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from pretrain.errors import ConfigError, PretrainError
from pretrain.model.cache import LoopCache
from pretrain.model.looped import LoopedLM
from tools.loading import Trained, load_model


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
    length, context = prompt.shape[1] + max_new_tokens, model.cfg.context_length
    if length > context:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens}: expected at most {context - prompt.shape[1]}, since the prompt has "
            f"{prompt.shape[1]} tokens and model.context_length={context}"
        )
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


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools.generate"
    )
    parser.add_argument("path", type=Path, help="folder of a run or of a checkpoint")
    parser.add_argument("prompt", nargs="?", default="", help="text to go on from (default: the start of a document)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely token (%(default)s)")
    parser.add_argument("--num-loops", type=int, help="default: the run's mean_loops")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    args = parser.parse_args()
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(
            continue_text(
                load_model(args.path, device=device), args.prompt, args.max_new_tokens,
                temperature=args.temperature, num_loops=args.num_loops, seed=args.seed,
            )
        )  # fmt: skip
    except PretrainError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
