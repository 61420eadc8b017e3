"""The commands from plan to page, on a study with invented losses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from tests.tools.scaling.study import LOOPS, TINY, Written, invented_loss, write_study
from tools.scaling.collect import collect, read_table, write_table
from tools.scaling.fits import Settings, fit_table
from tools.scaling.plan import read_plan
from tools.scaling.predict import Latency, best_for_budget, constants_from, inputs_of, loops_for_loss, predict_loss
from tools.scaling.store import read_fits, write_fits
from tools.scaling.summary import curves_table
from tools.scaling_law import main

FAST = Settings(readings=("all",), starts=2, bootstraps=20)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def folder(written: Written) -> Path:
    """With runs.parquet and fits.json."""
    out = written.plan.parent.parent / "out"
    arguments = ["--plan", str(written.plan), "--out", str(out / "runs")]
    assert main(["collect", *map(str, written.folders), *arguments]) == 0
    rows = read_table(out / "runs.parquet")
    fits = fit_table(rows, ["iso_flop", "parametric", "unified"], FAST)
    last = [row for row in rows if row.run == written.runs[-1].name]
    fits.test_time = fit_table(last, ["test_time"], FAST).test_time
    write_fits(fits, out / "fits.json")
    return out


def test_fits_of_a_study(folder: Path) -> None:
    fits = read_fits(folder / "fits.json")
    assert len(fits.optima) == 2 and all(o.problem is None for _, o in fits.optima)
    exponents = fits.exponents["fixed_parameters"]
    assert 0 < exponents.loops < 1 and exponents.check == pytest.approx(1, abs=0.05)
    by_law = {item.fit.law.name: item for item in fits.laws if item.reading == "all"}
    assert by_law["unified"].fit.noise < 1e-4 < by_law["unified_unscaled"].fit.noise
    assert by_law["unified"].fit.held_out is not None and by_law["unified"].fit.held_out < 1e-3
    assert by_law["unified_learned"].fit.values["gamma"] == pytest.approx(1, abs=0.05)
    assert set(by_law) == {"parametric", "unified", "unified_learned", "unified_unscaled"}
    for curve in fits.test_time:
        assert curve.in_sample["exponential"] < 1e-5
        assert curve.out_of_sample["exponential"] < curve.out_of_sample["power"]


def test_how_far_the_loss_at_the_mean_is_from_the_floor(folder: Path) -> None:
    """Parcae's table 13. The losses are invented: 0.3 exp(-2 T / mu) above their floor."""
    fits = read_fits(folder / "fits.json")
    (curve,) = fits.test_time
    expected = 0.3 * math.exp(-2.0)
    assert curve.above_floor == pytest.approx(expected, rel=1e-3)
    assert curve.relative_gap == pytest.approx(expected / curve.loss[curve.num_loops.index(8)], rel=1e-3)
    fits.test_time.append(replace(curve, run="other", mean_loops=2.0))
    fits.test_time.append(replace(curve, run="nowhere", mean_loops=5.0))
    assert fits.test_time[2].above_floor is None
    table = curves_table(fits)
    gaps = {str(row[0]): row[table.columns.index("L(mu) - L_inf, nats")] for row in table.rows}
    at_two = 0.3 * math.exp(-0.5)
    assert gaps[curve.run] == f"{expected:.4f}" and gaps["nowhere"] == "-"
    assert gaps["largest difference"] == gaps["other"] == f"{at_two:.4f}"
    assert gaps["root mean square; of the differences, mean"] == f"{(expected + at_two) / 2:.4f}"


def test_the_page_needs_no_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(folder / "runs.parquet"), "--fits", str(folder), "--out", str(folder)]) == 0
    rows = read_table(folder / "runs.parquet")
    less, _ = write_table([row for row in rows if row.run != rows[0].run], folder / "less")
    assert main(["plot", str(less), "--fits", str(folder), "--out", str(folder / "less")]) == 2
    assert "parametric, tiny, N: all: expected a fit to the losses of the table" in capsys.readouterr().err
    page = (folder / "scaling.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page)
    pictures = re.findall(r'<img[^>]*src="data:image/png;base64,', page)
    assert len(pictures) == len(list(folder.glob("scaling_*.png"))) >= 8
    for title in ("Iso-FLOP curves", "How the optima grow", "Laws", "Loops at inference"):
        assert title in page


def test_predictions(folder: Path) -> None:
    cfg = load_config(TINY)
    unified = constants_from(str(folder), "unified", "tiny", "all")
    inputs = inputs_of(cfg, "all", 4, 5e5, 8)
    found = predict_loss(unified, cfg, 4, 5e5, 8)
    assert found.low is not None and found.high is not None
    assert found.value == pytest.approx(invented_loss(inputs), rel=1e-3) and found.low <= found.value <= found.high
    assert not any("extrapolates" in note for note in found.notes)
    assert any("extrapolates: tokens = 5e+09" in note for note in predict_loss(unified, cfg, 4, 5e9, 8).notes)
    target = invented_loss({**inputs, "num_loops": 5}) + 1e-3
    assert loops_for_loss(unified, inputs, target).value == 5
    with pytest.raises(ConfigError, match="--target-loss 1: expected at least"):
        loops_for_loss(unified, inputs, 1.0)
    parametric = constants_from(str(folder), "parametric", "tiny", "all")
    with pytest.raises(ConfigError, match="--num-loops=8"):
        predict_loss(parametric, cfg, 4, 5e5, 8)
    with pytest.raises(ConfigError, match=r"--num-loops=0: expected a number >= 1"):
        predict_loss(unified, cfg, 4, 5e5, 0)
    with pytest.raises(ConfigError, match=r"expected one fit, 4 match: parametric, tiny, N: all; unified, .*--law"):
        constants_from(str(folder), None, "tiny", "all")
    with pytest.raises(ConfigError, match=r"no fit of law parametric, size huge.*the file has parametric, tiny"):
        constants_from(str(folder), "parametric", "huge", "all")


def test_the_best_for_a_budget_is_where_the_law_is_lowest(folder: Path) -> None:
    unified, cfg = constants_from(str(folder), "unified", "tiny", "all"), load_config(TINY)
    best = best_for_budget(unified, cfg, 8e12)
    around = [best_for_budget(unified, cfg, 8e12 * x).mean_loops.value for x in (0.1, 10)]
    assert around[0] < best.mean_loops.value < around[1]
    [curve] = [optimum.curve for _, optimum in read_fits(folder).optima if optimum.curve.flops == 8e12]
    assert best.loss.value <= curve.loss.min() + 1e-4
    assert best.tokens.value == pytest.approx(curve.tokens_at(best.mean_loops.value), rel=0.05)


def test_published_constants(capsys: pytest.CaptureFixture[str]) -> None:
    parcae = constants_from("parcae_140m", None, None, "all")
    found = predict_loss(parcae, load_config(TINY.with_name("parcae_140m.yaml")), 8, 11.2e9, None)
    assert found.value == pytest.approx(2.9476 * 1.0095, rel=1e-3)
    assert found.low is not None and found.value - found.low == pytest.approx(1.96 * 0.013 * found.value)
    assert any("table 11" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"A, B not in arXiv 2604.21106"):
        constants_from("iso_depth", None, None, "all")
    with pytest.raises(ConfigError, match=r"expected a fits.json of `fit`, or one of parcae_140m"):
        constants_from("nowhere", None, None, "all")
    with pytest.raises(ConfigError, match=r"--law='unified': expected none, or parametric"):
        constants_from("parcae_140m", "unified", None, "all")
    unlooped = constants_from("unlooped", None, None, "all")
    assert "extrapolates: mean_loops = 8, the data cover 1 to 1" in unlooped.extrapolations({"mean_loops": 8})
    assert main(["predict", "--published-rows"]) == 0
    assert "| parcae_370m | parcae_370m | 2.6735 | +0.26% |" in capsys.readouterr().out
    gpt = ["predict", "--from", "parcae_140m", "--config", str(TINY.with_name("gpt_140m.yaml"))]
    assert main(gpt) == 0 and main([*gpt, "--flops", "1e18"]) == 2
    assert "--flops=1e+18: expected none, since model.family=gpt" in capsys.readouterr().err


def test_commands_of_prediction(folder: Path, written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["predict", "--from", str(folder), "--law", "unified", "--size", "tiny", "--config", str(TINY)]
    assert main([*common, "--mean-loops", "4", "--tokens", "5e5", "--num-loops", "8"]) == 0
    assert main([*common, "--flops", "8e12"]) == 0
    assert main([*common, "--latency-ms", "20", "--ms-per-loop", "1", "--ms-once", "2"]) == 0
    run = ["predict", "--from", str(folder), "--run", written.runs[-1].name]
    assert main([*run, "--latency-ms", "9", "--ms-per-loop", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"iso-FLOP optima, fixed_parameters, tiny: mean loops [\d.]+ \([\d.]+ to [\d.]+\)", out)
    assert re.search(r"loss at 4 loops [\d.]+ \([\d.]+ to [\d.]+\)", out)
    for text in ("loss ", "best mean loops ", "iso-FLOP optima, fixed_parameters, tiny", "loops within 20 ms: 18",
                 "loops within 9 ms: 4"):  # fmt: skip
        assert text in out
    assert main([*common, "--latency-ms", "2", "--ms-per-loop", "1", "--ms-once", "2"]) == 2
    assert main([*run]) == 2 and main(["predict"]) == 2
    for command, unused in (
        ([*common, "--flops", "8e12", "--mean-loops", "4", "--target-loss", "3"], "--flops: .*--mean-loops, --t"),
        ([*common, "--target-loss", "3", "--num-loops", "0"], "--target-loss: .*--num-loops"),
        ([*common, "--tokens", "5e5", "--ms-once", "1"], "predict: .*--ms-once"),
        ([*run, "--target-loss", "3", "--config", str(TINY)], "--run --target-loss: .*--config"),
        (["predict", "--published-rows", "--reading", "all"], "--published-rows: .*--reading"),
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert re.search(rf"{unused}.*; leave that out", capsys.readouterr().err)
    assert main(["predict", "--from", str(folder), "--run", "absent", "--target-loss", "3"]) == 2
    assert Latency(1.0, 0.1).loops_within(1.3) == 3


def test_what_cannot_be_fitted_is_refused_or_named(written: Written, folder: Path) -> None:
    plan = read_plan(written.plan)
    one, _ = collect(written.folders[:1], plan)
    with pytest.raises(ConfigError, match=r"1 mean loop count: .*parametric: 1 losses for 5 constants"):
        fit_table(one, ["iso_flop", "parametric"], FAST)
    two, _ = collect([path for path in written.folders if path.name.endswith(("mu2", "mu4"))], plan)
    with pytest.raises(ConfigError, match=r"2 mean loop counts: expected at least 3"):
        fit_table(two, ["iso_flop"], FAST)
    no_plan, _ = collect(written.folders)
    with pytest.raises(ConfigError, match="no budgets in the table"):
        fit_table(no_plan, ["iso_flop"], FAST)
    few = [row for row in one if row.num_loops <= 4]
    with pytest.raises(ConfigError, match=r"evaluated at 4 loop counts: expected at least 6"):
        fit_table(few, ["test_time"], FAST)
    partly = fit_table(one, ["iso_flop", "test_time"], FAST)
    assert len(partly.test_time) == 1 and any("mean loop count" in text for text in partly.not_fitted)


def test_the_commands_end_with_their_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.width=64", "model.num_heads=2", f"validation.num_loops={list(LOOPS)}"]
    plan = ["plan", str(TINY), "--mean-loops", "2", "4", "--out", str(tmp_path), *small]
    assert main([*plan, "--flops", "1e12"]) == 2
    assert "fewer than 200 steps" in capsys.readouterr().err
    assert main([*plan, "--flops", "4e12"]) == 0
    out = capsys.readouterr().out
    assert "constraint: fixed_parameters" in out and "GPU hours" in out and "--cluster local" in out
    assert f"'validation.num_loops={list(LOOPS)}'" in out
    with pytest.raises(SystemExit):
        main([*plan, "--flops", "4e12", "--colour"])
    assert main([*plan, "--flops", "4e12", "--out", str(TINY)]) == 2
    assert f"'{TINY}" in capsys.readouterr().err.splitlines()[-1]
    assert [run["mean_loops"] for run in json.loads((tmp_path / "plan.json").read_text())] == [2, 4]
    assert main(["fit", str(tmp_path / "none.parquet"), "--out", str(tmp_path)]) == 2
    assert main(["plot", str(tmp_path / "none.parquet"), "--fits", str(tmp_path), "--out", str(tmp_path)]) == 2
