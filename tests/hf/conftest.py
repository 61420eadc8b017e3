"""One thread: the models are tiny, and the machine may be shared."""

import torch

torch.set_num_threads(1)
