"""The blind-spot report of small models: its numbers, its page, and what it says of bad input."""

from __future__ import annotations

import html.parser
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config.families import make_model_config
from pretrain.config.schema import LossConfig
from pretrain.data.manifest import tokenizer_sha256
from pretrain.folder_lock import FolderLock
from pretrain.model.looped import LoopedLM
from tests.helpers import exit_code_of
from tests.model.tiny import random_model
from tests.tools.models import CONTEXT, VOCAB, save_model, write_words
from tools import blindspot
from tools.baselines import split_rows
from tools.hf_folder import Export, write_folder
from tools.loading import load_model

LAYERS = {"prelude_layers": 1, "core_layers": 1, "coda_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "norm": ("blindspot", {}, {"core_layers": 1}),
    "final_norm": ("blindspot", {"readout": "final_norm"}, {"core_layers": 1}),
    "parcae": ("parcae", {"mean_loops": 3}, LAYERS),
    "gpt": ("gpt", {}, LAYERS),
    "overflow": ("rdm", {"mean_loops": 3}, LAYERS | {"block": "pre"}),
}


def make(name: str) -> LoopedLM:
    family, recurrence, layers = MODELS[name]
    cfg = make_model_config(
        family, recurrence, vocab_size=VOCAB, context_length=CONTEXT, width=16, num_heads=2, ffn_width=24,
        value_gate_channels=8, **layers,
    )  # fmt: skip
    model = random_model(cfg)
    if name == "overflow":  # finite weights whose state is not finite after five loops in fp32
        with torch.no_grad():
            model.injection.state.weight.copy_(1e8 * torch.eye(16))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and runs/NAME of every model, and a report of all of them in report/."""
    folder = tmp_path_factory.mktemp("blindspot")
    data = write_words(folder)
    for name in MODELS:
        model = make(name)
        save_model(folder / "runs", name, model.cfg, model, data, LossConfig(), step=40 if name == "norm" else 7)
    steps: list[dict[str, Any]] = [{"step": i + 1, "loss": 3.0, "grad_norm": math.exp(i % 2)} for i in range(40)]
    probe = {"probe_norm": {"1": 2.0, "4": 5.0}, "grad_norm_parts": {"core.0": 0.25}}
    steps += [{"step": step, **probe} for step in (20, 40)]
    steps.append({"step": 41, "loss": 99.0, "grad_norm": 1e9})  # after the checkpoint
    (folder / "runs" / "norm" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    out = folder / "report"
    models = [str(folder / "runs" / name) for name in MODELS]
    options = ["--loops", "5", "--rows", "12", "--repeats", "1", "--new-tokens", "20", "--subspace", "3"]
    assert blindspot.main([*models, "--data", str(folder / "data"), "--out", str(out), *options]) == 0
    return json.loads((out / "report.json").read_text())


def record(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(model for model in report["models"] if model["name"] == name)


@pytest.mark.parametrize("name", ["norm", "parcae", "gpt"])
def test_perplexity_at_each_k_is_that_of_a_separate_evaluation(report: dict[str, Any], folder: Path, name: str) -> None:
    measured = record(report, name)
    model = load_model(folder / "runs" / name).model
    rows = torch.from_numpy(split_rows(folder / "data", "validation")[:12])
    for k, ppl in enumerate(measured["ppl"], 1):
        losses = model.loop_losses(rows[:, :-1], rows[:, 1:], [k])
        assert ppl == pytest.approx(math.exp(float(losses.double().mean())), rel=1e-6)
    assert measured["one_pass_deviation"] < 1e-6
    assert len(measured["tokens_per_sec"]) == len(measured["ppl"]) == (1 if name == "gpt" else 5)


def test_what_the_readouts_see(report: dict[str, Any]) -> None:
    norm = [g["fraction"] for g in record(report, "norm")["gradients"]]
    last_only = [g["fraction"] for g in record(report, "final_norm")["gradients"]]
    assert max(norm) < 1e-5 and len(norm) == 4
    assert min(last_only[:3]) > 1e-2 and last_only[3] < 1e-5
    assert all(0 <= g["radial_share"] <= 1 for g in record(report, "parcae")["gradients"])
    spectrum = record(report, "norm")["singular_values"]
    assert len(spectrum) == 16 and 0 < spectrum[-1] < spectrum[0]


def test_scale_and_edits(report: dict[str, Any]) -> None:
    norm = record(report, "norm")
    assert norm["scale"]["1.0"] == pytest.approx(norm["loss"][3], rel=1e-6)
    assert norm["scale"]["10.0"] == pytest.approx(norm["loss"][3], rel=1e-3), "RMSNorm ignores the scale"
    assert norm["edits"]["clamp"][0] == norm["loss"][0], "the clamp starts at loop 2"
    assert norm["edits"]["clamp"][3] != norm["loss"][3]
    changes = {(i["subspace"], i["edit"]): i["logit_change"] for i in norm["interventions"]}
    assert changes["bottom 3", "noise"] < changes["top 3", "noise"]
    assert norm["training"]["oscillation"][-1] == pytest.approx(0.5) and norm["training"]["spikes"] == []
    assert norm["training"]["norms"][1] == {"step": 40, "1": 2.0, "4": 5.0}
    assert norm["training"]["grad_norm_parts"] == {"core.0": 0.25}
    assert norm["variance_over_loops"].keys() == {"radial", "bottom 3", "top 3"}


def test_what_does_not_apply_is_said(report: dict[str, Any], folder: Path) -> None:
    skipped = record(report, "gpt")["skipped"]
    assert set(skipped) == {"updates", "edits", "interventions", "training"} and "gpt" in skipped["updates"]
    page = (folder / "report" / "report.html").read_text()
    assert "gpt: the model runs each layer once" in page
    overflow = record(report, "overflow")
    assert overflow["ppl"][0] and overflow["ppl"][4] is None and len(overflow["generation"]) == 4
    assert "overflow: the loss after 5 loops is not finite" in page


class Page(html.parser.HTMLParser):
    """What a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: dict[str, str] = {}
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        if tag == "img":
            self.images[values["id"]] = values["src"]
        self.links += [values[key] for key in ("src", "href") if key in values]


def test_the_page_stands_alone_and_has_every_figure(report: dict[str, Any], folder: Path) -> None:
    page = Page((folder / "report" / "report.html").read_text())
    assert {path.stem for path in (folder / "report").glob("*.png")} == page.images.keys()
    assert len(page.images) == 10
    assert "trained with data.mask_document_boundaries" not in (folder / "report" / "report.html").read_text()
    assert all(link.startswith(("data:", "#")) for link in page.links) and "script" not in page.tags


def test_a_browser_shows_the_page(report: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Every image decodes, nothing is logged as an error, and nothing is asked of a network."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    page, copy = folder / "report" / "report.html", tmp_path / "page.html"
    # The page itself is without scripts: a copy counts its images once they are loaded, and what was fetched for it.
    probe = """<script>onload = () => {
      const images = [...document.images].filter(i => i.naturalWidth > 99).length
      const fetched = performance.getEntriesByType("resource").filter(r => !r.name.startsWith("data:")).length
      document.title = `images ${images}, fetched ${fetched}`
    }</script>"""
    copy.write_text(page.read_text().replace("</body>", probe + "</body>"))
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", copy.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "<title>images 10, fetched 0</title>" in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr


def test_an_exported_model_is_measured_as_the_run_that_it_came_from(folder: Path, tmp_path: Path) -> None:
    trained = load_model(folder / "runs" / "parcae")
    export = Export(
        cfg=trained.model.cfg, tensors=trained.model.state_dict(), dtype=torch.float32, card="", tokenizer=None
    )
    (tmp_path / "exported").mkdir()
    write_folder(export, tmp_path / "exported")
    options = ["--loops", "2", "--rows", "4", "--repeats", "1", "--new-tokens", "0", "--data", str(folder / "data")]
    models = [str(folder / "runs" / "parcae"), str(tmp_path / "exported")]
    assert blindspot.main([*models, "--out", str(tmp_path / "both"), *options]) == 0
    native, exported = json.loads((tmp_path / "both" / "report.json").read_text())["models"]
    assert native["ppl"] == exported["ppl"] and native["gradients"] == exported["gradients"]
    assert (native["step"], exported["step"], exported["objective"]) == (7, None, None)
    assert "exported" in exported["skipped"]["training"]


def test_one_loop(folder: Path, tmp_path: Path) -> None:
    data, run, out = folder / "data", folder / "runs" / "norm", tmp_path / "one"
    options = ["--loops", "1", "--rows", "4", "--repeats", "1", "--new-tokens", "0"]
    assert blindspot.main([str(run), "--data", str(data), "--out", str(out), *options]) == 0
    one = json.loads((out / "report.json").read_text())["models"][0]
    assert set(one["skipped"]) == {"updates", "edits", "generation"} and len(one["ppl"]) == 1


@pytest.mark.usefixtures("report")
def test_bad_input(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, out = folder / "data", folder / "runs" / "norm", tmp_path / "out"

    def message(*arguments: str | Path) -> tuple[int, str]:
        code = exit_code_of(blindspot.main, *arguments)
        return code, capsys.readouterr().err

    code, text = message(tmp_path / "absent", "--data", data, "--out", out)
    assert code == 2 and "absent" in text
    code, text = message(run, "--data", tmp_path / "nothing", "--out", out)
    assert code == 2 and "nothing" in text
    code, text = message(run, "--data", data, "--out", out, "--loops", "0")
    assert code == 2 and "argument --loops: 0: expected an integer >= 1" in text
    code, text = message(run, "--data", data, "--out", folder / "report")
    assert code == 2 and "--overwrite" in text
    code, text = message(run, "--data", data, "--out", data / "manifest.json")
    assert code == 2 and "it is a file" in text
    code, text = message(run, "--data", data, "--out", out, "--subspace", "9")
    assert code == 2 and "--subspace=9: expected at most 8" in text

    empty = tmp_path / "empty"
    shutil.copytree(data, empty)
    manifest = json.loads((empty / "manifest.json").read_text())
    with (empty / "tokenizer" / "tokenizer.json").open("a") as file:
        file.write("\n")
    manifest["tokenizer"]["sha256"] = tokenizer_sha256(empty / "tokenizer")
    (empty / "manifest.json").write_text(json.dumps(manifest))
    code, text = message(run, "--data", empty, "--out", out)
    assert code == 2 and "sha256" in text and "own tokenizer" in text
    del manifest["splits"]["validation"]
    (empty / "manifest.json").write_text(json.dumps(manifest))
    code, text = message(run, "--data", empty, "--out", out)
    assert code == 2 and "validation" in text and "rows" in text

    broken = make("norm")
    with torch.no_grad():
        broken.core["0"].mlp.up.weight[0, 0] = math.nan
    path = save_model(tmp_path, "broken", broken.cfg, broken, data, LossConfig())
    code, text = message(path, "--data", data, "--out", out)
    assert code == 4 and "core.0.mlp.up.weight" in text and "diverged" in text
    assert not out.exists()

    take = FolderLock.take

    def take_late(lock: FolderLock) -> None:
        """As where another report was written while this command waited."""
        take(lock)
        (out / "report.json").write_text("{}")

    monkeypatch.setattr(FolderLock, "take", take_late)
    code, text = message(run, "--data", data, "--out", out)
    assert code == 2 and "--overwrite" in text and (out / "report.json").read_text() == "{}"
