"""The shipped configurations have the parameter counts of the published models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.config.load import load_config
from pretrain.model.looped import LoopedLM

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

EXACT = {
    "parcae_140m": 144_323_136,
    "parcae_370m": 388_003_328,
    "parcae_770m": 776_655_680,
    "parcae_1b3": 1_338_591_744,
    "gpt_140m": 143_141_184,
    "gpt_370m": 385_903_104,
    "gpt_770m": 773_375_040,
    "gpt_1b3": 1_333_868_544,
    "parcae_flt_140m": 144_323_136,
    "rdm_100m": 114_242_560,
    "rdm_350m": 382_765_056,
    "parcae_rdm_350m": 378_558_464,
    "parcae_rdm_100m": 113_189_888,  # published as 114,242,560, which is rdm_100m's
    # Published as 127.1, 317.9, 43.9 and 128.8 million.
    "flt_small": 127_107_072,
    "flt_base": 317_915_136,
    "lt_base": 317_915_136,
    "blindspot_44m": 43_934_208,
    "blindspot_129m": 128_822_016,
    "blindspot_1b4": 1_383_745_536,
}


@pytest.mark.parametrize("name", EXACT)
def test_parameter_count(name: str) -> None:
    with torch.device("meta"):
        model = LoopedLM(load_config(CONFIGS / f"{name}.yaml").model)
    assert sum(p.numel() for p in model.parameters()) == EXACT[name]
