"""Scores of a trained model on tasks and texts at several loop counts, from one pass over each batch.

    python -m tools.evaluate runs/tiny --tasks loss,piqa/rc_0shot,lambada/bpb_0shot --task-data DIR --num-loops 1,2,4,8
    torchrun --standalone --nproc_per_node 8 -m tools.evaluate MODEL --tasks core --core-bundle DIR --out results

Tasks: `loss` (the validation split of the run's first data set, or of --data), `text:PATH` (bits per byte of text
files), `depth:NAME` (problems of known depth), `core` (DCLM's 22 tasks), `lm_eval:NAME` (lm-evaluation-harness), and
any folder of written-out requests below --task-data (docs/evaluation.md). Writes evaluation.json, evaluation.md and
evaluation.png into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain.arguments import integer, integers, pathname
from pretrain.errors import ConfigError, PretrainError
from pretrain.evaluation.catalog import HARNESS_PREFIX, LOSS, open_tasks
from pretrain.evaluation.depth_task import SOLVED_DEPTH, fit_depths
from pretrain.evaluation.requests import Encoder
from pretrain.evaluation.run import TaskResult, core_by_loops, evaluate
from pretrain.files import require_writable, write_text
from pretrain.folder_lock import FolderLock
from pretrain.parallel.lost_contact import naming_lost_contact
from pretrain.train.callbacks.validation import usual_loops
from pretrain.train.inputs import Inputs
from tools.baselines import split_rows
from tools.loading import Trained, check_loops, data_folder, load_model

NAME = "evaluation"


def validation_loss(
    trained: Trained, data: Path, rows: int, num_loops: Sequence[int], batch_tokens: int, rank: int, size: int
) -> TaskResult:
    """Loss per token in nats and bits per byte over the first `rows` validation rows, as the training measures it."""
    cfg, model = trained.config, trained.model
    device = next(model.parameters()).device
    chosen = torch.from_numpy(split_rows(data, "validation")[:rows])
    if chosen.shape[1] != cfg.model.context_length + 1:
        raise ConfigError(
            f"{data}: rows of {chosen.shape[1]} tokens; expected {cfg.model.context_length + 1} "
            f"(model.context_length={cfg.model.context_length} and the last target)"
        )
    bos_id = trained.tokenizer.bos_token_id
    lengths = torch.tensor([len(text) for text in _byte_strings(trained)])
    sums = torch.zeros(len(num_loops) + 2, dtype=torch.float64, device=device)
    for part in chosen[rank::size].split(max(1, batch_tokens // cfg.model.context_length)):
        inputs = Inputs.of(part, cfg, bos_id, device)
        losses = model.loop_losses(
            inputs.tokens, inputs.labels, num_loops,
            document_ids=inputs.document_ids, positions=inputs.positions, segments=inputs.segments,
        )  # fmt: skip
        valid = inputs.labels >= 0
        sums[:-2] += losses.sum((1, 2), dtype=torch.float64)
        sums[-2] += valid.sum()
        sums[-1] += lengths.to(device)[inputs.labels[valid]].sum()
    if size > 1:
        dist.all_reduce(sums)
    *totals, num_tokens, num_bytes = sums.tolist()
    by_loops = {
        t: {"loss": total / num_tokens, "bpb": total / num_bytes / math.log(2)}
        for t, total in zip(num_loops, totals, strict=True)
    }
    return TaskResult(LOSS, "loss", by_loops, len(chosen), 0)


def _byte_strings(trained: Trained) -> list[str]:
    """What each id stands for, one character per byte (byte-level BPE); nothing for special tokens and padding."""
    tokenizer = trained.tokenizer
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    strings = ["" if i in special else token for i, token in enumerate(tokens)]
    return strings + [""] * (trained.config.model.vocab_size - len(strings))


def run_tasks(trained: Trained, args: argparse.Namespace, rank: int, size: int) -> list[TaskResult]:
    """All results, in the order of the command line; `core` and harness groups are several."""
    device = next(trained.model.parameters()).device
    encoder = Encoder(trained.tokenizer, trained.config.model.context_length)
    named = [name for name in args.tasks if name != LOSS and not name.startswith(HARNESS_PREFIX)]
    # All errors before the first pass.
    tasks = open_tasks(named, args.task_data, args.core_bundle, args.limit, args.depths)
    tasks, notes = fit_depths(tasks, encoder)
    if rank == 0:
        for note in notes:
            print(f"note: {note}")
    harness_names = [name.removeprefix(HARNESS_PREFIX) for name in args.tasks if name.startswith(HARNESS_PREFIX)]
    if harness_names:
        from tools import harness  # an optional package

        manager = harness.open_harness(harness_names, args.include_path)
    results = []
    if LOSS in args.tasks:
        data = data_folder(trained, args.data)
        results.append(validation_loss(trained, data, args.rows, args.num_loops, args.batch_tokens, rank, size))
    group = dist.group.WORLD if size > 1 else None
    common = {"batch_tokens": args.batch_tokens, "device": device, "group": group}
    results += evaluate(trained.model.loop_scores, tasks, encoder, args.num_loops, **common)
    if harness_names:
        model = harness.LoopedHarnessModel(trained, encoder, args.num_loops, **common)
        results += harness.run_harness(model, harness_names, manager, args.limit)
    return results


def table(results: Sequence[TaskResult], num_loops: Sequence[int]) -> str:
    """Markdown: a line for each task and metric, a column for each loop count T."""
    lines = [
        "| task | metric | " + " | ".join(f"T = {t}" for t in num_loops) + " |",
        "|---" * (len(num_loops) + 2) + "|",
    ]
    for result in results:
        for metric in result.by_loops[num_loops[0]]:
            cells = [f"{result.by_loops[t][metric]:.4f}" for t in num_loops]
            lines.append(f"| {result.task} | {metric} | " + " | ".join(cells) + " |")
    core = core_by_loops(results)
    if core:
        lines.append("| Core | mean centered | " + " | ".join(f"{core[t]:.4f}" for t in num_loops) + " |")
    return "\n".join(lines)


def plot(results: Sequence[TaskResult], path: Path) -> None:
    """A panel for each headline metric, its tasks over loops; then a heat map for each depth task."""
    from matplotlib.figure import Figure

    from tools.depth_grid import draw_heat_map

    metrics = sorted({result.headline for result in results})
    depth_results = [result for result in results if result.headline == SOLVED_DEPTH]
    panels = len(metrics) + len(depth_results)
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    every_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes, result in zip(every_axes[len(metrics) :], depth_results, strict=True):
        draw_heat_map(axes, result.by_loops, result.task)
    for axes, metric in zip(every_axes[: len(metrics)], metrics, strict=True):
        for result in (r for r in results if r.headline == metric):
            points = [(t, values[metric]) for t, values in result.by_loops.items()]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=result.task)
        axes.set(xlabel="loops", ylabel=metric)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def write(results: Sequence[TaskResult], args: argparse.Namespace, trained: Trained, sec: float) -> None:
    """The three files of --out; evaluation.json, which says that there are results, is the last."""
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "model": str(args.model), "step": trained.step, "num_loops": args.num_loops, "limit": args.limit, "sec": sec,
        "tasks": {r.task: r.to_json() for r in results},
        "core": {str(t): value for t, value in core_by_loops(results).items()},
    }  # fmt: skip
    (args.out / f"{NAME}.md").write_text(table(results, args.num_loops) + "\n")
    plot(results, args.out / f"{NAME}.png")
    write_text(args.out / f"{NAME}.json", json.dumps(record, indent=1) + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=pathname, help="folder of a run, of a checkpoint or of an exported model")
    parser.add_argument("--tasks", required=True, type=lambda text: text.split(","), help="names, with commas between")
    parser.add_argument("--num-loops", type=_counts, help="counts, with commas between (default: 1, 2, 4 and mu)")
    parser.add_argument("--out", type=pathname, help="folder for the results (default: MODEL/evaluation)")
    parser.add_argument("--task-data", type=pathname, help="folder with a folder of requests for each task")
    parser.add_argument("--core-bundle", type=pathname, help="folder with core.yaml, eval_meta_data.csv and eval_data/")
    parser.add_argument("--include-path", help="folder with lm-evaluation-harness task files")
    parser.add_argument("--data", type=pathname, help="data set of the task `loss` (default: the run's first)")
    parser.add_argument("--tokenizer", type=pathname, help="folder (default: the model's, or that of its data)")
    parser.add_argument("--rows", type=integer(1), default=512, help="validation rows of the task `loss` (%(default)s)")
    parser.add_argument("--limit", type=integer(1), help="documents of each task but loss and texts (default: all); "
                        "problems of each depth (default: 128)")  # fmt: skip
    parser.add_argument("--depths", type=_counts, default=[], help="of depth tasks, with commas between (default: of "
                        "1-8, 10, 12, 16, 20, 24 and 32 those that fit the context)")  # fmt: skip
    parser.add_argument("--batch-tokens", type=integer(1, 2**24), default=8_192, help="tokens in a batch (%(default)s)")
    args = parser.parse_args(argv)
    if len(set(args.tasks)) < len(args.tasks):
        parser.error(f"--tasks {','.join(args.tasks)}: one of them comes twice")
    args.out = args.out or args.model / NAME
    return args


def _require_no_results(out: Path) -> None:
    if out.is_file() or (out / f"{NAME}.json").exists():
        raise ConfigError(f"--out {out}: there are results, or it is a file; expected another folder")


def _counts(text: str) -> list[int]:
    return sorted(set(integers(1, 4_096)(text)))


def main(argv: Sequence[str]) -> int:
    """Evaluates, prints the table, writes the files; returns the exit code."""
    args = parse(argv)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda, lock = torch.cuda.is_available(), FolderLock(args.out)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    try:
        _require_no_results(args.out)
        require_writable(args.out, f"--out {args.out}")
        trained = load_model(args.model, device=device, tokenizer=args.tokenizer)
        args.num_loops = args.num_loops or usual_loops(trained.config.model)
        check_loops(trained.config.model, args.num_loops)
        started = time.monotonic()
        with naming_lost_contact():
            if size > 1:
                dist.init_process_group("nccl" if cuda else "gloo")
            if rank == 0:
                lock.take()
                _require_no_results(args.out)  # of an evaluation that has ended meanwhile
            results = run_tasks(trained, args, rank, size)
        if rank == 0:
            write(results, args, trained, time.monotonic() - started)
            print(table(results, args.num_loops))
            for result in results:
                if result.num_cropped:
                    print(
                        f"note: {result.task}: {result.num_cropped} of {result.num_requests} requests were longer than "
                        "the context; their beginnings were left out"
                    )
            print(f"{time.monotonic() - started:.0f} s; results in {args.out}")
    except PretrainError as error:
        print(f"evaluate: error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        lock.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
