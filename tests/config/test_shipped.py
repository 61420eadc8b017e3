"""Every file in configs/ and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pretrain.config.load import diff_configs, dump_config, load_config, save_resolved
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from tools import document_config

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("configs/*.yaml"))
PUBLISHED = [f"{family}_{size}" for family in ("parcae", "gpt") for size in ("140m", "370m", "770m", "1b3")]
OTHERS = [
    "tiny", "rdm_100m", "rdm_350m", "parcae_rdm_100m", "parcae_rdm_350m", "flt_small", "flt_base", "lt_base",
    "blindspot_44m", "blindspot_129m", "blindspot_1b4",
    "parcae_flt_140m", "parcae_1b3_tp2", "parcae_1b3_tp2_pp2", "flt_base_pp2", "tiny_tp2_pp2",
]  # fmt: skip


def test_all_are_there() -> None:
    assert {*PUBLISHED, *OTHERS} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_valid_and_saves(path: Path, tmp_path: Path) -> None:
    cfg = load_config(path)
    validate(cfg, None)
    validate(cfg, cfg.parallel.tensor * cfg.parallel.pipeline)
    assert cfg.run.name == path.stem, "two runs must not share a folder"
    save_resolved(cfg, tmp_path / "config.yaml")
    assert "base" not in yaml.safe_load(dump_config(cfg))


@pytest.mark.parametrize("size", ["140m", "370m", "770m", "1b3"])
def test_the_plain_transformer_differs_from_parcae_in_the_recurrence_alone(size: str) -> None:
    parcae, gpt = (load_config(ROOT / f"configs/{family}_{size}.yaml") for family in ("parcae", "gpt"))
    assert gpt.model.recurrence.default_loops == 1
    gpt.model.recurrence, gpt.model.family = parcae.model.recurrence, parcae.model.family
    gpt.run.name = parcae.run.name
    assert gpt == parcae


@pytest.mark.parametrize("size", ["100m", "350m"])
def test_parcae_in_the_setting_of_rdm_differs_in_the_model_alone(size: str) -> None:
    parcae, rdm = (load_config(ROOT / f"configs/{name}_{size}.yaml") for name in ("parcae_rdm", "rdm"))
    changed = {key.removeprefix("model.") for key, *_ in diff_configs(rdm, parcae)}
    assert changed == {
        "run.name", "family", "block", "recurrence.injection",
    }  # fmt: skip


def test_published_recipe() -> None:
    cfg = load_config(ROOT / "configs/parcae_1b3.yaml")
    assert cfg.tokens_per_step == 524_288
    assert cfg.train.max_tokens == 104_000_000_000
    assert (cfg.optimizer.name, cfg.optimizer.lr, cfg.optimizer.muon_lr) == ("muon", 6e-3, 8e-3)
    assert (cfg.optimizer.betas, cfg.optimizer.eps, cfg.optimizer.clip_norm) == ((0.8, 0.95), 1e-10, 1.0)
    assert (cfg.schedule.name, cfg.schedule.warmup_steps, cfg.schedule.decay_fraction) == ("trapezoid", 0, 0.5)


def test_the_reference_page_is_what_the_dataclasses_say() -> None:
    page = document_config.PAGE.read_text(encoding="utf-8")
    assert document_config.render(page) == page, "run: python -m tools.document_config"


def test_every_field_has_a_line_of_documentation() -> None:
    rows = [line for line in document_config.key_tables() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if row.endswith("|  |")]


def test_defaults_are_a_valid_configuration_but_for_the_data() -> None:
    cfg = Config()
    cfg.data.path = "somewhere"
    validate(cfg, 1)
