"""Tensors made by the authors' own code, where this checkout has them: `../shared/parity` beside the repository."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pretrain.model.imports import Imported, Source, import_checkpoint, official_tensors
from pretrain.model.looped import LoopedLM

PARITY = Path(__file__).resolve().parents[2] / "shared" / "parity"
FOLDERS: dict[Source, str] = {"parcae": "parcae", "huginn": "huginn/a", "flt": "flt/a", "blindspot": "blindspot/a"}
# What Parcae's json holds besides the configuration.
REPORT = {"losses", "ignore_index", "torch", "value_embedding_report"}


@dataclass
class Case:
    """One parity case: the report (json), inputs and outputs, and the model with the case's weights."""

    source: Source
    report: dict[str, Any]
    io: dict[str, Tensor]
    official: dict[str, Tensor]
    imported: Imported
    model: LoopedLM

    @property
    def tokens(self) -> Tensor:
        return self.io["input_ids"]

    @property
    def labels(self) -> Tensor:
        """Labels with -100 where the reference ignores them."""
        labels = self.io["labels"]
        return labels.masked_fill(labels == self.report["ignore_index"], -100)

    def gradients(self) -> dict[str, Tensor]:
        """The model's gradients under the official names."""
        own = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return official_tensors(self.source, self.imported.config, own)


def parity_folder(source: Source) -> Path:
    """The source's folder; skips the test where it is absent."""
    folder = PARITY / FOLDERS[source]
    if not folder.is_dir():
        pytest.skip(f"no parity tensors in {folder}")
    return folder


def official_config(source: Source, report: dict[str, Any]) -> dict[str, Any]:
    """The authors' configuration object within a case's json."""
    return report["config"] if "config" in report else {k: v for k, v in report.items() if k not in REPORT}


def load_case(source: Source, name: str) -> Case:
    """The case, its model in evaluation mode (dropout off) and fp32."""
    folder = parity_folder(source)
    report = json.loads((folder / f"{name}.json").read_text())
    weights = load_file(folder / report.get("weights", f"{name}.weights.safetensors"))
    used = report.get("used_params", weights)
    official = {k: v for k, v in weights.items() if k in used and not k.startswith("extra.")}
    imported = import_checkpoint(source, official_config(source, report), official)
    model = LoopedLM(imported.config).eval()
    model.load_state_dict(imported.tensors)
    return Case(source, report, load_file(folder / f"{name}.io.safetensors"), official, imported, model)


def assert_gradients(gradients: dict[str, Tensor], reference: dict[str, list[float]], tolerance: float) -> None:
    """Compares norms, and the functional sum_i g_i cos(0.37 i + 0.1), with reference[name] = [norm, functional]."""
    assert gradients.keys() >= reference.keys(), reference.keys() - gradients.keys()
    for name, (norm, functional) in reference.items():
        g = gradients[name].double().flatten()
        own = float(g @ torch.cos(0.37 * torch.arange(len(g), dtype=torch.float64) + 0.1))
        assert math.isclose(float(g.norm()), norm, rel_tol=tolerance), (name, float(g.norm()), norm)
        assert abs(own - functional) <= tolerance * norm, (name, own, functional, norm)
    silent = [name for name, g in gradients.items() if name not in reference and g.any()]
    assert not silent, f"gradients that the reference does not have: {silent}"
