"""Imported by the fork server: what every run needs, and nothing that starts a thread."""

import importlib

from pretrain.config.load import load_config
from pretrain.messages import set_up_console, without_wandb

set_up_console()
with without_wandb():
    importlib.import_module("pretrain.train.build")
    # What libraries import in a run's first step.
    for name in (
        "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo", "torch.nn.modules.linear_cross_entropy",
    ):  # fmt: skip
        importlib.import_module(name)
load_config("configs/tiny.yaml")  # fills the cache of defaults
