"""What the launchers start: pretrain/main.py, after the patch that PATCH names."""

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    from pretrain.main import leave, main
    from pretrain.messages import set_up_console

    set_up_console()  # before the patch imports libraries that have something to say
    if patch := os.environ.get("PATCH"):
        module, function = patch.split(":")
        getattr(importlib.import_module(module), function)()
    leave(main(sys.argv[1:]))
