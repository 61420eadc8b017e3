"""From run folders to the table: what is left out, by name, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.accounting import count_parameters
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from tests.tools.scaling.study import LOOPS, OVERRIDES, TINY, Written, write_data_set, write_run, write_study
from tools.scaling.collect import collect, read_table, write_table
from tools.scaling.plan import TOLERANCE, read_plan


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_study(tmp_path_factory.mktemp("study"), budgets=(4e12,), mean_loops=(2, 4))


def test_a_row_for_each_run_and_loop_count(written: Written, tmp_path: Path) -> None:
    rows, excluded = collect(written.folders, read_plan(written.plan))
    assert not excluded and len(rows) == len(written.runs) * len(LOOPS)
    for run in written.runs:
        own = [row for row in rows if row.run == run.name]
        assert [row.num_loops for row in own] == list(LOOPS) and sum(row.at_mean for row in own) == 1
        row = own[0]
        assert (row.size, row.constraint, row.budget_flops) == ("tiny", "fixed_parameters", 4e12)
        assert row.flops == pytest.approx(row.budget_flops, rel=TOLERANCE)
        assert row.parameters.total == count_parameters(load_config(TINY).model).stored
        assert (row.tokens, row.steps, row.mean_loops) == (run.tokens, run.steps, run.mean_loops)
    parquet, text = write_table(rows, tmp_path / "runs")
    assert read_table(parquet) == rows
    assert read_table(text) == rows


def test_without_a_plan_there_is_no_budget(written: Written) -> None:
    rows, _ = collect(written.folders)
    assert {row.budget_flops for row in rows} == {None} and rows[0].size == "d128 1/2/1"


def other_run(folder: Path, *overrides: str, name: str = "other", **arguments: object) -> Path:
    data = folder / "data"
    if not data.exists():
        write_data_set(data)
    common = [*OVERRIDES, f"data.path={data}", f"run.dir={folder}", f"run.name={name}", "train.max_steps=60"]
    return write_run(load_config(TINY, [*common, *overrides]), **arguments)  # type: ignore[arg-type]


def test_unusable_runs_are_listed_with_reasons(written: Written, tmp_path: Path) -> None:
    good = other_run(tmp_path, name="good")
    bad = {
        "incomplete: 40 of 60 steps": other_run(tmp_path, name="short", steps=40),
        "diverged: its last loss is not finite": other_run(tmp_path, name="nan", loss=lambda v: float("nan")),
        "is not below 8.318": other_run(tmp_path, name="high", loss=lambda v: 9.0),
        "a duplicate of": other_run(tmp_path, name="twice"),
        "validation.rows=0: it trained without": other_run(tmp_path, "validation.rows=0", name="unvalidated"),
        "no validation loss at its mean loops, 5": other_run(tmp_path, "model.recurrence.mean_loops=5", name="mu5"),
        "not a run's folder": tmp_path / "data",
        "its tokenizer is not known": other_run(tmp_path, f"data.path={tmp_path}/gone", name="lost"),
    }
    skipped = other_run(tmp_path, "train.seed=3", name="skipped")
    rows = [json.loads(line) for line in (skipped / "metrics.jsonl").read_text().splitlines()]
    rows[-2]["skipped_steps"] = 5
    (skipped / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad["diverged: 5 of 60 steps were skipped"] = skipped
    bad["run.name=good is also that of"] = other_run(tmp_path, "train.seed=4", f"run.dir={tmp_path}/again", name="good")
    table, excluded = collect([good, *bad.values()])
    assert {row.run for row in table} == {"good"}
    assert [(item.run, reason in item.why) for item, reason in zip(excluded, bad, strict=True)] == [
        (str(folder), True) for folder in bad.values()
    ]


def test_a_loss_that_is_not_finite_leaves_the_others(tmp_path: Path) -> None:
    folder = other_run(tmp_path, loss=lambda v: float("inf") if v["num_loops"] == 1 else 3.0)
    rows, excluded = collect([folder])
    assert [row.num_loops for row in rows] == list(LOOPS[1:])
    assert [item.why for item in excluded] == ["the loss at 1 loops is not finite"]


def test_a_later_evaluation_adds_loop_counts(tmp_path: Path) -> None:
    folder = other_run(tmp_path)
    rows = load_config(folder / "config.yaml").validation.rows
    own = {row.num_loops: row.loss for row in collect([folder])[0]}
    task = {"num_requests": rows, "by_loops": {"1": {"loss": own[1] * 1.0005}, "5": {"loss": 3.5}}}
    (folder / "evaluation").mkdir()
    path = folder / "evaluation" / "evaluation.json"
    path.write_text(json.dumps({"step": 60, "tasks": {"loss": task}}))
    table, excluded = collect([folder])
    losses = {row.num_loops: row.loss for row in table}
    assert not excluded and losses == own | {5: 3.5}
    for step, tasks, why in (
        (40, {"loss": task}, f"is of step 40 and {rows} validation rows"),
        (60, {}, "holds no task `loss`"),
        (60, {"loss": task | {"by_loops": {"1": {"loss": 9.0}}}}, "has the loss 9.0000 at 1 loops where"),
        (60, {"loss": task | {"by_loops": {"5": {"loss": 3.5}}}}, "has no loop count of the run's validation"),
    ):
        path.write_text(json.dumps({"step": step, "tasks": tasks}))
        table, excluded = collect([folder])
        assert len(table) == len(LOOPS) and why in excluded[0].why


def test_runs_that_are_not_the_planned_ones(written: Written, tmp_path: Path) -> None:
    plan = read_plan(written.plan)
    other = other_run(tmp_path, name=plan[0].name)
    unknown = other_run(tmp_path, name="unknown")
    rows, excluded = collect([*written.folders[1:], other, unknown], plan)
    assert {row.run for row in rows} == {plan[1].name}
    reasons = {item.run: item.why for item in excluded}
    assert f"train.max_steps=60 where the plan has {plan[0].steps}" in reasons[str(other)]
    assert reasons[str(unknown)] == "not in the plan"
    _, excluded = collect(written.folders[1:], plan)
    assert [(item.run, item.why) for item in excluded] == [
        (plan[0].name, "planned, and no folder of that name was given")
    ]


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    good = other_run(tmp_path)
    rdm = other_run(tmp_path, "model.family=rdm", name="rdm")
    with pytest.raises(ConfigError, match=r"one family, found parcae: other; rdm: rdm; give --family"):
        collect([good, rdm])
    rows, excluded = collect([good, rdm], family="parcae")
    assert {row.run for row in rows} == {"other"} and "its family is rdm" in excluded[0].why
    data = write_data_set(tmp_path / "second", tokenizer="b" * 64)
    with pytest.raises(ConfigError, match=r"one tokenizer, found aaaaaaaaaaaa: other; bbbbbbbbbbbb: tok"):
        collect([good, other_run(tmp_path, f"data.path={data}", name="tok")])
    with pytest.raises(ConfigError, match="one validation set"):
        collect([good, other_run(tmp_path, "validation.rows=8", name="rows")])
    for name, arguments in (("copy", {"sources": ["elsewhere"]}), ("split", {"seed": 1})):
        data = write_data_set(tmp_path / name, **arguments)
        runs = [good, other_run(tmp_path, f"data.path={data}", "train.seed=2", name=name)]
        if name == "copy":
            assert len({row.validation for row in collect(runs)[0]}) == 1
        else:
            with pytest.raises(ConfigError, match="one validation set"):
                collect(runs)
    with pytest.raises(ConfigError, match=r"no usable run: .*gone: not a run's folder"):
        collect([tmp_path / "gone"])


def test_tables_that_are_none(written: Written, tmp_path: Path) -> None:
    rows, _ = collect(written.folders)
    parquet, text = write_table(rows, tmp_path / "runs-1.5e11")
    assert (parquet.name, text.name) == ("runs-1.5e11.parquet", "runs-1.5e11.csv")
    assert read_table(text) == rows == read_table(parquet)
    header, first, *others = text.read_text().splitlines()
    place = header.replace('"', "").split(",").index("loss")
    cells = first.split(",")

    def with_loss(value: str) -> str:
        return ",".join([*cells[:place], value, *cells[place + 1 :]])

    for lines, message in (
        ([header.replace("loss", "lass"), first], "column loss is missing"),
        ([header, with_loss("nan")], r"loss=nan of tiny-4e12-mu2 at 1 loops: expected a positive number"),
        ([header, with_loss("")], "column loss has empty cells"),
        ([header, with_loss("low"), *others], "cannot be read"),
        ([header], "it has no rows"),
    ):
        text.write_text("\n".join(lines) + "\n")
        with pytest.raises(ConfigError, match=message):
            read_table(text)
    parquet.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(parquet)
