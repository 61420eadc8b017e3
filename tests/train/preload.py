"""Imported by the fork server: what every run needs, and nothing that starts a thread."""

from pretrain.messages import set_up_console, without_wandb

set_up_console()
with without_wandb():
    import torch._dynamo  # noqa: F401  (else by the first optimizer step)

    import pretrain.train.build  # noqa: F401
