"""Is the recurrent state under control, do more loops help, and what does the readout see? A report on trained models.

    python -m tools.blindspot runs/tiny runs/other --data cache/demo --out reports/tiny
    python -m tools.blindspot runs/walk --data cache/walk --tasks depth:walk --loops 32 --out reports/walk

MODEL is a run's folder, a checkpoint's, or a model in Hugging Face form (exported, or imported from other authors). OUT
gets report.json (every number), a PNG for each figure, and report.html, one page that needs no network, with all models
side by side. docs/readout_blind_spot.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.arguments import integer, pathname
from pretrain.config.loss import LossConfig
from pretrain.data.manifest import TokenizerInfo, read_manifest
from pretrain.data.tokenizer_files import load_tokenizer
from pretrain.diagnostics.interventions import Clamp, Noise, RemoveRadial, ZeroSubspace
from pretrain.diagnostics.linear import linear_parts
from pretrain.diagnostics.measure import (
    LoopGradient,
    Rows,
    logit_change,
    readout_gradients,
    scale_sensitivity,
    trace_loops,
    variance_shares,
)
from pretrain.diagnostics.training import WINDOW_STEPS, gradient_oscillation, loss_spikes, repetition_rate
from pretrain.errors import CheckpointError, ConfigError, PretrainError
from pretrain.evaluation.catalog import open_tasks
from pretrain.evaluation.depth_task import DEPTH_PREFIX, fit_depths
from pretrain.evaluation.requests import Encoder, Task
from pretrain.evaluation.run import evaluate
from pretrain.files import write_text
from pretrain.folder_lock import FolderLock
from pretrain.model.looped import Edit, LoopedLM
from pretrain.model.subspace import Directions, readout_directions
from pretrain.train.checkpoint.folders import checkpoints_folder
from pretrain.train.metrics import METRICS_NAME, read_metrics
from tools.baselines import split_rows
from tools.generate import generate
from tools.hf_folder import is_hf_folder, read_config, read_folder
from tools.loading import load_model

SCALES = (0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 10.0)
NOISE = 0.01
EXACT_ROWS = 2
"""Rows of what runs in fp64: gradients, the change of whole logits, variances over loops."""
PROMPT_TOKENS = 4


@dataclass(frozen=True)
class Settings:
    """What a measurement takes."""

    loops: int = 8
    """K_max: loops of the one pass over the rows."""
    rows: int = 32
    batch_rows: int = 8
    subspace: int = 8
    """k of the bottom-k and top-k singular directions."""
    new_tokens: int = 64
    """Tokens to generate after each prompt; fewer where the context ends. 0: none."""
    repeats: int = 3
    """Timed passes for each K."""


Record = dict[str, Any]
"""One model's part of report.json: names and numbers."""


@dataclass(frozen=True)
class Opened:
    """A model to measure; None for what its folder does not tell."""

    model: LoopedLM
    loss: LossConfig | None = None
    step: int | None = None
    tokenizer_sha256: str | None = None
    within_documents: bool = False
    """Whether attention kept within documents during training."""


def open_model(path: Path, tokenizer: Path, device: torch.device | str) -> Opened:
    """The model of a run, a checkpoint or a folder in Hugging Face form. Errors: those of load_model, read_folder."""
    if is_hf_folder(path):
        cfg, tensors = read_folder(path)
        with torch.device("meta"):
            model = LoopedLM(cfg)
        model.load_state_dict(tensors, strict=True, assign=True)
        return Opened(model.to(device).eval(), tokenizer_sha256=read_config(path).get("tokenizer_sha256"))
    trained = load_model(path, device=device, tokenizer=tokenizer)
    data = trained.config.data
    own = None
    with contextlib.suppress(ConfigError):  # the data of the training need not be on this machine
        own = read_manifest(data.all_sources[0].path, shards_are_local=False).tokenizer.sha256
    return Opened(trained.model, trained.config.loss, trained.step, own, data.mask_document_boundaries)


class Measurement:
    """One model on the rows of one data set. `record` is everything, ready for JSON."""

    def __init__(
        self,
        name: str,
        opened: Opened,
        rows: Tensor,
        settings: Settings,
        run: Path | None,
        tasks: Sequence[Task] = (),
        tokenizer: Path | None = None,
    ) -> None:
        """`run` is the folder that has metrics of the training; None where there is none. `tasks` need `tokenizer`."""
        self.name, self.model, self.loss, self.step = name, opened.model, opened.loss, opened.step
        self.settings, self.run = settings, run
        self.can_loop = self.model.cfg.family != "gpt"
        self.num_loops = settings.loops if self.can_loop else 1
        self.trained_loops = self.model.cfg.recurrence.default_loops
        device = next(self.model.parameters()).device
        cut = rows[:, : self.model.cfg.context_length + 1].to(device)
        self.batches: list[Rows] = [(part[:, :-1], part[:, 1:]) for part in cut.split(settings.batch_rows)]
        self.directions: Directions = readout_directions(self.model)
        self.count = settings.subspace
        if self.count > (most := len(self.directions.values) // 2):
            raise ConfigError(f"--subspace={self.count}: expected at most {most}, half of the state's width in {name}")
        self.skipped: dict[str, str] = {}
        self.tasks: list[Task] = []
        if tasks and tokenizer is not None:
            self.encoder = Encoder(load_tokenizer(tokenizer), self.model.cfg.context_length)
            self.tasks, notes = fit_depths(tasks, self.encoder)
            if notes:
                self.skipped["depth"] = "; ".join(notes)
        if opened.within_documents:
            self.skipped["documents"] = (
                "trained with data.mask_document_boundaries=true; attention crosses the borders of documents here, so "
                "losses differ from the validation losses of the run"
            )

    @property
    def sample(self) -> Rows:
        """The few rows of fp64 work."""
        tokens, labels = self.batches[0]
        return tokens[:EXACT_ROWS], labels[:EXACT_ROWS]

    def record(self) -> Record:
        """Everything that applies; `skipped` says by section what does not, and why."""
        if not self.can_loop:
            reason = "the model runs each layer once (family gpt)"
            self.skipped |= dict.fromkeys(("updates", "edits", "interventions"), reason)
        elif self.num_loops == 1:
            self.skipped |= dict.fromkeys(("updates", "edits"), "--loops 1: there is no second loop to compare with")
        record = self._about() | self._by_loop() | self._exact() | self._frontier()
        record["scale"] = dict(
            zip(map(str, SCALES), scale_sensitivity(self.model, self.batches, self.read_loops, SCALES), strict=True)
        )
        record["edits"] = {} if "edits" in self.skipped else self._edits()
        record["interventions"] = [] if "interventions" in self.skipped else list(self._interventions())
        record["generation"] = list(self._generation(record["loss"]))
        record["depth"] = self._depth()
        record["training"] = self._training()
        return record | {"skipped": self.skipped}

    @property
    def read_loops(self) -> int:
        """The loops after which scale and interventions are read out: the trained number, if the pass is that long."""
        return min(self.trained_loops, self.num_loops)

    def _about(self) -> Record:
        cfg = self.model.cfg
        tokens, _ = self.batches[0]
        return {
            "name": self.name, "family": cfg.family, "readout": cfg.recurrence.readout, "step": self.step,
            "objective": self.loss.objective if self.loss else None,
            "norm_penalty": self.loss.norm_penalty if self.loss else None,
            "interloop_norm": cfg.recurrence.interloop_norm, "width": cfg.width_of("core"),
            "parameters": sum(p.numel() for p in self.model.parameters()), "trained_loops": self.trained_loops,
            "rows": sum(len(batch[0]) for batch in self.batches), "row_tokens": tokens.shape[1],
            "device": str(tokens.device), "compute_dtype": str(self.model.compute_dtype).removeprefix("torch."),
        }  # fmt: skip

    def _by_loop(self) -> Record:
        trace = trace_loops(self.model, self.batches, self.num_loops)
        losses = trace.loss.mean(1).tolist()
        changes = {name: getattr(trace, name).mean(1).tolist() for name in trace._fields[2:]}
        norms = [stats._asdict() for stats in trace.norms(self.model.cfg.width_of("core"))]
        ppl = [math.exp(min(loss, 700.0)) for loss in losses]
        return {"loss": losses, "ppl": ppl, "norms": norms, "updates": {} if "updates" in self.skipped else changes}

    def _exact(self) -> Record:
        """What needs fp64: by loop of a run of the trained length, the gradient through the loop's own readout."""
        exact = copy.deepcopy(self.model).double()
        exact.compute_dtype = torch.float64
        basis = self.directions.bottom(self.count)
        gradients = readout_gradients(exact, self.sample, self.read_loops, basis)
        bases = {"radial": None, f"bottom {self.count}": basis, f"top {self.count}": self.directions.top(self.count)}
        several = self.num_loops > 1
        shares = variance_shares(exact, self.sample[0], self.num_loops, list(bases.values())) if several else []
        return {
            "gradients": [_gradient(g) for g in gradients],
            "singular_values": self.directions.values.tolist(),
            "subspace": self.count,
            "variance_over_loops": dict(zip(bases, shares, strict=several)),
            "linear": linear_parts(self.model)._asdict(),
        }

    def _frontier(self) -> Record:
        """Tokens/s of separate K-loop passes, in turns; and how far their losses are from the one pass."""
        counts = range(1, self.num_loops + 1)
        tokens, labels = self.batches[0]
        one_pass = self.model.loop_losses(tokens, labels, list(counts)).mean((1, 2), dtype=torch.float64)
        seconds: dict[int, list[float]] = {k: [] for k in counts}
        deviation = 0.0
        for repeat in range(self.settings.repeats + 1):
            for k in counts:
                begin = _now(tokens)
                loss = self.model.loop_losses(tokens, labels, [k]).mean(dtype=torch.float64)
                spent = _now(tokens) - begin
                if repeat:  # the first round warms up
                    seconds[k].append(spent)
                deviation = max(deviation, abs(float(loss / one_pass[k - 1]) - 1))
        rates = [tokens.numel() / statistics.median(seconds[k]) for k in counts]
        return {"tokens_per_sec": rates, "one_pass_deviation": deviation}

    def _mean_losses(self, edit: Edit | None) -> list[float]:
        return trace_loops(self.model, self.batches, self.num_loops, edit).loss.mean(1).tolist()

    def _edits(self) -> Record:
        """Mean loss by K under the clamp and without radial updates."""
        return {"clamp": self._mean_losses(Clamp()), "remove_radial": self._mean_losses(RemoveRadial())}

    def _interventions(self) -> Iterator[Record]:
        bottom, top = self.directions.bottom(self.count), self.directions.top(self.count)
        below, above = f"bottom {self.count}", f"top {self.count}"
        edits: list[tuple[str, str, Edit]] = [
            ("radial", "removed from updates", RemoveRadial()), ("radial", "noise", Noise(None, NOISE)),
            (below, "zeroed", ZeroSubspace(bottom)), (below, "noise", Noise(bottom, NOISE)),
            (above, "zeroed", ZeroSubspace(top)), (above, "noise", Noise(top, NOISE)),
        ]  # fmt: skip
        base = trace_loops(self.model, self.batches, self.read_loops).loss[-1].mean()
        for subspace, what, edit in edits:
            loss = trace_loops(self.model, self.batches, self.read_loops, edit).loss[-1].mean()
            change = logit_change(self.model, self.sample[0], self.read_loops, edit)
            yield {"subspace": subspace, "edit": what, "loss_change": float(loss - base), "logit_change": change}

    def _generation(self, losses_by_loop: list[float]) -> Iterator[Record]:
        """Sampled at temperature 1, at each K: repetition, and the second half's loss and norm against the first's."""
        prompts = self.batches[0][0][:, :PROMPT_TOKENS]
        count = min(self.settings.new_tokens, self.model.cfg.context_length - PROMPT_TOKENS)
        if count < 16:
            self.skipped["generation"] = f"{max(count, 0)} new tokens (of the context or --new-tokens), 16 are needed"
            return
        for k in range(1, self.num_loops + 1):
            if not math.isfinite(losses_by_loop[k - 1]):
                self.skipped["generation"] = f"the loss after {k} loops is not finite, so nothing can be drawn there"
                continue
            tokens = generate(self.model, prompts, count, num_loops=k, seed=0)
            trace = trace_loops(self.model, [(tokens[:, :-1], tokens[:, 1:])], k)
            losses, norms = (x[-1].view(len(tokens), -1)[:, PROMPT_TOKENS:] for x in (trace.loss, trace.norm))
            half = count // 2
            yield {
                "loops": k,
                "repetition": repetition_rate(tokens[:, PROMPT_TOKENS:]),
                "loss_drift": float(losses[:, half:].mean() - losses[:, :half].mean()),
                "norm_drift": float(norms[:, half:].mean() / norms[:, :half].mean()),
            }

    def _depth(self) -> Record:
        """By depth task, then by loops: its metrics."""
        if not self.tasks:
            return {}
        found = evaluate(
            self.model.loop_scores, self.tasks, self.encoder, range(1, self.num_loops + 1),
            batch_tokens=self.batches[0][0].numel(), device=self.batches[0][0].device,
        )  # fmt: skip
        return {result.task: {str(t): metrics for t, metrics in result.by_loops.items()} for result in found}

    def _training(self) -> Record:
        """From the run's metrics.jsonl up to the checkpoint, where the model is in its run's folder."""
        if self.run is None:
            self.skipped["training"] = "an exported model's folder has no metrics of its training"
            return {}
        end = math.inf if self.step is None else self.step
        metrics = [row for row in read_metrics(self.run / METRICS_NAME) if row["step"] <= end]
        steps = [row for row in metrics if row.get("grad_norm") is not None]
        probes = [row for row in metrics if "probe_norm" in row]
        if len(steps) < 2:
            self.skipped["training"] = f"{self.run / METRICS_NAME} has no gradient norms up to the checkpoint"
            return {}
        if not probes:
            self.skipped["training"] = (
                "no probe of the state in training (probe.every_steps, validation.rows), so no norms by step"
            )
        norms = [float(row["grad_norm"]) for row in steps]
        losses = [math.nan if row["loss"] is None else float(row["loss"]) for row in steps]
        return {
            "steps": [row["step"] for row in steps],
            "grad_norms": norms,
            "oscillation": [gradient_oscillation(norms[max(0, i - WINDOW_STEPS) : i + 1]) for i in range(len(norms))],
            "spikes": [steps[i]["step"] for i in loss_spikes(losses)],
            "norms": [{"step": row["step"], **row["probe_norm"]} for row in probes],
            "grad_norm_parts": probes[-1].get("grad_norm_parts", {}) if probes else {},
        }


def _gradient(gradient: LoopGradient) -> Record:
    shares = {f"{name}_share": value for name, value in gradient.supervision._asdict().items()}
    return gradient.radial._asdict() | shares | {"expansion": gradient.expansion}


def _now(tokens: Tensor) -> float:
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def read_rows(data: Path, count: int) -> tuple[Tensor, TokenizerInfo]:
    """(validation rows int64 [at most count, row_tokens], the tokenizer) of a data set.

    Errors: ConfigError where it is none or has no validation rows, DataError for a broken shard.
    """
    rows = split_rows(data, "validation")[:count]
    return torch.from_numpy(rows), read_manifest(data).tokenizer


def measure(
    path: Path,
    name: str,
    data: Path,
    settings: Settings,
    device: torch.device | str = "cpu",
    tasks: Sequence[Task] = (),
) -> Record:
    """The record of one model, on depth `tasks` too.

    Errors: CheckpointError and ConfigError of what cannot be measured, with the reason.
    """
    rows, tokenizer = read_rows(data, settings.rows)
    opened = open_model(path, data / tokenizer.path, device)
    _check(opened, path, data, tokenizer)
    return Measurement(name, opened, rows, settings, _run_of(path), tasks, data / tokenizer.path).record()


def _run_of(path: Path) -> Path | None:
    """The run's folder of a run or of one of its checkpoints; None for a folder in Hugging Face form."""
    if is_hf_folder(path):
        return None
    return path if checkpoints_folder(path).is_dir() else path.resolve().parent.parent


def _check(opened: Opened, path: Path, data: Path, tokenizer: TokenizerInfo) -> None:
    model = opened.model
    if tokenizer.vocab_size > model.cfg.vocab_size:
        raise ConfigError(
            f"--data {data}: its tokenizer has {tokenizer.vocab_size} tokens, the model in {path} "
            f"{model.cfg.vocab_size}: give a data set made with the model's own tokenizer"
        )
    if opened.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise ConfigError(
            f"--data {data}: its tokenizer.json has sha256 {tokenizer.sha256}, that of the model in {path} "
            f"{opened.tokenizer_sha256}: give a data set made with the model's own tokenizer"
        )
    broken = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{path}: {len(broken)} of its parameters hold NaN or infinity (first: {broken[0]}): the run has diverged "
            "and nothing can be measured; take an earlier checkpoint"
        )


def names_of(paths: Sequence[Path]) -> list[str]:
    """A name for each model: its folder's, or the whole path where two would be the same."""
    short = [path.resolve().name for path in paths]
    return [name if short.count(name) == 1 else str(path) for name, path in zip(short, paths, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools.blindspot"
    )
    defaults = Settings()
    what = "folder of a run, of a checkpoint or of an exported model"
    parser.add_argument("models", type=pathname, nargs="+", metavar="MODEL", help=what)
    parser.add_argument("--data", type=pathname, required=True, help="data set whose validation split is measured on")
    parser.add_argument("--out", type=pathname, required=True, help="folder of the report")
    parser.add_argument("--tasks", default=[], type=lambda text: text.split(","), help="depth:NAME, commas between")
    parser.add_argument("--overwrite", action="store_true", help="replace a report that OUT holds")
    for name, what in (
        ("loops", "K_max"), ("rows", "rows to measure on"), ("batch_rows", "rows at a time"),
        ("subspace", "k of the bottom-k and top-k directions"), ("new_tokens", "tokens to generate; 0: none"),
        ("repeats", "timed passes for each K"),
    ):  # fmt: skip
        flag = "--" + name.replace("_", "-")
        least = 0 if name == "new_tokens" else 1
        parser.add_argument(
            flag, type=integer(least, 10**6), default=getattr(defaults, name), help=f"{what} (%(default)s)",
        )  # fmt: skip
    args = parser.parse_args(arguments)
    try:
        settings = Settings(**{name: getattr(args, name) for name in asdict(defaults)})
        if args.out.exists() and not args.out.is_dir():
            raise ConfigError(f"--out {args.out}: it is a file; expected a folder for the report")
        if other := [name for name in args.tasks if not name.startswith(DEPTH_PREFIX)]:
            raise ConfigError(f"--tasks {other[0]}: expected {DEPTH_PREFIX}NAME; tools.evaluate has the other tasks")
        tasks = open_tasks(args.tasks, None, None, None)
        if absent := [path for path in args.models if not path.is_dir()]:  # before minutes go into the others
            raise ConfigError(f"{absent[0]}: expected the folder of a run, of a checkpoint or of an exported model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        records = []
        with FolderLock(args.out):
            if any((args.out / name).exists() for name in ("report.json", "report.html")) and not args.overwrite:
                raise ConfigError(f"--out {args.out}: it holds a report; --overwrite replaces it")
            for path, name in zip(args.models, names_of(args.models), strict=True):
                records.append(measure(path, name, args.data, settings, device, tasks))
                print(f"measured {name}", flush=True)
            print(write_report(args.out, args.data, settings, records))
    except PretrainError as error:
        print(f"blindspot: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write_report(out: Path, data: Path, settings: Settings, records: list[Record]) -> Path:
    """Writes report.json, the figures and the page; returns the page's path."""
    from tools.blindspot_page import sections  # matplotlib
    from tools.report import write_page

    tree = {"data": str(data), "settings": asdict(settings), "models": records}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "report.json", json.dumps(finite(tree), indent=1, allow_nan=False) + "\n")
    return write_page(out, "Readout blind spot", f"Measured on validation rows of {data}.", sections(records))


def finite(value: Any) -> Any:
    """The value with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
