"""Entry point: parse, validate, build, run, close.

Started by python, torchrun, deepspeed or the SLURM launcher, as a file or as `-m pretrain.main`. Everything that a user
can get wrong in a configuration is refused before torch is imported. Exit codes: pretrain/errors.py.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:
    # A file's own folder comes first in sys.path; there `pretrain/` must not stand, but the folder that holds it.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

from pretrain.config.cli import Arguments, parse_arguments, world_size_from_environment
from pretrain.config.load import dump_config, load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError, PretrainError
from pretrain.messages import keep_console, set_up_console, without_wandb
from pretrain.preflight import preflight

log = logging.getLogger("pretrain")


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    started_at = time.monotonic()
    args = parse_arguments(argv)
    set_up_console()
    try:
        cfg = load_config(args.config, args.overrides)
        _check(cfg, args)
        if args.print_config:
            sys.stdout.write(dump_config(cfg))
            return 0
        # Read when torch loads OpenMP. By default, waiting threads spin so long that on shared cores CPU steps took 30
        # times as long; without any spinning, steps on idle cores take twice as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        with without_wandb():
            from pretrain.train.build import dry_run, run_training  # imports torch

        return dry_run(cfg) if args.dry_run else run_training(cfg, started_at)
    except Exception as error:
        notes = vars(error).pop("__notes__", [])  # where it happened
        text = str(error) if isinstance(error, PretrainError) else traceback.format_exc()
        log.error("%s", ": ".join([*notes, text.rstrip()]))
        return error.exit_code if isinstance(error, PretrainError) else 1


def _check(cfg: Config, args: Arguments) -> None:
    try:
        validate(cfg, world_size_from_environment(args))
        if not args.print_config:
            preflight(cfg)
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from error


def leave(exit_code: int) -> NoReturn:
    """Ends the process. A failed training ends at once: threads and destructors may wait for ranks that are gone."""
    logging.shutdown()
    sys.stdout.flush()
    if exit_code and "torch" in sys.modules:
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    keep_console()
    leave(main(sys.argv[1:]))
