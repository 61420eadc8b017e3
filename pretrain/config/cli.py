"""The command line of pretrain/main.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.arguments import integer
from pretrain.errors import ConfigError

_EPILOG = """\
examples:
  python pretrain/main.py --config configs/tiny.yaml train.max_steps=20
  deepspeed --num_gpus 2 pretrain/main.py --config configs/tiny.yaml zero.stage=2
  torchrun --nproc_per_node 8 pretrain/main.py --config configs/parcae_140m.yaml --optimizer.lr=4e-3

exit codes: 0 done, 2 configuration, 3 data, 4 checkpoint, 5 distributed, 6 training, 85 stopped on request and saved,
1 anything else
All keys: docs/configuration.md
"""


@dataclass(frozen=True)
class Arguments:
    """What the user typed."""

    config: str
    overrides: list[str]
    print_config: bool
    dry_run: bool


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Returns the arguments without the program's name; what is no option is an override, checked when it is applied.

    `--local_rank` comes from the deepspeed launcher and says no more than LOCAL_RANK, so it is dropped.
    """
    parser = argparse.ArgumentParser(
        prog="pretrain/main.py",
        usage="%(prog)s --config PATH [--print-config | --dry-run] [section.key=value ...]",
        description="Trains one looped language model as a configuration file says.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="PATH", help="YAML file, such as configs/tiny.yaml")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    mode.add_argument("--dry-run", action="store_true", help="check everything, build without memory, summarise, stop")
    parser.add_argument("--local_rank", "--local-rank", type=integer(0, 1_024), help=argparse.SUPPRESS)
    known, overrides = parser.parse_known_args(argv)
    return Arguments(known.config, overrides, known.print_config, known.dry_run)


def world_size_from_environment(args: Arguments) -> int | None:
    """Returns WORLD_SIZE as the launcher set it; without one 1, or None (unknown) where nothing will be trained."""
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return None if args.dry_run or args.print_config else 1
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"environment: WORLD_SIZE={text!r}: expected the number of processes, an integer >= 1")
    return int(text)
