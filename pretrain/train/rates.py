"""How fast a step was, as a share of what the devices could do."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pretrain.accounting import StepWork, device_peak_flops, hardware_flops, model_flops, utilization
from pretrain.config.schema import Config
from pretrain.parallel.megatron import Layout


class Utilization(NamedTuple):
    """Shares of the peak; None where the device's peak is unknown (CPU)."""

    mfu: float | None
    hfu: float | None


class Rates:
    """MFU and HFU of steps of one run, from the loops that they ran."""

    def __init__(self, cfg: Config, layout: Layout) -> None:
        self.cfg, self.num_devices = cfg, layout.world_size
        cuda = layout.device.type == "cuda"
        self.peak = device_peak_flops(torch.cuda.get_device_name(layout.device)) if cuda else None

    def of(self, work: StepWork, sec: float) -> Utilization:
        """Of a step that did `work` in `sec` seconds."""
        model, hardware = model_flops(self.cfg.model, work), hardware_flops(self.cfg, work)
        return Utilization(
            utilization(model, sec, self.num_devices, self.peak),
            utilization(hardware, sec, self.num_devices, self.peak),
        )
