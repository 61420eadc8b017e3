"""What sections must agree on: each refusal names key, value, expectation and the nearest setting that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.config.families import FAMILIES
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.validate import validate
from pretrain.errors import ConfigError


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("config") / "mine.yaml"
    path.write_text("data: {path: somewhere}\ntrain: {max_steps: 100, global_batch_size: 32, micro_batch_size: 4}\n")

    def make(*overrides: str) -> Config:
        return load_config(path, overrides)

    return make


REFUSALS: list[tuple[str, int | None, tuple[str, ...]]] = [
    # length
    ("train.stop_step=101", None, ("train.stop_step=101", "at most 100 (train.max_steps)")),
    ("train.max_tokens=65536 train.stop_step=2", None, ("train.stop_step=2", "at most 1 (train.max_tokens / 65536)")),
    ("schedule.warmup_steps=101", None, ("schedule.warmup_steps=101", "at most 100")),
    ("schedule.warmup_steps=51", None, ("schedule.warmup_steps=51", "at most 50", "decay_fraction=0.5")),
    ("run.resume_step=5", None, ("run.resume_step=5", "run.resume=step")),
    # data
    ("data.path=null", None, ("data.path=None", "build_shards.py", "data.sources")),
    ("data.cache_limit_bytes=9", None, ("data.cache_limit_bytes=9", "no source is remote")),
    # families
    ("model.recurrence.injection=concat", None, ("injection='concat'", "diagonal", "families with concat: rdm")),
    ("model.family=flt model.recurrence.feedback=none", None, ("feedback='none'", "would all compute the first one")),
    ("model.recurrence.feedback=residual", None, ("feedback='residual'", "model.family=parcae", "flt_res")),
    ("model.family=lt model.recurrence.state_init=zero", None, ("state_init='zero'", "expected input", "family=lt")),
    ("model.family=gpt model.recurrence.state_init=unit", None, ("state_init='unit'", "injection=none")),
    ("model.family=blindspot model.recurrence.state_init=normal", None, ("='normal'", "family=blindspot")),
    ("model.family=gpt model.recurrence.mean_loops=4", None, ("mean_loops=4.0", "family=gpt", "lt loops")),
    ("model.family=gpt loss.objective=per_loop", None, ("loss.objective='per_loop'", "exactly one loop")),
    ("model.family=gpt validation.num_loops=[1,2]", None, ("validation.num_loops=[1, 2]", "family=gpt")),
    # depths
    ("model.recurrence.max_loops=7", None, ("max_loops=7", "at least mean_loops=8")),
    ("model.recurrence.distribution=uniform model.recurrence.mean_loops=2.3", None, ("mean_loops=2.3", "of 0.5")),
    ("model.recurrence.curriculum_steps=9", None, ("curriculum_steps=9", "curriculum=none")),
    ("validation.num_loops=[2,2]", None, ("validation.num_loops=[2, 2]", "once")),
    # tensor parallelism
    ("parallel.tensor=4", None, ("model.num_heads=6", "num_heads=4 or 8", "parallel.tensor=3 or 6")),
    ("parallel.tensor=2 model.num_kv_heads=3", None, ("model.num_kv_heads=3", "2 or 4")),
    ("parallel.tensor=2 model.ffn_width=3073", None, ("model.ffn_width=3073", "3072 or 3074")),
    ("parallel.tensor=2 model.core_ffn_width=3073", None, ("model.core_ffn_width=3073", "3072 or 3074")),
    ("parallel.tensor=2 model.core_width=896", None, ("model.core_num_heads=7", "6 or 8")),
    ("parallel.tensor=2 model.vocab_size=99 model.vocab_multiple=1", None, ("99 padded", "nearest: 2")),
    ("parallel.tensor=2 parallel.sequence_parallel=true model.context_length=99", None, ("=99", "98 or 100")),
    # pipeline
    ("parallel.pipeline=3", None, ("model.core_layers=2", "parallel.pipeline=3", "parallel.pipeline=2")),
    ("parallel.pipeline=2 model.recurrence.granularity=token", None, ("granularity='token'", "sequence or batch")),
    (
        "parallel.pipeline=2 train.activation_checkpointing=every_k_loops", None,
        ("activation_checkpointing='every_k_loops'", "loop, since parallel.pipeline=2"),
    ),
    ("model.family=gpt parallel.pipeline=4", None, ("model.core_layers=2", "parallel.pipeline=4")),
    # ZeRO
    ("parallel.pipeline=2 zero.stage=2", None, ("zero.stage=2", "1, since parallel.pipeline=2", "parallel.pipeline=1")),
    ("parallel.pipeline=2 zero.stage=3", None, ("zero.stage=3", "1, since parallel.pipeline=2")),
    ("zero.overlap_comm=true", None, ("zero.overlap_comm=True", "zero.stage=1")),
    # compilation
    ("train.compile=true parallel.tensor=2", None, ("train.compile=True", "false, since parallel.tensor=2")),
    ("train.compile=true parallel.pipeline=2", None, ("train.compile=True", "false, since parallel.pipeline=2")),
    ("train.compile=true zero.stage=3", None, ("train.compile=True", "false, since zero.stage=3", "zero.stage=2")),
    (
        "train.compile=true train.activation_checkpointing=layer", None,
        ("activation_checkpointing='layer'", "loop, since train.compile=true"),
    ),
    # checkpoints
    ("checkpoint.keep_every_steps=1500", None, ("keep_every_steps=1500", "a multiple of checkpoint.every_steps=1000")),
    ("checkpoint.every_steps=null checkpoint.keep_every_steps=5", None, ("keep_every_steps=5", "at the end only")),
    ("guards.on_spike=rewind checkpoint.every_steps=null", None, ("checkpoint.every_steps=None", "a number of steps")),
    (
        "guards.on_spike=rewind guards.rewind_steps=2002", None,
        ("guards.rewind_steps=2002", "at most 2001", "or checkpoint.keep_last=4"),
    ),
    # the number of processes and the batch
    ("parallel.tensor=2 parallel.pipeline=2", 6, ("world size=6", "x parallel.pipeline=2 = 4", "4 or 8")),
    ("", 3, ("train.global_batch_size=32", "the 3 data-parallel ranks", "nearest: 30 or 33")),
    ("train.micro_batch_size=5", 2, ("train.micro_batch_size=5", "16 rows per rank", "nearest: 4 or 8")),
    ("", 16, ("train.micro_batch_size=4", "2 rows per rank", "nearest: 2")),
    ("parallel.pipeline=2 train.micro_batch_size=32", 2, ("gives 1 from 32", "micro_batch_size=16")),
    ("parallel.pipeline=2 train.global_batch_size=33 train.micro_batch_size=3", 2, ("gives 11", "in multiples of 2")),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "fragments"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_refusals(make: Any, overrides: str, world_size: int | None, fragments: tuple[str, ...]) -> None:
    cfg = make(*overrides.split())
    with pytest.raises(ConfigError) as caught:
        validate(cfg, world_size)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_its_preset_has_it_is_accepted(make: Any, family: str) -> None:
    validate(make(f"model.family={family}"), 1)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ("parallel.tensor=2 parallel.pipeline=2", 8),
        ("parallel.tensor=3 parallel.sequence_parallel=true model.context_length=1536 model.vocab_multiple=96", 3),
        ("zero.stage=3 parallel.tensor=2 train.activation_checkpointing=every_k_loops", 4),
        ("zero.stage=0", 2),
        ("optimizer.name=muon parallel.tensor=2 parallel.pipeline=2", 4),
        ("model.recurrence.granularity=token parallel.tensor=2", 2),
        ("model.dropout=0.1 zero.stage=2", 2),
        ("model.dropout=0.1 parallel.tensor=2 parallel.pipeline=2", 4),
        ("train.stop_step=100 schedule.warmup_steps=50", 1),
        ("schedule.name=cosine schedule.warmup_steps=80", 1),
        ("model.family=blindspot loss.objective=per_loop", 1),
        ("checkpoint.keep_every_steps=2000", 1),
        ("validation.num_loops=[1,32]", 1),
        ("model.recurrence.sampled_loops=no_grad model.recurrence.backprop_loops=8 parallel.pipeline=2", 2),
        ("model.family=gpt model.recurrence.sampled_loops=no_grad", 1),
    ],
)
def test_sound_combinations_are_accepted(make: Any, overrides: str, world_size: int) -> None:
    validate(make(*overrides.split()), world_size)


def test_without_a_number_of_processes_only_what_none_of_them_could_run_is_refused(make: Any) -> None:
    validate(make("train.micro_batch_size=16"), None)  # fits 1 or 2, not 4
    for overrides, fragments in (
        ("train.micro_batch_size=7", ("train.micro_batch_size=7", "nearest: 4 or 8")),
        ("train.micro_batch_size=32 parallel.pipeline=2", ("train.micro_batch_size=32", "pipeline=2", "nearest: 16")),
    ):
        with pytest.raises(ConfigError) as caught:
            validate(make(*overrides.split()), None)
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
