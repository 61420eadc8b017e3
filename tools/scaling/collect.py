"""From run folders to one table: a row for each run and loop count. What cannot count is listed, never guessed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from pretrain.accounting import StepWork, model_flops
from pretrain.config.load import diff_configs, load_config
from pretrain.config.schema import Config
from pretrain.data.manifest import MANIFEST_NAME, Manifest, read_manifest_file
from pretrain.errors import ConfigError, PretrainError
from pretrain.planning import expected_work
from pretrain.train.metrics import METRICS_NAME, read_metrics
from tools.scaling.plan import PlannedRun
from tools.scaling.readings import Size

EVALUATION = Path("evaluation") / "evaluation.json"
"""Below a run's folder, where tools/evaluate.py puts it."""
MAX_SKIPPED = 0.01
"""Share of steps that a run may have skipped: they are in its FLOPs and its tokens and taught it nothing."""
MAX_DIFFERENCE = 2e-3
"""Of ln L at one loop count between a run's validation and its later evaluation: rounding, not other data."""
_NOT_ROWS = ("sources", "compression", "shard_bytes")
"""Arguments of a data set's build that do not decide its rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The loss of one run at one loop count. Columns of the table."""

    run: str
    size: str
    """What is the same along an iso-FLOP curve: the plan's size, or width and layers."""
    family: str
    constraint: str | None
    """fixed_parameters or fixed_layers, by the plan."""
    budget_flops: float | None
    """By the plan."""
    mean_loops: float
    """mu, as configured."""
    core_layers: int
    params_once: int
    params_recurrent: int
    params_embedding: int
    params_value_tables: int
    params_head: int
    seed: int
    steps: int
    tokens: int
    flops: float
    """Model FLOPs of the loops that the run drew."""
    num_loops: int
    """T of the evaluation."""
    loss: float
    """Validation loss at the last step, nats per token."""
    tokenizer: str
    """sha256 of tokenizer.json."""
    validation: str
    """Data set and rows of the loss."""
    folder: str

    @property
    def at_mean(self) -> bool:
        """Whether this is the run's loss at its own mean loops."""
        return self.num_loops == max(1, round(self.mean_loops))

    @property
    def parameters(self) -> Size:
        """The parameter counts."""
        return Size(*(getattr(self, name) for name in Size._fields))


@dataclass(frozen=True)
class Excluded:
    """A run, or a loss, that is not in the table."""

    run: str
    why: str


class _OutError(Exception):
    """Why a run is left out."""


def collect(
    folders: Sequence[Path], plan: Sequence[PlannedRun] | None = None, family: str | None = None
) -> tuple[list[Row], list[Excluded]]:
    """Rows of all usable runs, and the others with reasons; `family` leaves out every other one.

    Errors: ConfigError where nothing is left, or where runs cannot be compared: several families, tokenizers or
    validation sets.
    """
    rows: list[Row] = []
    excluded: list[Excluded] = []
    kept: list[tuple[str, Config]] = []
    planned = None if plan is None else {run.name: run for run in plan}
    for folder in folders:
        try:
            cfg = _config(folder)
            if family is not None and cfg.model.family != family:
                raise _OutError(f"its family is {cfg.model.family}, asked for is {family}")
            own = None if planned is None else _planned(cfg, planned)
            found, lost = _rows(folder, cfg, own)
            _refuse_duplicate(cfg, kept)
        except (_OutError, PretrainError) as error:
            excluded.append(Excluded(str(folder), str(error)))
            continue
        kept.append((str(folder), cfg))
        rows += found
        excluded += [Excluded(str(folder), why) for why in lost]
    absent = {run.name for run in plan or ()} - {folder.name for folder in folders}
    excluded += [Excluded(name, "planned, and no folder of that name was given") for name in sorted(absent)]
    _refuse_mixture(rows, excluded)
    return rows, excluded


def _config(folder: Path) -> Config:
    if not (folder / "config.yaml").is_file():
        raise _OutError("not a run's folder: it has no config.yaml")
    return load_config(folder / "config.yaml")


def _planned(cfg: Config, planned: dict[str, PlannedRun]) -> PlannedRun:
    run = planned.get(cfg.run.name)
    if run is None:
        raise _OutError("not in the plan")
    per_step = model_flops(cfg.model, expected_work(cfg))
    found: list[tuple[str, Any, Any]] = [
        ("train.max_steps", cfg.total_steps, run.steps),
        ("tokens", cfg.total_steps * cfg.tokens_per_step, run.tokens),
        ("model.recurrence.mean_loops", cfg.model.recurrence.mean_loops, run.mean_loops),
        ("model.core_layers", cfg.model.core_layers, run.core_layers),
        ("train.seed", cfg.train.seed, run.seed),
        ("FLOPs per step", f"{per_step:.4g}", f"{run.flops / run.steps:.4g}"),
    ]
    differing = [f"{key}={is_} where the plan has {planned_}" for key, is_, planned_ in found if is_ != planned_]
    if differing:
        raise _OutError("not the planned run: " + ", ".join(differing))
    return run


def _refuse_duplicate(cfg: Config, kept: Iterable[tuple[str, Config]]) -> None:
    for folder, other in kept:
        if all(key.startswith("run.") for key, _, _ in diff_configs(cfg, other)):
            raise _OutError(f"a duplicate of {folder}: the same configuration but for run.*")
        if cfg.run.name == other.run.name:
            raise _OutError(f"run.name={cfg.run.name} is also that of {folder}, another run: rename one")


def _rows(folder: Path, cfg: Config, planned: PlannedRun | None) -> tuple[list[Row], list[str]]:
    """Rows of a run and the reasons for which losses are not among them."""
    metrics = read_metrics(folder / METRICS_NAME)
    steps = [row for row in metrics if "num_loops_mean" in row]
    validations = [row for row in metrics if "val_loss" in row]
    done = steps[-1]["step"] if steps else 0
    if done < cfg.total_steps:
        raise _OutError(f"incomplete: {done} of {cfg.total_steps} steps")
    if cfg.validation.rows == 0:
        raise _OutError("validation.rows=0: it trained without validation")
    if not validations or validations[-1]["step"] != cfg.total_steps:
        raise _OutError(f"no validation at its last step, {cfg.total_steps}")
    losses = {int(loops): loss for loops, loss in validations[-1]["val_loss"].items()}
    _refuse_divergence(cfg, steps, losses)
    more, problem = _evaluation(folder, cfg, losses)
    losses = more | losses
    model, data = cfg.model, cfg.data.all_sources
    manifests = [_manifest(Path(source.path)) for source in data]
    common: dict[str, Any] = {
        "run": cfg.run.name, "family": model.family, "mean_loops": model.recurrence.mean_loops,
        "size": planned.size if planned else _size_name(cfg), "constraint": planned.constraint if planned else None,
        "budget_flops": planned.budget_flops if planned else None, "core_layers": model.core_layers,
        **Size.of(model)._asdict(), "seed": cfg.train.seed, "steps": cfg.total_steps,
        "tokens": cfg.total_steps * cfg.tokens_per_step, "flops": run_flops(cfg, steps),
        "tokenizer": manifests[0].tokenizer.sha256, "folder": str(folder),
        "validation": "+".join(_split_name(manifest.source, source.path) for manifest, source in
                               zip(manifests, data, strict=True)) + f", {cfg.validation.rows} rows of "
                      f"{model.context_length}",
    }  # fmt: skip
    rows = [Row(**common, num_loops=loops, loss=loss) for loops, loss in sorted(losses.items()) if loss is not None]
    lost = [f"the loss at {loops} loops is not finite" for loops, loss in losses.items() if loss is None]
    return rows, lost + ([problem] if problem else [])


def _evaluation(
    folder: Path, cfg: Config, validated: dict[int, float | None]
) -> tuple[dict[int, float | None], str | None]:
    """Losses at further loop counts, by tools/evaluate.py in the run's folder; or why they do not count."""
    path = folder / EVALUATION
    if not path.is_file():
        return {}, None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        task = record["tasks"]["loss"]
        losses = {int(loops): _finite(values["loss"]) for loops, values in task["by_loops"].items()}
        step, rows = record["step"], task["num_requests"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{EVALUATION} holds no task `loss` of tools/evaluate.py ({type(error).__name__}: {error})"
    if (step, rows) != (cfg.total_steps, cfg.validation.rows):
        return {}, (
            f"{EVALUATION} is of step {step} and {rows} validation rows, the run ended at {cfg.total_steps} and has "
            f"{cfg.validation.rows}: evaluate with --rows {cfg.validation.rows}"
        )
    both = [(loops, loss, own) for loops, loss in losses.items() if loss and (own := validated.get(loops))]
    if not both:
        return {}, f"{EVALUATION} has no loop count of the run's validation: evaluate at {sorted(validated)} too"
    for loops, loss, own in both:
        if abs(math.log(loss / own)) > MAX_DIFFERENCE:
            return {}, (
                f"{EVALUATION} has the loss {loss:.4f} at {loops} loops where the run's validation has {own:.4f}: "
                "evaluate on the run's own data (of several sources it sees the first alone)"
            )
    return losses, None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _refuse_divergence(cfg: Config, steps: Sequence[dict[str, Any]], losses: dict[int, float | None]) -> None:
    loops = cfg.model.recurrence.default_loops
    if loops not in losses:
        raise _OutError(f"no validation loss at its mean loops, {loops}: validation.num_loops={sorted(losses)}")
    loss, uniform = losses[loops], math.log(cfg.model.vocab_size)
    if loss is None or steps[-1].get("loss") is None:
        raise _OutError("diverged: its last loss is not finite")
    if loss >= uniform:
        raise _OutError(f"diverged: its loss {loss:.3f} is not below {uniform:.3f}, that of the uniform distribution")
    skipped = steps[-1].get("skipped_steps", 0)
    if skipped > MAX_SKIPPED * cfg.total_steps:
        raise _OutError(f"diverged: {skipped} of {cfg.total_steps} steps were skipped as not finite")


def run_flops(cfg: Config, steps: Sequence[dict[str, Any]]) -> float:
    """Model FLOPs of a run, from the mean loops that each step drew."""
    rows, expected = cfg.train.global_batch_size, expected_work(cfg)
    total = sum(row["num_loops_mean"] for row in steps) * rows
    grad = sum(row["grad_loops_mean"] for row in steps) * rows
    readouts = expected.readouts * len(steps)
    if cfg.loss.objective != "terminal":  # several per row, as many as its gradient loops allow
        readouts *= grad / (expected.grad_loops * len(steps))
    return model_flops(cfg.model, StepWork(len(steps) * rows, total - grad, grad, readouts))


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise _OutError(f"its tokenizer is not known: data.path={folder}: no {MANIFEST_NAME}")
    return read_manifest_file(path)


def _size_name(cfg: Config) -> str:
    model = cfg.model
    return f"d{model.width} {model.prelude_layers}/{model.core_layers}/{model.coda_layers}"


def _split_name(source: dict[str, Any], path: str) -> str:
    """A name that stays when a data set is copied: the hash of what decides its rows, or else its folder."""
    arguments = {key: value for key, value in source.get("arguments", {}).items() if key not in _NOT_ROWS}
    if "files_sha256" not in arguments:
        return path
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:12]


def _refuse_mixture(rows: Sequence[Row], excluded: Sequence[Excluded]) -> None:
    if not rows:
        reasons = "; ".join(f"{item.run}: {item.why}" for item in excluded) or "no folders were given"
        raise ConfigError(f"collect: no usable run: {reasons}")
    kinds: tuple[tuple[str, Callable[[Row], str], str], ...] = (
        ("family", lambda row: row.family, "give --family, or collect them apart"),
        ("tokenizer", lambda row: row.tokenizer[:12], "losses per token of different tokenizers cannot be compared"),
        ("validation set", lambda row: row.validation, "evaluate all runs on the same rows"),
    )
    for name, key, mend in kinds:
        groups: dict[str, list[str]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row.run)
        if len(groups) > 1:
            found = "; ".join(f"{value}: {', '.join(dict.fromkeys(runs))}" for value, runs in groups.items())
            raise ConfigError(f"collect: expected runs of one {name}, found {found}; {mend}")


# ------------------------------------------------------------------------------------------------------------- files

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}
_POSITIVE = ("mean_loops", "tokens", "flops", "steps", "num_loops", "loss")


def _schema() -> pa.Schema:
    """The columns; those that a run without a plan leaves empty are nullable."""
    parts = {name: getattr(hint, "__args__", (hint,)) for name, hint in get_type_hints(Row).items()}
    return pa.schema([pa.field(item.name, _ARROW[parts[item.name][0]], type(None) in parts[item.name])
                      for item in fields(Row)])  # fmt: skip


def write_table(rows: Sequence[Row], path: Path) -> tuple[Path, Path]:
    """Writes PATH.parquet and PATH.csv and returns them."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], _schema())
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.stem if path.suffix in (".parquet", ".csv") else path.name
    parquet, text = (path.with_name(name + suffix) for suffix in (".parquet", ".csv"))
    pyarrow.parquet.write_table(table, parquet)
    pyarrow.csv.write_csv(table, text)
    return parquet, text


def read_table(path: Path) -> list[Row]:
    """The rows of a table that `collect` wrote, parquet or CSV. Errors: ConfigError naming the file."""
    schema = _schema()
    options = pyarrow.csv.ConvertOptions(column_types=schema, null_values=[""], strings_can_be_null=True)
    try:
        table = (pyarrow.csv.read_csv(path, convert_options=options) if path.suffix == ".csv"
                 else pyarrow.parquet.read_table(path))  # fmt: skip
        for field in schema:
            if field.name not in table.column_names:
                raise ConfigError(f"{path}: column {field.name} is missing; expected a table of `collect`")
            if not field.nullable and table[field.name].null_count:
                raise ConfigError(f"{path}: column {field.name} has empty cells; expected a table of `collect`")
        rows = [Row(**item) for item in table.select(schema.names).cast(schema).to_pylist()]
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read as parquet or CSV: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: it has no rows; expected a table of `collect`")
    for row in rows:
        for name in _POSITIVE:
            value = getattr(row, name)
            if not 0 < value < math.inf:
                raise ConfigError(
                    f"{path}: {name}={value} of {row.run} at {row.num_loops} loops: expected a positive number; "
                    "collect leaves such rows out"
                )
    return rows
