"""What hooks into a run: metrics, console, wandb, validation, tasks, state probe, checkpoints, rewinds, profiler."""

from pretrain.train.callbacks.checkpointing import Checkpointing
from pretrain.train.callbacks.console import Console
from pretrain.train.callbacks.evaluation import Evaluation
from pretrain.train.callbacks.metrics import Metrics, Observer
from pretrain.train.callbacks.ownership import Ownership
from pretrain.train.callbacks.probe import Probe
from pretrain.train.callbacks.profiler import Profiler
from pretrain.train.callbacks.rewind import Rewind
from pretrain.train.callbacks.validation import Validation
from pretrain.train.callbacks.wandb_logger import WandbLogger

__all__ = [
    "Checkpointing", "Console", "Evaluation", "Metrics", "Observer", "Ownership", "Probe", "Profiler", "Rewind",
    "Validation", "WandbLogger",
]  # fmt: skip
