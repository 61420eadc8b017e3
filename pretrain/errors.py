"""Errors by who must act. Each carries the exit code of the process that it ends."""

STOPPED_EXIT_CODE = 85
"""No error: asked to stop before its last step (by a signal, or train.max_hours), the run has saved, and goes on when
started again. HTCondor's number for this, outside of what shells (126 and above) and sysexits.h (64 to 78) use."""


class PretrainError(Exception):
    """Base of every error the project raises on purpose; `exit_code` ends the process."""

    exit_code = 1


class ConfigError(PretrainError):
    """The user must mend a configuration, a path or an argument; raised before any GPU time."""

    exit_code = 2


class DataError(PretrainError):
    """A shard, manifest or row read during the run is missing, truncated or wrong."""

    exit_code = 3


class CheckpointError(PretrainError):
    """No usable checkpoint, a checkpoint that does not match, or a save that failed."""

    exit_code = 4


class DistributedError(PretrainError):
    """A rank died, disagreed with the others or did not answer in time."""

    exit_code = 5


class TrainingError(PretrainError):
    """Training cannot go on: non-finite steps in a row, divergence."""

    exit_code = 6
