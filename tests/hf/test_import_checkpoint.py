"""The authors' checkpoints, in the form they are published in, through tools/import_checkpoint.py into transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pretrain.hf.modeling_looped import LoopedForCausalLM
from pretrain.model.imports import Source
from tests.parity import Case, load_case, official_config, parity_folder
from tools import convert_from_hf, hf_folder, import_checkpoint

RUNS: dict[Source, dict[str, int]] = {
    "parcae": {f"eval_loops{t}": t for t in (1, 4, 7)} | {"eval_loops4_state0": 4},
    "huginn": {f"r{t}": t for t in (1, 2, 4, 6)} | {"r4_zero": 4},
    "flt": {f"k{t}": t for t in (1, 2, 4, 6)},
    "blindspot": {f"k{t}": t for t in (1, 2, 4, 6)},
}
CASES: list[tuple[Source, str]] = [
    *(("parcae", name) for name in ("a_base", "f_linear_injection", "g_add_injection", "o_no_value_embeds")),
    *(("huginn", name) for name in ("sandwich", "prenorm", "prenorm_add")),
    *(("flt", name) for name in ("LT", "LT_i", "LT_ia", "FLT", "FLT_res", "FLT_swa", "FLT_gqa")),
    *(("blindspot", name) for name in ("norm", "raw", "final_only", "norm_interloop")),
]


def publish(case: Case, folder: Path) -> Path:
    """The case in its authors' form."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = dict(official_config(case.source, case.report))
    if case.source == "parcae":
        config["_class_name"] = "ParcaeConfig"
        torch.save(case.official, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in case.official.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def initial_state(case: Case, run: str) -> torch.Tensor | None:
    """h_0 of a run, where the reference does not start from the model's own."""
    if run.endswith("_zero"):
        return torch.zeros_like(case.io["state0"])
    return case.io["state0"] if case.source == "huginn" or run.endswith("state0") else None


@torch.no_grad()
def assert_parity(case: Case, model: LoopedForCausalLM) -> None:
    """The stored logits of every loop count, to 1e-4; raw ones of the blind-spot models are 50 in size, to 1e-6."""
    for run, loops in RUNS[case.source].items():
        name = f"{run}.final_logits" if case.source == "blindspot" else f"{run}.logits"
        reference = case.io[name] if name in case.io else case.io["k6.all_logits"][loops - 1]
        logits = model(case.tokens, num_loops=loops, initial_state=initial_state(case, run)).logits
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-6, msg=lambda m, r=run: f"{r}: {m}")
    if case.source == "blindspot" and case.report["case"] != "final_only":
        output = model(case.tokens, num_loops=6, output_loop_logits=True)
        torch.testing.assert_close(output.loop_logits, case.io["k6.all_logits"], atol=1e-4, rtol=1e-6)


def run_import(source: Source, folder: Path, out: Path) -> int:
    """Exit code of the tool."""
    return import_checkpoint.main(["--family", source, str(folder), str(out)])


@pytest.mark.parametrize(("source", "name"), CASES)
def test_stored_logits_come_out_of_transformers(
    source: Source, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load_case(source, name)
    monkeypatch.setattr(hf_folder, "run_check", lambda cases: {folder: {} for folder in cases})  # it takes a process
    assert run_import(source, publish(case, tmp_path / "published"), tmp_path / "out") == 0
    model = LoopedForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_parity(case, model)
    if name == "a_base":
        assert convert_from_hf.main([str(tmp_path / "out"), str(tmp_path / "start")]) == 0


def test_the_released_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As published: a pickle with the tied head stored twice. With the check in a fresh process."""
    case = load_case("parcae", "a_base")
    assert run_import("parcae", parity_folder("parcae") / "released_format_a_base", tmp_path / "out") == 0
    assert "left out: freqs_cis, lm_head.weight" in capsys.readouterr().out
    assert_parity(case, LoopedForCausalLM.from_pretrained(tmp_path / "out").eval())


def test_what_is_not_a_checkpoint_of_the_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def refused(source: Source, folder: Path, code: int) -> str:
        assert run_import(source, folder, out) == code and not out.exists()
        return capsys.readouterr().err

    flt = publish(load_case("flt", "FLT"), tmp_path / "flt")
    parcae = publish(load_case("parcae", "a_base"), tmp_path / "parcae")
    assert "_class_name='ParcaeConfig': expected None of family flt" in refused("flt", parcae, 2)
    assert "_class_name=None: expected 'ParcaeConfig'" in refused("parcae", flt, 2)
    assert "expected a value (the field is absent)" in refused("blindspot", flt, 2)
    assert "expected the folder of a flt checkpoint" in refused("flt", flt / "config.json", 2)
    for content in (b"cos\nsystem\n(S'true'\ntR.", b"\x80\x02.", b"\x80\x02X\x01\x00\x00\x00\xb1."):
        (parcae / "pytorch_model.bin").write_bytes(content)
        assert "cannot be read as tensors alone" in refused("parcae", parcae, 4)
    (parcae / "pytorch_model.bin").unlink()
    assert "no weights; expected model.safetensors, model.pt or pytorch_model.bin" in refused("parcae", parcae, 4)
    tensors = dict(load_case("flt", "FLT").official)
    del tensors["lm_head.weight"]
    save_file(tensors | {"strange": torch.zeros(1)}, flt / "model.safetensors")
    message = refused("flt", flt, 4)
    assert "missing tensors ['lm_head.weight'], unknown tensors ['strange']" in message
    shutil.rmtree(flt)
    flt.mkdir()
    assert "config.json: missing" in refused("flt", flt, 2)
