"""A planned study with invented losses: run folders as training leaves them, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.load import load_config, save_resolved
from pretrain.config.schema import Config
from pretrain.data.manifest import Manifest, SplitInfo, TokenizerInfo
from pretrain.planning import expected_work
from tools.scaling.plan import PlannedRun, Study, write_plan
from tools.scaling.predict import inputs_of

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny.yaml"
LOOPS = (1, 2, 3, 4, 6, 8, 12, 16)
OVERRIDES = ("train.global_batch_size=8", f"validation.num_loops={list(LOOPS)}")
Losses = Callable[[dict[str, float]], float]


def invented_loss(v: dict[str, float]) -> float:
    """Constants for the tiny model, with an optimum near 2 loops and a floor in T."""
    loops = 0.3 * math.exp(-2.0 * v["num_loops"] / v["mean_loops"])
    return 1.5 + 800 * v["params"] ** -0.45 + 200 * v["tokens"] ** -0.4 + loops


@dataclass
class Written:
    """A study on disk."""

    runs: list[PlannedRun]
    plan: Path
    folders: list[Path]


def write_study(
    folder: Path, budgets: Sequence[float] = (2e12, 8e12), mean_loops: Sequence[float] = (1.5, 2, 4, 8),
    loss: Losses = invented_loss,
) -> Written:  # fmt: skip
    """Plans and "runs" a study below `folder`."""
    data = write_data_set(folder / "data")
    overrides = [*OVERRIDES, f"data.path={data}", f"run.dir={folder}"]
    runs = Study([str(TINY)], overrides, budgets, mean_loops, "fixed_parameters", min_steps=50).runs()
    write_plan(runs, overrides, folder / "plan")
    folders = [write_run(load_config(TINY, [*overrides, *run.overrides]), loss) for run in runs]
    return Written(runs, folder / "plan" / "plan.json", folders)


def write_data_set(folder: Path, tokenizer: str = "a" * 64, **arguments: object) -> Path:
    """A manifest alone; `arguments` are of its build."""
    split = SplitInfo(documents=1, tokens=1290, rows=10, dropped_tokens=0, padded_tokens=0, max_id=9, shards=1)
    info = TokenizerInfo(path="tokenizer", sha256=tokenizer, vocab_size=4096, bos_id=0, eos_id=1, pad_id=2)
    source = {"arguments": {"files_sha256": "c" * 64, **arguments}}
    splits = {"train": split, "validation": split}
    manifest = Manifest(dtype="uint16", row_tokens=129, tokenizer=info, splits=splits, source=source, seed=0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def write_run(cfg: Config, loss: Losses = invented_loss, steps: int | None = None) -> Path:
    """The folder of a run that ended after `steps` (default: all) steps, with the losses of its evaluation."""
    folder = Path(cfg.run.dir) / cfg.run.name
    save_resolved(cfg, folder / "config.yaml")
    work, rows = expected_work(cfg), cfg.train.global_batch_size
    done = cfg.total_steps if steps is None else steps
    mean, grad = (work.no_grad_loops + work.grad_loops) / rows, work.grad_loops / rows
    lines = [
        {"step": step, "loss": 3.0, "num_loops_mean": mean, "grad_loops_mean": grad, "skipped_steps": 0}
        for step in range(1, done + 1)
    ]
    mu, tokens = cfg.model.recurrence.mean_loops, cfg.total_steps * cfg.tokens_per_step
    losses = {str(t): loss(inputs_of(cfg, "all", mu, tokens, t)) for t in cfg.validation.num_loops}
    losses = {t: value if math.isfinite(value) else None for t, value in losses.items()}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"step": done, "val_loss": losses}])
    )
    return folder
