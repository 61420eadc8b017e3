"""Depth tasks during a run, by the tool, of exported models, in the state report, and on published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep import depth_tasks
from pretrain.evaluation.depth import PROBLEMS
from tests.hf.test_import_checkpoint import publish, run_import
from tests.parity import load_case
from tests.train.forked import Run, train
from tools import blindspot, convert_to_hf, evaluate, hf_folder

CONFIG = """
model:
  {family: FAMILY, vocab_size: 18, context_length: 32, width: 16, num_heads: 2, ffn_width: 16, prelude_layers: 0,
   core_layers: 1, coda_layers: 0, value_gate_channels: 8, recurrence: {mean_loops: 3}}
data: {path: FOLDER/data, num_workers: 0}
train: {max_steps: 3, global_batch_size: 8, micro_batch_size: 4, precision: fp32, activation_checkpointing: none}
schedule: {warmup_steps: 0}
validation: {rows: 20}
evaluation: {tasks: ["depth:walk", "depth:FOLDER/data"], num_loops: [1, 4], limit: 16, batch_tokens: 256}
logging: {wandb: disabled}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of walks, and configurations of runs on it."""
    folder = tmp_path_factory.mktemp("depth")
    arguments = depth_tasks.Arguments(task="walk", rows=40, validation_rows=20, row_tokens=33)
    depth_tasks.build(folder / "data", arguments)
    for family in ("parcae", "flt", "blindspot", "gpt"):
        text = CONFIG.replace("FOLDER", str(folder)).replace("FAMILY", family)
        if family == "gpt":
            text = text.replace("recurrence: {mean_loops: 3}", "recurrence: {}").replace("[1, 4]", "[1]")
        (folder / f"{family}.yaml").write_text(text)
    return folder


def last_evaluation(run: Run) -> dict[str, float]:
    found: dict[str, float] = run.check().column("evaluation")[-1]
    return found


def by_tool(model: Path, out: Path, *arguments: str) -> dict[str, dict[str, float]]:
    """By loops, of the task walk."""
    assert evaluate.main([str(model), "--tasks", "depth:walk", "--limit", "16", "--out", str(out), *arguments]) == 0
    found: dict[str, dict[str, float]] = json.loads((out / "evaluation.json").read_text())["tasks"]["depth:walk"][
        "by_loops"
    ]
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("parcae", marks=pytest.mark.layouts),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("flt", "blindspot")),
    ],
)
def test_every_layout_the_tool_an_export_and_the_report_agree(
    family: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / f"{family}.yaml"
    one = train(config, tmp_path / "one")
    expected = last_evaluation(one)
    for name, settings in (
        ("zero3", ("zero.stage=3",)),
        ("tp", ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    ):
        assert last_evaluation(train(config, tmp_path / name, *settings, world=2)) == expected
    assert "depth:walk: depths 32 are left out: their problems do not fit into the context of 32 tokens" in one.log
    assert expected["depth:walk/solved_depth/4"] in range(25)
    assert {key for key in expected if key.startswith("depth:walk/acc_depth_8/")} == {
        "depth:walk/acc_depth_8/1", "depth:walk/acc_depth_8/4",
    }  # fmt: skip

    found = by_tool(one.folder, tmp_path / "tool", "--num-loops", "4,1")
    own = {k: v for k, v in expected.items() if k.startswith("depth:walk/")}
    assert {f"depth:walk/{m}/{t}": value for t, values in found.items() for m, value in values.items()} == own
    assert {k.replace(f"depth:{folder}/data/", "depth:walk/"): v for k, v in expected.items()} == own, "the same task"
    assert (tmp_path / "tool" / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert "note: depth:walk: depths 32 are left out" in capsys.readouterr().out

    exported = tmp_path / "exported"
    exported.mkdir()
    hf_folder.write_folder(convert_to_hf.load_export(one.folder, "fp32", None, "5GB"), exported)
    assert by_tool(exported, tmp_path / "of_export", "--num-loops", "1,4") == found

    models = [str(one.folder), str(exported)]
    options = ["--data", str(folder / "data"), "--loops", "4", "--rows", "4", "--repeats", "1", "--new-tokens", "0"]
    assert blindspot.main([*models, *options, "--tasks", "depth:walk", "--out", str(tmp_path / "report")]) == 0
    for record in json.loads((tmp_path / "report" / "report.json").read_text())["models"]:
        at_four = record["depth"]["depth:walk"]["4"]  # of 128 problems at each depth
        assert set(record["depth"]["depth:walk"]) == {"1", "2", "3", "4"} and at_four.keys() == found["4"].keys()
    page = (tmp_path / "report" / "report.html").read_text()
    assert 'id="solved_depth"' in page and 'id="depth_1"' in page and "depths 32 are left out" in page


def test_a_model_without_loops(folder: Path, tmp_path: Path) -> None:
    expected = last_evaluation(train(folder / "gpt.yaml", tmp_path / "gpt"))
    found = by_tool(tmp_path / "gpt", tmp_path / "tool")
    assert found.keys() == {"1"}
    assert found["1"]["acc_depth_2"] == expected["depth:walk/acc_depth_2/1"]


def test_what_does_not_suit_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "parcae.yaml"
    for setting, message in (
        ("evaluation.depths=[4,40]", "problems of depth 40 have up to 42 tokens: expected at most the context's 32"),
        ("evaluation.tasks=['depth:assign']", "the model's tokenizer does not know 'Adam'"),
        ("evaluation.tasks=['depth:wolk']", "unknown task 'depth:wolk'"),
        ("evaluation.depths=[0]", "evaluation.depths[0]=0: expected an integer >= 1"),
    ):
        for world in (1, 2):
            run = train(config, tmp_path / "run", setting, world=world)
            assert run.codes == [2] * world and all(message in output for output in run.outputs), run.outputs
            assert not run.folder.exists()
    run = train(config, tmp_path / "short", "train.max_steps=1", "evaluation.tasks=[]").check()
    depth_tasks.save_tokenizer(PROBLEMS["assign"], tmp_path / "words")
    larger = ("depth:assign", "--tokenizer", str(tmp_path / "words"))
    for arguments, message in (
        (larger, "a tokenizer of 90 ids; expected at most 18"),
        (("depth:walk", "--depths", "40"), "problems of depth 40"),
        (("depth:mano",), "does not know '0'"),
        (("loss", "--depths", "2"), "depths 2: expected none"),
    ):
        assert evaluate.main([str(run.folder), "--out", str(tmp_path / "out"), "--tasks", *arguments]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    report = ["--data", str(folder / "data"), "--out", str(tmp_path / "out"), "--tasks"]
    for task, message in (("loss", "--tasks loss: expected depth:NAME"), ("depth:mano", "does not know '0'")):
        assert blindspot.main([str(run.folder), *report, task]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("parcae", "a_base"), ("huginn", "sandwich"), ("flt", "FLT"), ("blindspot", "norm"),
        *(
            pytest.param(source, name, marks=pytest.mark.slow)
            for source, name in (
                ("parcae", "g_add_injection"), ("flt", "FLT_res"), ("flt", "LT"), ("flt", "LT_i"), ("flt", "LT_ia"),
            )
        ),
    ],
)  # fmt: skip
def test_published_checkpoints_take_every_task(
    source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hf_folder, "run_check", lambda cases: {folder: {} for folder in cases})  # it takes a process
    monkeypatch.setattr(evaluate, "plot", lambda results, path: None)  # a second each time
    assert run_import(source, publish(load_case(source, name), tmp_path / "published"), tmp_path / "model") == 0  # type: ignore[arg-type]
    for task, problems in PROBLEMS.items():
        depth_tasks.save_tokenizer(problems, tmp_path / task)
        arguments = ["--tasks", f"depth:{task}", "--tokenizer", str(tmp_path / task), "--num-loops", "1,3"]
        out = tmp_path / f"out_{task}"
        assert evaluate.main([str(tmp_path / "model"), *arguments, "--limit", "8", "--out", str(out)]) == 0
        result = json.loads((out / "evaluation.json").read_text())["tasks"][f"depth:{task}"]
        assert result["num_requests"] == 8 * (len(result["by_loops"]["3"]) - 1) and not result["num_cropped"]
        assert all(0 <= value <= 1 for key, value in result["by_loops"]["3"].items() if key != "solved_depth")
    capsys.readouterr()
