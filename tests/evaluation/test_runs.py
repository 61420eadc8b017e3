"""Tasks during a run, and tools/evaluate.py on what it saved."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from data_prep.build_shards import build
from data_prep.packing import BuildSettings
from data_prep.sources import TextFormat
from data_prep.train_tokenizer import train_tokenizer
from pretrain.folder_lock import FolderLock
from pretrain.train.metrics import read_metrics
from tests.evaluation.test_tasks import request, write_requests
from tests.train.forked import Run, train
from tools import convert_to_hf, evaluate, hf_folder

CONFIG = """
model:
  {family: parcae, vocab_size: 270, context_length: 32, width: 32, num_heads: 2, ffn_width: 32, prelude_layers: 1,
   core_layers: 1, coda_layers: 1, recurrence: {mean_loops: 3}}
data: {path: FOLDER/data, num_workers: 0}
train: {max_steps: 3, global_batch_size: 8, micro_batch_size: 4, precision: fp32, activation_checkpointing: none}
schedule: {warmup_steps: 0}
validation: {rows: 20}
evaluation:
  {tasks: [choice, "text:FOLDER/held_out.txt"], task_data: FOLDER/tasks, num_loops: [1, 3], every_steps: 2,
   batch_tokens: 64}
logging: {wandb: disabled}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, a task of 9 documents, a text, and the configuration of a run on them."""
    folder = tmp_path_factory.mktemp("evaluated")
    words, rng = ["the", "loop", "reads", "its", "state", "twice", "and", "halts"], random.Random(0)

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length)) + "."

    (folder / "text.txt").write_text("\n\n".join(text(40) for _ in range(200)))
    (folder / "held_out.txt").write_text(text(100))
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", vocab_size=270)
    build(
        BuildSettings(
            inputs=(str(folder / "text.txt"),), tokenizer=folder / "tokenizer", out=folder / "data", row_tokens=33,
            validation_fraction=0.2, text_format=TextFormat(separator="\n\n"),
        )
    )  # fmt: skip
    write_requests(
        folder / "tasks" / "choice", [request(d, i, f" {text(2 + d % 4)}", d % 2) for d in range(9) for i in (0, 1)]
    )
    (folder / "run.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def evaluations(run: Run) -> list[dict[str, float]]:
    return run.column("evaluation")


def test_a_compiled_run_measures_what_an_eager_one_does(folder: Path, tmp_path: Path) -> None:
    """Loop counts of tokens, documents, validation at several counts, the probe, and tasks of all lengths."""
    settings = (
        "train.max_steps=2", "model.recurrence.granularity=token", "data.mask_document_boundaries=true",
        "probe.every_steps=1", "validation.num_loops=[1,3,5]", "validation.every_steps=1",
    )  # fmt: skip
    patch = "tests.train.patches:compile_without_kernels"
    compiled = train(folder / "run.yaml", tmp_path / "one", *settings, "train.compile=true", patch=patch).check()
    eager = train(folder / "run.yaml", tmp_path / "two", *settings).check()
    assert compiled.column("loss") == pytest.approx(eager.column("loss"), rel=1e-5)
    assert compiled.column("probe_loss") and compiled.column("val_loss") and evaluations(compiled)
    for name in ("val_loss", "evaluation"):
        for own, expected in zip(compiled.column(name), eager.column(name), strict=True):
            assert own == pytest.approx(expected, rel=1e-4)
    for own, expected in zip(compiled.column("probe_loss"), eager.column("probe_loss"), strict=True):
        assert own == pytest.approx(expected, rel=1e-4)


def test_every_layout_scores_what_the_tool_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / "run.yaml"
    one = train(config, folder / "one").check()
    assert [row["step"] for row in one.rows if "evaluation" in row] == [2, 3]
    for name, settings in (
        ("zero3", ("zero.stage=3",)),
        ("tp", ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    ):
        other = train(config, folder / name, *settings, world=2).check()
        for own, expected in zip(evaluations(other), evaluations(one), strict=True):
            assert own == pytest.approx(expected, rel=1e-5)
    assert "evaluation of 2 tasks" in one.log

    arguments = [
        str(one.folder), "--tasks", f"loss,choice,text:{folder / 'held_out.txt'}", "--task-data", str(folder / "tasks"),
        "--num-loops", "3,1", "--rows", "20",
    ]  # fmt: skip
    assert evaluate.main(arguments) == 0
    result = json.loads((one.folder / "evaluation" / "evaluation.json").read_text())
    last = evaluations(one)[-1]
    for key, value in last.items():
        task, metric, loops = key.rsplit("/", 2)
        assert result["tasks"][task]["by_loops"][loops][metric] == pytest.approx(value, rel=1e-6)
    losses = {t: values["loss"] for t, values in result["tasks"]["loss"]["by_loops"].items()}
    validation = [row["val_loss"] for row in read_metrics(one.folder / "metrics.jsonl") if "val_loss" in row][-1]
    assert losses == pytest.approx({t: validation[t] for t in ("1", "3")}, rel=1e-6)
    assert (one.folder / "evaluation" / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert "| choice | acc |" in capsys.readouterr().out
    assert evaluate.main(arguments) == 2 and "there are results" in capsys.readouterr().err

    exported = folder / "exported"
    exported.mkdir()
    hf_folder.write_folder(convert_to_hf.load_export(one.folder, "fp32", None, "5GB"), exported)
    arguments[0] = str(exported)
    assert evaluate.main(arguments) == 2 and "--data: expected the folder of a data set" in capsys.readouterr().err
    assert evaluate.main([*arguments, "--data", str(folder / "data")]) == 0
    of_export = json.loads((exported / "evaluation" / "evaluation.json").read_text())
    assert of_export["tasks"] == result["tasks"] and of_export["step"] is None
    with (exported / "tokenizer.json").open("a") as file:
        file.write("\n")
    other = [*arguments, "--data", str(folder / "data"), "--out", str(folder / "other")]
    assert evaluate.main(other) == 2 and "made with the model's tokenizer" in capsys.readouterr().err


def test_bad_tasks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(folder / "run.yaml", tmp_path / "run", "train.max_steps=1", "evaluation.tasks=[]").check()
    out, file = tmp_path / "out", tmp_path / "file"
    file.write_text("")
    for arguments, message in (
        (("--tasks", "choise"), "unknown task 'choise'"),
        (("--tasks", "core", "--core-bundle", "/nowhere"), "core.yaml: not there"),
        (("--tasks", "text:/nowhere"), "no such file"),
        (("--tasks", "loss", "--out", str(file / "out")), f"expected a folder that can be written; {file} cannot"),
    ):
        tasks = ["--task-data", str(folder / "tasks"), "--out", str(out), *arguments]
        assert evaluate.main([str(run.folder), *tasks]) == 2
        assert message in capsys.readouterr().err and not out.exists()

    take = FolderLock.take

    def take_late(lock: FolderLock) -> None:
        """As where another evaluation has ended while this one read the model."""
        take(lock)
        (out / "evaluation.json").write_text("{}")

    monkeypatch.setattr(FolderLock, "take", take_late)
    task = f"text:{folder / 'held_out.txt'}"
    assert evaluate.main([str(run.folder), "--tasks", task, "--out", str(out)]) == 2
    assert "there are results" in capsys.readouterr().err and (out / "evaluation.json").read_text() == "{}"


def test_a_task_that_comes_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["runs/x", "--tasks", "loss,loss"])
    assert "--tasks loss,loss: one of them comes twice" in capsys.readouterr().err


@pytest.mark.parametrize("loops", ["0", "-1", "1,x", ""])
def test_bad_loop_counts(loops: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["runs/x", "--tasks", "loss", f"--num-loops={loops}"])
    assert "expected integers >= 1 and <= 4_096, with commas between" in capsys.readouterr().err


def test_a_run_with_an_unknown_task_does_not_start(folder: Path, tmp_path: Path) -> None:
    run = train(folder / "run.yaml", tmp_path / "run", "evaluation.tasks=[choise]")
    assert run.codes == [2] and "unknown task 'choise'" in run.outputs[0]
