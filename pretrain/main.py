"""Entry point: parse, validate, build, run, close.

Started by python, torchrun, deepspeed or the SLURM launcher, as a file or as `-m pretrain.main`. Everything that a user
can get wrong in a configuration is refused before torch is imported. Exit codes: pretrain/errors.py.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # A file's own folder comes first in sys.path; there `pretrain/` must not stand, but the folder that holds it.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

from pretrain.config.cli import Arguments, parse_arguments, world_size_from_environment
from pretrain.config.load import dump_config, load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError, PretrainError
from pretrain.preflight import preflight


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    args = parse_arguments(argv)
    try:
        cfg = load_config(args.config, args.overrides)
        _check(cfg, args)
        if args.print_config:
            sys.stdout.write(dump_config(cfg))
            return 0
        from pretrain.train.build import dry_run, run_training  # imports torch

        return dry_run(cfg) if args.dry_run else run_training(cfg)
    except PretrainError as error:
        _complain(str(error))
        return error.exit_code
    except Exception:
        _complain(traceback.format_exc())
        return 1


def _check(cfg: Config, args: Arguments) -> None:
    try:
        validate(cfg, world_size_from_environment(args))
        if not args.print_config:
            preflight(cfg)
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from error


def _complain(message: str) -> None:
    """One write, so that messages of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.write(f"error on rank {os.environ.get('RANK', '0')} ({socket.gethostname()}): {message.rstrip()}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
