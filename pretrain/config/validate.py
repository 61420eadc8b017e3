"""Rules that sections of a configuration must agree on, checked before torch is imported or a process group exists.

Every message names the key, its value, what was expected and the nearest setting that works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pretrain.config.bounds import require
from pretrain.config.families import FAMILIES
from pretrain.config.model import ModelConfig, RecurrenceConfig
from pretrain.config.schema import Config, TrainConfig

_DEEPEST = 10_000


def validate(cfg: Config, world_size: int | None) -> None:
    """Raises ConfigError where sections contradict each other or cannot run on `world_size` processes.

    With None the number of processes is unknown (a dry run on a login node) and the batch is not divided.
    """
    _check_length(cfg)
    _check_data(cfg)
    _check_family(cfg)
    _check_loss(cfg)
    _check_depths(cfg)
    _check_tensor(cfg)
    _check_pipeline(cfg)
    _check_zero(cfg)
    _check_compile(cfg)
    _check_checkpoints(cfg)
    _check_rewind(cfg)
    if world_size is not None:
        _check_batch(cfg.train, cfg.parallel.tensor, cfg.parallel.pipeline, world_size)
    else:
        _check_possible_batch(cfg.train, cfg.parallel.pipeline)


def require_validation(cfg: Config, what: str) -> None:
    """ConfigError where the run measures no validation losses, without which `what` has nothing to compare."""
    require(
        cfg.validation.rows > 0, "validation.rows", cfg.validation.rows,
        f"at least 1, since {what} compares validation losses",
    )  # fmt: skip


def _check_length(cfg: Config) -> None:
    total, train, schedule = cfg.total_steps, cfg.train, cfg.schedule
    source = "train.max_steps" if train.max_steps is not None else f"train.max_tokens / {cfg.tokens_per_step}"
    end = f"{total} ({source})"
    require(train.stop_step is None or train.stop_step <= total, "train.stop_step", train.stop_step, f"at most {end}")
    require(schedule.warmup_steps <= total, "schedule.warmup_steps", schedule.warmup_steps, f"at most {end}")
    if schedule.name == "trapezoid":
        decay = round(schedule.decay_fraction * total)
        require(
            schedule.warmup_steps + decay <= total, "schedule.warmup_steps", schedule.warmup_steps,
            f"at most {total - decay}: the last {decay} of {total} steps decay (schedule.decay_fraction="
            f"{schedule.decay_fraction})",
        )  # fmt: skip
    require(
        cfg.run.resume == "step" or cfg.run.resume_step is None, "run.resume_step", cfg.run.resume_step,
        f"null, since run.resume={cfg.run.resume}; run.resume=step resumes from exactly that step",
    )  # fmt: skip


def _check_data(cfg: Config) -> None:
    data = cfg.data
    require(
        bool(data.all_sources), "data.path", data.path,
        "the folder of a data set written by data_prep/build_shards.py, or several in data.sources",
    )  # fmt: skip
    remote = any(source.remote for source in data.all_sources)
    for key in ("cache_limit_bytes", "predownload_rows"):
        value = getattr(data, key)
        require(value is None or remote, f"data.{key}", value, "null, since no source is remote")


def _check_family(cfg: Config) -> None:
    """The family's name tells what carries the state from loop to loop; everything else about it may be changed."""
    model, recurrence = cfg.model, cfg.model.recurrence
    gpt, loops = model.family == "gpt", recurrence.default_loops
    require(
        recurrence.injection != "restart" or recurrence.feedback != "none" or loops == 1,
        "model.recurrence.feedback", "none",
        f"attention, attention_first or residual: with injection=restart nothing else carries the state, so that "
        f"mean_loops={recurrence.mean_loops:g} loops would all compute the first one",
    )  # fmt: skip
    for key in ("injection", "feedback"):
        value, expected = getattr(recurrence, key), _family_value(model.family, key)
        same = [name for name in FAMILIES if _family_value(name, key) == value]
        require(
            value == expected, f"model.recurrence.{key}", value,
            f"{expected}, which makes model.family={model.family}; families with {value}: {', '.join(same) or 'none'}",
        )  # fmt: skip
    require(
        recurrence.injection != "none" or recurrence.state_init == "input",
        "model.recurrence.state_init", recurrence.state_init,
        f"input, since nothing else brings e into the loops of model.family={model.family} (injection=none)",
    )  # fmt: skip
    if gpt:
        fixed = recurrence.distribution == "fixed" and recurrence.mean_loops == 1
        require(
            fixed, "model.recurrence.mean_loops", recurrence.mean_loops,
            "1 with distribution=fixed, since model.family=gpt runs each layer once; lt loops plain layers",
        )  # fmt: skip
    require(
        loops > 1 or recurrence.distribution != "fixed" or cfg.loss.objective == "terminal",
        "loss.objective", cfg.loss.objective, "terminal, since every row runs exactly one loop",
    )  # fmt: skip


def _check_loss(cfg: Config) -> None:
    """Weights go with their parameters and settings; terms that tie loops together need loops, on one rank."""
    loss, auxiliary, parallel = cfg.loss, cfg.model.auxiliary, cfg.parallel
    for schedule in loss.schedules:
        require(
            getattr(loss, schedule.term) > 0, f"loss.{schedule.term}", 0.0,
            "a weight > 0, since loss.schedules multiplies it with a factor",
        )  # fmt: skip
    terms = [schedule.term for schedule in loss.schedules]
    require(len(set(terms)) == len(terms), "loss.schedules", terms, "each term once")
    exits = loss.objective == "exit_weighted"
    for key, value, on, what in (
        ("state_predictor", auxiliary.state_predictor, loss.state_prediction > 0, "loss.state_prediction"),
        ("loop_heads", auxiliary.loop_heads, loss.loop_heads > 0, "loss.loop_heads"),
        ("exit_gate", auxiliary.exit_gate, exits, "loss.objective=exit_weighted"),
    ):  # fmt: skip
        expected = f"set, since {what} is on" if on else f"{value and type(value)()}, since {what} is off"
        require(bool(value) == on, f"model.auxiliary.{key}", value, expected)
    require(
        exits or loss.exit_entropy == 0, "loss.exit_entropy", loss.exit_entropy, "0, or loss.objective=exit_weighted"
    )
    width = cfg.model.width_of("core")
    require(
        loss.subspace_penalty == 0 or loss.subspace_rank <= width, "loss.subspace_rank", loss.subspace_rank,
        f"at most {width}, the width of the state; loss.norm_penalty takes all directions",
    )  # fmt: skip
    lags = {
        "state_prediction": loss.state_prediction_loops, "contrastive": 1, "loop_heads": auxiliary.loop_heads,
    }  # fmt: skip
    across = {f"loss.{key}": lag for key, lag in lags.items() if getattr(loss, key) > 0}
    across |= {"loss.objective=exit_weighted": 1} if exits else {}
    most = cfg.model.recurrence.most_backprop_loops
    for key, lag in across.items():
        require(
            most > lag, "model.recurrence.backprop_loops", most,
            f"at least {lag + 1}, since {key} ties loops together that get a gradient",
        )  # fmt: skip
        require(
            parallel.pipeline == 1 or key == "loss.loop_heads", "parallel.pipeline", parallel.pipeline,
            f"1, since {key} ties together loops whose graphs a pipeline keeps apart; loss.norm_penalty, "
            "loss.scale_anchor, loss.subspace_penalty and loss.loop_heads run with any parallel.pipeline",
        )  # fmt: skip
        require(
            not parallel.sequence_parallel or key in ("loss.loop_heads", "loss.state_prediction"),
            "parallel.sequence_parallel", True, f"false, since {key} needs whole rows on each rank",
        )  # fmt: skip


def _family_value(family: str, key: str) -> str:
    default = getattr(RecurrenceConfig(), key)
    value: str = FAMILIES[family]["recurrence"].get(key, default)
    return value


def _check_depths(cfg: Config) -> None:
    recurrence, name = cfg.model.recurrence, "model.recurrence."
    require(
        recurrence.max_loops is None or recurrence.max_loops >= recurrence.mean_loops, name + "max_loops",
        recurrence.max_loops, f"at least mean_loops={recurrence.mean_loops:g}, or null",
    )  # fmt: skip
    require(
        recurrence.distribution != "uniform" or float(2 * recurrence.mean_loops).is_integer(), name + "mean_loops",
        recurrence.mean_loops, "a multiple of 0.5, since distribution=uniform is on 1 .. 2 mean_loops - 1",
    )  # fmt: skip
    if recurrence.distribution == "lognormal_poisson":
        # Six standard deviations of the log-normal rate: the table of probabilities goes so far.
        deepest = recurrence.mean_loops * math.exp(6 * recurrence.lognormal_sigma)
        require(
            deepest <= _DEEPEST or recurrence.max_loops is not None, name + "max_loops", None,
            f"a bound, since mean_loops={recurrence.mean_loops:g} with lognormal_sigma={recurrence.lognormal_sigma:g} "
            f"draws up to {deepest:.0f} loops; it is needed beyond {_DEEPEST}",
        )  # fmt: skip
    require(
        recurrence.curriculum != "none" or recurrence.curriculum_steps == 0, name + "curriculum_steps",
        recurrence.curriculum_steps, "0, since curriculum=none; linear and one_minus_sqrt ramp mean_loops",
    )  # fmt: skip
    require(
        cfg.model.family != "gpt" or cfg.probe.num_loops in (None, 1), "probe.num_loops", cfg.probe.num_loops,
        "1 or null, since model.family=gpt runs each layer once",
    )  # fmt: skip
    for key, loops in (
        ("validation.num_loops", cfg.validation.num_loops), ("evaluation.num_loops", cfg.evaluation.num_loops),
    ):  # fmt: skip
        require(len(set(loops)) == len(loops), key, loops, "each loop count once")
        require(
            cfg.model.family != "gpt" or set(loops) <= {1}, key, loops,
            "[1] or [], since model.family=gpt runs each layer once",
        )  # fmt: skip


def _check_tensor(cfg: Config) -> None:
    model, tensor = cfg.model, cfg.parallel.tensor
    if tensor == 1:
        return
    for key, value in _sharded_sizes(model):
        require(
            value % tensor == 0, key, value,
            f"a multiple of parallel.tensor={tensor}; nearest: {key}={_nearest_multiples(value, tensor)}, or "
            f"parallel.tensor={_nearest_divisors(value, tensor)}",
        )  # fmt: skip
    require(
        model.padded_vocab_size % tensor == 0, "model.vocab_multiple", model.vocab_multiple,
        f"a multiple of parallel.tensor={tensor}, so that the {model.padded_vocab_size} padded rows can be shared out; "
        f"nearest: {_nearest_multiples(model.vocab_multiple, tensor)}",
    )  # fmt: skip
    require(
        not cfg.parallel.sequence_parallel or model.context_length % tensor == 0, "model.context_length",
        model.context_length,
        f"a multiple of parallel.tensor={tensor}, since parallel.sequence_parallel=true; nearest: "
        f"{_nearest_multiples(model.context_length, tensor)}",
    )  # fmt: skip


def _sharded_sizes(model: ModelConfig) -> Iterable[tuple[str, int]]:
    """Yields (key, size) of what tensor parallelism cuts, of the parts that have layers."""
    if model.prelude_layers + model.coda_layers > 0:
        yield "model.num_heads", model.heads_of("prelude")
        yield "model.num_kv_heads", model.kv_heads_of("prelude")
        yield "model.ffn_width", model.ffn_width_of("prelude")
    own_heads = model.core_num_heads is not None or model.core_width is not None
    yield "model.core_num_heads" if own_heads else "model.num_heads", model.heads_of("core")
    yield "model.num_kv_heads", model.kv_heads_of("core")
    yield "model.core_ffn_width" if model.core_ffn_width else "model.ffn_width", model.ffn_width_of("core")


def _check_pipeline(cfg: Config) -> None:
    model, pipeline = cfg.model, cfg.parallel.pipeline
    if pipeline == 1:
        return
    require(
        model.core_layers % pipeline == 0, "model.core_layers", model.core_layers,
        f"a multiple of parallel.pipeline={pipeline}, since every loop passes all pipeline ranks; nearest: "
        f"model.core_layers={_nearest_multiples(model.core_layers, pipeline)}, or parallel.pipeline="
        f"{_nearest_divisors(model.core_layers, pipeline)}",
    )  # fmt: skip
    require(
        not cfg.evaluation.tasks, "evaluation.tasks", cfg.evaluation.tasks,
        f"[], since parallel.pipeline={pipeline} takes rows of one length only; run tools/evaluate.py on the "
        "checkpoints instead",
    )  # fmt: skip
    require(
        model.recurrence.granularity != "token", "model.recurrence.granularity", "token",
        f"sequence or batch, since parallel.pipeline={pipeline} moves whole rows from loop to loop",
    )  # fmt: skip
    require(
        cfg.train.activation_checkpointing != "every_k_loops", "train.activation_checkpointing", "every_k_loops",
        f"loop, since parallel.pipeline={pipeline} cuts every loop at its ranks' borders, so that no group of loops is "
        "ever on one rank; or layer or none",
    )  # fmt: skip


def _check_zero(cfg: Config) -> None:
    stage, pipeline = cfg.zero.stage, cfg.parallel.pipeline
    require(
        stage <= 1 or pipeline == 1, "zero.stage", stage,
        f"1, since parallel.pipeline={pipeline}: its schedule adds up the gradients of all micro-batches outside "
        f"DeepSpeed, where stage {stage} would shard them too early; or keep the stage with parallel.pipeline=1",
    )  # fmt: skip
    require(
        not cfg.zero.overlap_comm or stage >= 2, "zero.overlap_comm", True,
        f"false, since zero.stage={stage} reduces gradients after backward; stages 2 and 3 overlap",
    )  # fmt: skip


def _check_compile(cfg: Config) -> None:
    """The compiled step is one graph without breaks, with no room for hooks or collectives between its layers."""
    if not cfg.train.compile:
        return
    parallel, stage = cfg.parallel, cfg.zero.stage
    require(
        parallel.tensor == 1, "train.compile", True,
        f"false, since parallel.tensor={parallel.tensor} has collectives inside every layer; or parallel.tensor=1",
    )  # fmt: skip
    require(
        parallel.pipeline == 1, "train.compile", True,
        f"false, since parallel.pipeline={parallel.pipeline} passes the state on in the middle of a loop; or "
        "parallel.pipeline=1",
    )  # fmt: skip
    require(
        stage < 3, "train.compile", True,
        f"false, since zero.stage={stage} gathers each module's parameters in hooks; or zero.stage=2",
    )  # fmt: skip
    require(
        cfg.train.activation_checkpointing != "layer", "train.activation_checkpointing", "layer",
        "loop, since train.compile=true compiles a whole loop as one graph; or every_k_loops or none",
    )  # fmt: skip


def _check_checkpoints(cfg: Config) -> None:
    keep, every = cfg.checkpoint.keep_every_steps, cfg.checkpoint.every_steps
    if keep is not None:
        require(
            every is not None and keep % every == 0, "checkpoint.keep_every_steps", keep,
            f"a multiple of checkpoint.every_steps={every}, or null" if every else
            "null, since checkpoint.every_steps=null saves at the end only",
        )  # fmt: skip


def _check_rewind(cfg: Config) -> None:
    if cfg.guards.on_spike != "rewind":
        return
    every, keep, steps = cfg.checkpoint.every_steps, cfg.checkpoint.keep_last, cfg.guards.rewind_steps
    require(
        every is not None, "checkpoint.every_steps", every,
        "a number of steps, since guards.on_spike=rewind goes back to such a checkpoint",
    )  # fmt: skip
    assert every is not None
    reach = (keep - 1) * every + 1  # at the step after a save, the oldest is so far back
    require(
        steps <= reach, "guards.rewind_steps", steps,
        f"at most {reach}, so far back as checkpoint.keep_last={keep} and checkpoint.every_steps={every} always reach; "
        f"or checkpoint.keep_last={-(-(steps - 1) // every) + 1}",
    )  # fmt: skip


def _check_batch(train: TrainConfig, tensor: int, pipeline: int, world_size: int) -> None:
    """World size = tensor x pipeline x data; global batch = data x micro-batches x micro batch."""
    model_ranks = tensor * pipeline
    layout = f"parallel.tensor={tensor} x parallel.pipeline={pipeline}"
    require(
        world_size % model_ranks == 0, "world size", world_size,
        f"a multiple of {layout} = {model_ranks}; start {_nearest_multiples(world_size, model_ranks)} processes",
    )  # fmt: skip
    data_ranks = world_size // model_ranks
    rows = train.global_batch_size
    require(
        rows % data_ranks == 0, "train.global_batch_size", rows,
        f"a multiple of the {data_ranks} data-parallel ranks ({world_size} processes / {layout}); nearest: "
        f"{_nearest_multiples(rows, data_ranks)}",
    )  # fmt: skip
    rank_rows = rows // data_ranks
    shares = f"train.global_batch_size={rows} / {data_ranks} data-parallel ranks"
    require(
        rank_rows % train.micro_batch_size == 0, "train.micro_batch_size", train.micro_batch_size,
        f"a divisor of the {rank_rows} rows per rank ({shares}); nearest: "
        f"{_nearest_divisors(rank_rows, train.micro_batch_size)}",
    )  # fmt: skip
    micro_batches = rank_rows // train.micro_batch_size
    per_round = [size for size in _divisors(rank_rows) if rank_rows // size % pipeline == 0]
    nearest = min(per_round, key=lambda size: (abs(size - train.micro_batch_size), size), default=None)
    mend = f"train.micro_batch_size={nearest}" if nearest else f"a global batch in multiples of {pipeline * data_ranks}"
    require(
        micro_batches % pipeline == 0, "train.micro_batch_size", train.micro_batch_size,
        f"one that gives a multiple of parallel.pipeline={pipeline} micro-batches; it gives {micro_batches} from "
        f"{rank_rows} rows per rank ({shares}); nearest: {mend}",
    )  # fmt: skip


def _check_possible_batch(train: TrainConfig, pipeline: int) -> None:
    """What no number of processes could run: they divide the rows among each other before micro-batches are cut."""
    rows, micro = train.global_batch_size, train.micro_batch_size
    unit = micro * pipeline
    require(
        rows % unit == 0, "train.micro_batch_size", micro,
        f"one that divides train.global_batch_size={rows} into a multiple of parallel.pipeline={pipeline} "
        f"micro-batches; nearest: {_nearest_divisors(rows // pipeline, micro) if rows % pipeline == 0 else 'none'}",
    )  # fmt: skip


def _nearest_multiples(value: int, of: int) -> str:
    """The multiples of `of` around `value`, as "a or b"."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(below + of)


def _nearest_divisors(value: int, near: int) -> str:
    """The divisors of `value` around `near`, as "a or b"."""
    below = max((d for d in _divisors(value) if d <= near), default=1)
    above = min((d for d in _divisors(value) if d > near), default=None)
    return f"{below} or {above}" if above else str(below)


def _divisors(value: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})
