"""From runs to folders that transformers loads, and back; whatever is wrong is named, and nothing is left of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pretrain.config.load import load_config
from pretrain.errors import CheckpointError
from pretrain.train.checkpoint.find import open_checkpoint
from tests.helpers import exit_code_of
from tests.hf.models import CONTEXT, VOCAB_OF_TEXT, hf_model, layers, save_run
from tests.model.tiny import FAMILIES, random_model, tiny_config
from tests.train.forked import train
from tools import convert_from_hf, convert_to_hf, generate, hf_check, hf_folder

FRESH = Path(__file__).with_name("fresh.py")


def write(run: Path, out: Path, dtype: str = "fp32", max_shard_size: str = "5GB") -> tuple[Path, Path]:
    """(folder of the exported model, its case), without the check."""
    export = convert_to_hf.load_export(run, dtype, None, max_shard_size)
    out.mkdir()
    hf_folder.write_folder(export, out)
    case = out.with_name(out.name + ".safetensors")
    hf_folder.write_case(export, case, (4, 11))
    return out, case


def test_every_family_loads_as_exported_in_a_fresh_process(text_config: Path, tmp_path: Path) -> None:
    """Also in bf16 and in several files, and without heads of training; one wrong bit is found among all."""
    cases = {}
    for family in FAMILIES:
        heads = ("model.auxiliary.state_predictor=true", "loss.state_prediction=0.1") if family == "add" else ()
        run = save_run(text_config, tmp_path / "runs" / family, family, "model.recurrence.mean_loops=3", *heads)
        folder, case = write(run, tmp_path / family)
        cases[folder] = case
    run = tmp_path / "runs" / "parcae"
    sharded = write(run, tmp_path / "sharded", "bf16", "20KB")
    assert len(list(sharded[0].glob("model-*.safetensors"))) > 2
    damaged = write(run, tmp_path / "damaged")
    path = damaged[0] / "model.safetensors"
    tensors = load_file(path)
    tensors["final_norm.weight"][0] += 1e-6
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        hf_folder.run_check(cases | dict([sharded, damaged]))
    problems = str(caught.value).splitlines()[1:]
    assert problems == [f"  {damaged[0]}: tensor final_norm.weight is not the one that was exported"]


def test_a_run_becomes_a_folder_and_text_and_a_start_of_training(
    text_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, start = save_run(text_config, tmp_path / "run", "parcae"), tmp_path / "out", tmp_path / "start"
    rows = [{"step": step, "val_loss": {"1": None, "8": 2.5 + step}} for step in (5, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert convert_to_hf.main([str(run), str(out)]) == 0, capsys.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_OF_TEXT and config["auto_map"] and config["bos_token_id"] == 0
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 1]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.get_slice("embedding.weight").get_shape() == [VOCAB_OF_TEXT, 32], "without padding"
        assert "head.weight" not in file.keys()  # noqa: SIM118
    assert len(config["tokenizer_sha256"]) == 64
    card = (out / "README.md").read_text()
    for text in ("`parcae`", "7 of 50, 700", "documents", "mean 8, poisson", "pytest", "loop | not", "7.5000"):
        assert text in card, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"], "nothing else is left"

    capsys.readouterr()
    arguments = ["--prompt", "the loop", "--temperature", "0", "--max-new-tokens", "12", "--num-loops", "3"]
    texts = []
    for model in (run, out):
        assert generate.main([str(model), *arguments]) == 0
        output, notes = capsys.readouterr()
        assert output.startswith("the loop") and "12 tokens, 3.00 loops per token" in notes
        texts.append(output)
    assert texts[0] == texts[1]
    exits = [*arguments, "--exit-rule", "margin", "--exit-threshold", "0", "--cache-mode", "last"]
    assert generate.main([str(out), *exits]) == 0 and "1.00 loops per token" in capsys.readouterr().err

    assert convert_from_hf.main([str(out), str(start)]) == 0
    with open_checkpoint(run) as saved, open_checkpoint(start) as back:
        assert saved.names() == back.names()
        for name in saved.names():
            a, b = saved.read(name), back.read(name)
            rows = slice(0, VOCAB_OF_TEXT) if "embedding" in name or "table" in name else slice(None)
            assert a.shape == b.shape and torch.equal(a[rows], b[rows]), name


def test_a_failed_check_leaves_nothing(
    text_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(text_config, tmp_path / "run", "flt")

    def fail(cases: dict[Path, Path]) -> None:
        assert all(folder.is_dir() and case.is_file() for folder, case in cases.items())
        raise CheckpointError("another model")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, replacement, message in (
        ("run_check", fail, "another model"), ("save_torch_state_dict", full, "out: not written ([Errno 28] No space"),
    ):  # fmt: skip
        monkeypatch.setattr(hf_folder, name, replacement)
        assert convert_to_hf.main([str(run), str(tmp_path / "out")]) == CheckpointError.exit_code
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bad_input_is_named_and_nothing_is_written(
    text_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = save_run(text_config, tmp_path / "run", "parcae"), tmp_path / "new" / "out"
    other, file, foreign = tmp_path / "other", tmp_path / "file", tmp_path / "foreign"
    file.write_text("")
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "llama"}')
    write(run, other)

    def refused(tool: object, *arguments: object, code: int = 2) -> str:
        assert exit_code_of(tool.main, *arguments) == code  # type: ignore[attr-defined]
        return capsys.readouterr().err

    assert "file: expected the folder of a run or of a checkpoint, found a file" in refused(convert_to_hf, file, out)
    assert "found nothing" in refused(convert_to_hf, tmp_path / "none", out)
    assert "found a model in Hugging Face form" in refused(convert_to_hf, foreign, out)
    assert "--max-shard-size big: expected a size" in refused(convert_to_hf, run, out, "--max-shard-size", "big")
    assert "exists" in refused(convert_to_hf, run, other)
    assert f"expected a folder that can be written; {file} cannot" in refused(convert_to_hf, run, file / "out")
    assert "tokenizer.json: missing" in refused(convert_to_hf, run, out, "--tokenizer", foreign)
    assert "model_type='llama': expected 'looped'" in refused(convert_from_hf, foreign, out)
    assert "model_type='llama'" in refused(generate, foreign, "--prompt", "the")
    assert "expected the folder of a run" in refused(generate, file, "--prompt", "the")
    assert "--prompt is empty" in refused(generate, run, "--prompt", " ")
    for loops in ("0", "-1"):
        refusal = f"argument --num-loops: {loops}: expected an integer >= 1"
        assert refusal in refused(generate, run, "--num-loops", loops)
    assert "argument --seed: -1: expected" in refused(generate, run, "--seed", "-1")
    for value in ("nan", "inf", "-1"):
        refusal = f"argument --temperature: {value}: expected a number >= 0"
        assert refusal in refused(generate, run, "--temperature", value)
    assert "argument --max-new-tokens: 0: expected" in refused(generate, run, "--max-new-tokens", "0")
    gpt = save_run(text_config, tmp_path / "gpt", "gpt")
    assert "--num-loops 4: expected 1, since a gpt has no loops" in refused(generate, gpt, "--num-loops", "4")
    assert "expected both, or none" in refused(generate, run, "--exit-rule", "kl")
    for threshold in ("x", "nan", "-1", "inf"):
        assert f"--exit-threshold {threshold}: expected a number" in refused(
            generate, run, "--exit-rule", "kl", "--exit-threshold", threshold
        )
    assert f"model.context_length={CONTEXT}" in refused(generate, run, "--max-new-tokens", "96")

    path, sound = other / "config.json", (other / "config.json").read_text()
    for field, value, message in (
        ("width", "x", "config.json: model.width='x': expected an integer"),
        ("family", "parcai", "config.json: model.family='parcai'"),
        ("training", None, "config.json: training=None: expected an object"),
        ("state_std", 3.0, "config.json: state_std=3.0: expected 0."),
        ("num_heads", 5, "config.json: model.num_kv_heads=2: expected a divisor"),
    ):
        path.write_text(json.dumps(json.loads(sound) | {field: value}))
        assert message in refused(convert_from_hf, other, out)
    path.write_text(sound)
    path = other / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != "final_norm.weight"} | {"strange": torch.zeros(2)}, path)
    message = refused(convert_from_hf, other, out, code=4)
    assert "final_norm.weight: absent, expected [32]" in message and "strange: [2], expected absent" in message
    path.unlink()
    assert "model.safetensors: cannot be read" in refused(convert_from_hf, other, out, code=4)
    index = run / "checkpoints" / "step_00000007" / "index.json"
    index.write_text(index.read_text()[:-9])
    assert "index.json" in refused(convert_to_hf, run, out, code=4)
    assert not out.exists() and not (tmp_path / "new").exists()


# ----------------------------------------------------------------------------------------------- minutes, not CI


@pytest.fixture(scope="module")
def trained(text_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Folders of all families after 50 steps of training, with their cases."""
    folder = tmp_path_factory.mktemp("trained")
    cases = {}
    for family in FAMILIES:
        run = train(text_config, folder / f"run_{family}", *layers(family)).check()
        losses = run.column("loss")
        assert losses[-1] < losses[0] - 1, f"{family} has not learned"
        out, case = write(run.folder, folder / family)
        cases[out] = case
    return cases


@pytest.mark.slow
def test_training_starts_from_an_exported_model(trained: dict[Path, Path], text_config: Path, tmp_path: Path) -> None:
    exported = next(folder for folder in trained if folder.name == "parcae")
    assert convert_from_hf.main([str(exported), str(tmp_path / "start")]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base: {tmp_path / 'start' / 'model.yaml'}\ndata:" + text_config.read_text().split("data:")[1])
    weights = f"checkpoint.initial_weights={tmp_path / 'start'}"
    run = train(mine, tmp_path / "more", "train.max_steps=2", weights).check()
    assert "starting from the weights of" in run.log
    assert run.column("loss")[0] < 3, "a model of random weights starts at 5.6"


@pytest.mark.slow
def test_trained_families_in_a_fresh_process(trained: dict[Path, Path]) -> None:
    for folder, differences in hf_folder.run_check(trained).items():
        assert max(differences.values()) <= 1e-4, folder
    subprocess.run([sys.executable, "-I", str(FRESH), *map(str, trained)], check=True, timeout=900)


@pytest.mark.slow
def test_trained_families_under_transformers_5(trained: dict[Path, Path]) -> None:
    overlay = os.environ.get("TRANSFORMERS5")
    if overlay is None:
        pytest.skip("TRANSFORMERS5 names no folder made by: pip install --target FOLDER 'transformers>=5'")
    environment = os.environ | {"PYTHONPATH": overlay}
    for script, arguments in (
        (hf_check.__file__, [path for pair in trained.items() for path in pair]),
        (str(FRESH), list(trained)),
    ):
        command = [sys.executable, script, *map(str, arguments)]
        result = subprocess.run(command, env=environment, check=True, timeout=900, capture_output=True, text=True)
    assert '"transformers": "5.' in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"),
    [(4, ("parallel.tensor=2", "parallel.pipeline=2", "train.micro_batch_size=4")), (2, ("zero.stage=3",))],
    ids=["tp2_pp2", "zero_3"],
)
def test_any_layout_gives_the_bytes_of_the_process_that_goes_on_from_it(
    world: int, layout: tuple[str, ...], text_config: Path, tmp_path: Path
) -> None:
    """Two steps in the layout; then one process resumes, reads a third batch without training on it, and saves."""
    settings = ("model.family=parcae_flt", "train.micro_batch_size=4")
    run = train(text_config, tmp_path / "run", *settings, *layout, "train.stop_step=2", world=world).check()
    first = write(run.folder, tmp_path / "first")[0]
    alone = train(text_config, tmp_path / "run", *settings, "train.stop_step=3", "train.skip_steps=[3]").check()
    with open_checkpoint(alone.folder) as reader:
        assert reader.step == 3
    second = write(alone.folder, tmp_path / "second")[0]
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    differing = [name for name in files if (first / name).read_bytes() != (second / name).read_bytes()]
    assert differing == ["README.md"], "the card tells the step"


def test_the_tokenizer_must_fit(text_config: Path, tmp_path: Path) -> None:
    run = save_run(text_config, tmp_path / "run", "parcae")
    export = convert_to_hf.load_export(run, "fp32", None, "5GB")
    with pytest.raises(Exception, match="the tokenizer has 270 tokens, the model's vocabulary 269"):
        hf_folder.write_folder(replace(export, cfg=replace(export.cfg, vocab_size=269)), tmp_path)


def test_a_tokenizer_without_special_tokens_and_a_damaged_one(
    text_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published models may have a tokenizer.json alone: text of theirs has no end, and nothing here begins it."""
    run, folder, out = save_run(text_config, tmp_path / "run", "parcae"), tmp_path / "bare", tmp_path / "out"
    export = convert_to_hf.load_export(run, "fp32", None, "5GB")
    assert export.tokenizer is not None
    data = json.loads((export.tokenizer / "tokenizer.json").read_text())
    folder.mkdir(), out.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(data))
    hf_folder.write_folder(replace(export, tokenizer=folder), out)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] is None
    assert generate.main([str(out), "--prompt", "the"]) == 2
    assert f"{out}: bos_token=None: expected a tokenizer with a token that begins" in capsys.readouterr().err
    (folder / "tokenizer.json").write_text(json.dumps(data)[:99])
    assert convert_to_hf.main([str(run), str(tmp_path / "new"), "--tokenizer", str(folder)]) == 2
    assert f"{folder}: its tokenizer cannot be read" in capsys.readouterr().err


def test_the_tokenizer_of_a_data_set_feeds_generation(text_config: Path) -> None:
    """As an exported model's own does: ids and mask alone, padding on the left."""
    data = Path(load_config(text_config).data.all_sources[0].path)
    native = random_model(tiny_config("parcae", vocab_size=VOCAB_OF_TEXT, context_length=CONTEXT))
    for folder in (data / "tokenizer", data.parent / "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        batch = tokenizer(["the loop", "reads its own state twice"], padding=True, return_tensors="pt")
        together = hf_model(native).generate(**batch, max_new_tokens=4, do_sample=False)
        alone = hf_model(native).generate(
            **tokenizer(["the loop"], return_tensors="pt"), max_new_tokens=4, do_sample=False
        )
        assert together[0, -4:].tolist() == alone[0, -4:].tolist()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a\\..\\b", "C:x", 3, None])
def test_an_index_of_shards_names_files_beside_it(name: object, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"weight_map: a file is .*expected a relative path below its folder"):
        hf_folder.read_safetensors(folder)
    index.write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    (folder / "shard.safetensors").symlink_to("../model.safetensors")  # as all files of the hub's cache are
    assert hf_folder.read_safetensors(folder)["a"].tolist() == [0.0]
    index.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"index\.json: not valid JSON"):
        hf_folder.read_safetensors(folder)
