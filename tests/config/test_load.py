"""Loading: what wins, which values are numbers, and the message of every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.config.check import OTHER_NAMES, all_keys
from pretrain.config.load import diff_configs, dump_config, join_overrides, load_config, save_resolved
from pretrain.config.schema import Config, LoggingConfig, OptimizerConfig, RunConfig, SourceConfig
from pretrain.errors import ConfigError


def load(tmp_path: Path, text: str = "", *overrides: str) -> Config:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


# --- what wins ---------------------------------------------------------------------------------------------------


def test_an_empty_file_gives_the_defaults_of_the_default_family(tmp_path: Path) -> None:
    assert load(tmp_path) == Config()


def test_order_of_sources(tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text("model: {family: rdm, width: 384}\noptimizer: {lr: 1, eps: 1}\n")
    (tmp_path / "near.yaml").write_text("base: far.yaml\noptimizer: {lr: 2, weight_decay: 2}\nmodel: {mlp: relu2}\n")
    cfg = load(tmp_path, "base: near.yaml\noptimizer: {lr: 3}\n", "optimizer.weight_decay=4")
    assert (cfg.optimizer.eps, cfg.optimizer.weight_decay, cfg.optimizer.lr) == (1, 4, 3)
    assert cfg.model.block == "sandwich", "from the family's preset"
    assert cfg.model.mlp == "relu2", "the file is stronger than the preset"
    assert cfg.model.vocab_size == Config().model.vocab_size, "from the defaults"


def test_a_base_is_found_from_the_naming_file_and_not_from_the_working_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/base.yaml").write_text("train: {seed: 7}\n")
    monkeypatch.chdir("/")
    assert load(tmp_path, "base: shared/base.yaml\n").train.seed == 7


def test_the_family_of_the_command_line_brings_its_preset(tmp_path: Path) -> None:
    cfg = load(tmp_path, "model: {family: parcae}", "model.family=flt")
    assert cfg.model.recurrence.feedback == "attention"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("train: {max_tokens: 1000}", (), (None, 1000)),
        ("train: {max_tokens: 1000}", ("train.max_steps=5",), (5, None)),
        ("train: {max_steps: 7}", ("train.max_tokens=9",), (None, 9)),
        ("train: {max_steps: 7, max_tokens: null}", (), (7, None)),
    ],
)
def test_the_stronger_source_decides_between_steps_and_tokens(tmp_path: Path, text, overrides, expected) -> None:
    train = load(tmp_path, text, *overrides).train
    assert (train.max_steps, train.max_tokens) == expected


def test_a_path_replaces_the_sources_and_sources_replace_the_path(tmp_path: Path) -> None:
    mixture = "data: {sources: [{path: a, weight: 2}, {path: b}]}"
    assert load(tmp_path, mixture, "data.path=c").data.all_sources == [SourceConfig(path="c")]
    assert load(tmp_path, mixture, "data.sources[1].weight=3").data.sources[1] == SourceConfig(path="b", weight=3.0)
    assert load(tmp_path, "data: {path: c}", "data.sources=[{path: d}]").data.path is None


def test_both_of_a_pair_in_one_source_are_refused(tmp_path: Path) -> None:
    assert "exactly one of" in refusal(tmp_path, "train: {max_steps: 7, max_tokens: 9}")
    assert "use one of the two" in refusal(tmp_path, "data: {path: a, sources: [{path: b}]}")


def test_overrides_with_dashes_and_with_a_blank() -> None:
    given_ = ["--optimizer.lr=3e-4", "-train.seed=1", "--zero.stage", "2", "run.name=a=b", "--data.path", "--x"]
    joined = ["optimizer.lr=3e-4", "train.seed=1", "zero.stage=2", "run.name=a=b", "data.path", "x"]
    assert join_overrides(given_) == joined


def test_interpolations_are_resolved_with_the_type_of_their_field(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH_FOLDER", "/fast")
    text = 'run: {name: "lr_${optimizer.lr}"}\ndata: {path: "${oc.env:SCRATCH_FOLDER}/x"}\noptimizer: {lr: 2e-3}\n'
    cfg = load(tmp_path, text, "optimizer.eps=${optimizer.lr}", "validation.rows=${train.global_batch_size}")
    assert (cfg.run.name, cfg.data.path, cfg.optimizer.eps) == ("lr_0.002", "/fast/x", 2e-3)
    assert cfg.validation.rows == cfg.train.global_batch_size


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["1e-3", "2e-5", "1E-3", ".5e-3", "1.0e-3", '"3e-4"', "1", "1e10"])
def test_every_form_of_a_number_is_a_float(tmp_path: Path, written: str) -> None:
    for cfg in (load(tmp_path, f"optimizer: {{lr: {written}}}"), load(tmp_path, "", f"optimizer.lr={written}")):
        assert type(cfg.optimizer.lr) is float
        assert cfg.optimizer.lr == float(written.strip('"'))


def test_text_on_the_command_line_is_taken_as_it_stands(tmp_path: Path) -> None:
    for written in ("007", "1e3", "yes", "2026-01-01", "12:30"):
        assert load(tmp_path, "", f"run.name={written}").run.name == written


def test_numbers_that_yaml_would_change_stay_text_where_text_is_asked_for(tmp_path: Path) -> None:
    for written in ("0650", "10:50", "0x10", "2026-01-01"):
        assert load(tmp_path, f"run: {{name: {written}}}").run.name == written


def test_the_home_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("run.dir", "data.path", "checkpoint.initial_weights", "evaluation.task_data", "evaluation.core_bundle")
    for key in keys:
        section, name = key.split(".")
        for cfg in (load(tmp_path, f"{section}: {{{name}: ~/x}}"), load(tmp_path, "", f"{key}=~/x")):
            assert getattr(getattr(cfg, section), name) == "/home/me/x"
    assert load(tmp_path, "data: {sources: [{path: ~root/x}]}").data.sources[0].path.endswith("root/x")
    assert load(tmp_path, "run: {dir: a/~}").run.dir == "a/~"
    monkeypatch.setenv("PLACE", "~/y")
    assert load(tmp_path, "run: {dir: '${oc.env:PLACE}'}").run.dir == "/home/me/y"


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("optimizer.lr=${oc.env:X}", "inf", "optimizer.lr='inf': expected a number"),
        ("optimizer.lr=${oc.env:X}", "nan", "optimizer.lr='nan'"),
        ("optimizer.lr=${oc.decode:${oc.env:X}}", "inf", "optimizer.lr=inf: expected a number"),
        ("train.seed=${oc.env:X}", "-1", "train.seed=-1: expected an integer >= 0"),
        ("model.norm_weight=${train.max_steps}", "", "model.norm_weight=5: expected true or false"),
        ("model.width=${optimizer.lr}", "", "model.width=0.008: expected an integer"),
        ("run.name=${train.max_steps}", "", "run.name=5: expected text"),
        ("model.mlp=${run.name}", "", "model.mlp='run': expected one of relu2, swiglu"),
        ("run.dir=${oc.env:X}", "", "run.dir='': expected the name of a folder"),
        ("optimizer.betas=${oc.env:X}", "[0.5, 0.9]", "oc.decode"),
        ("optimizer.lr=${", "", "optimizer.lr='${': cannot be resolved"),
        ("optimizer.lr=${oc.env:NOT_SET_AT_ALL}", "", "optimizer.lr="),
    ],
)
def test_what_an_interpolation_gives_is_checked_like_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, expected: str
) -> None:
    monkeypatch.setenv("X", value)
    message = refusal(tmp_path, "train: {max_steps: 5}", setting)
    assert message.startswith("command line: ") and expected in message, message


def test_what_an_interpolation_may_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "3e-4")
    monkeypatch.setenv("Y", "true")
    monkeypatch.setenv("Z", "[0.5, 0.9]")
    cfg = load(
        tmp_path, "", "optimizer.lr=${oc.env:X}", "train.compile=${oc.env:Y}",
        "optimizer.betas=${oc.decode:${oc.env:Z}}", "run.name=x${oc.env:X}",
    )  # fmt: skip
    assert (cfg.optimizer.lr, cfg.train.compile, cfg.optimizer.betas) == (3e-4, True, (0.5, 0.9))


def test_an_item_of_a_list_or_pair(tmp_path: Path) -> None:
    assert load(tmp_path, "", "optimizer.betas[0]=0.5").optimizer.betas == (0.5, 0.95)
    assert load(tmp_path, "train: {skip_steps: [1, 2]}", "train.skip_steps[1]=3").train.skip_steps == [1, 3]


# --- refusals ----------------------------------------------------------------------------------------------------

FILE_REFUSALS = {
    # unknown keys: at the top, in a section, in a section's section, in a list item, one level too high
    "optmi: {lr: 3}": ("optmi={'lr': 3}", "nearest: optimizer"),
    "optimizer: {learning-rate: 3}": ("optimizer.learning-rate=3", "nearest: optimizer.lr"),
    "OPTIMIZER: {lr: 3}": ("OPTIMIZER", "nearest: optimizer"),
    "model: {recurrence: {mean_lops: 3}}": ("model.recurrence.mean_lops=3", "nearest: model.recurrence.mean_loops"),
    "data: {sources: [{path: a, wieght: 2}]}": ("data.sources[0].wieght=2", "nearest: data.sources[0].weight"),
    "lr: 3": ("lr=3", "exists as optimizer.lr"),
    "model: {mean_loops: 4}": ("model.mean_loops=4", "exists as model.recurrence.mean_loops"),
    "optimizer.lr: 3": ("optimizer.lr=3", "optimizer: {lr: ...}"),
    "optimizer: {zzz: 3}": ("optimizer.zzz=3", "the keys of optimizer are name, lr, betas"),
    "train: {batch_size: 8}": ("train.batch_size=8", "nearest: train."),
    "1: 2": ("1=2", "the sections are run, model"),
    # wrong types and values
    "optimizer: {lr: abc}": ("optimizer.lr='abc'", "a number"),
    "optimizer: {lr: .inf}": ("optimizer.lr=inf", "a number"),
    "optimizer: {lr: true}": ("optimizer.lr=True", "a number"),
    "optimizer: {lr: 0}": ("optimizer.lr=0.0", "> 0"),
    "train: {max_steps: 1e4}": ("train.max_steps=10000.0", "an integer", "write 10000"),
    "train: {skip_steps: [1, 2.5]}": ("train.skip_steps[1]=2.5", "an integer"),
    "optimizer: {clip_norm: None}": ("optimizer.clip_norm='None'", "write null"),
    "optimizer: {betas: null}": ("optimizer.betas=None", "a list of 2 values", "null is not allowed"),
    "optimizer: {betas: [0.9]}": ("optimizer.betas=[0.9]", "a list of 2 values"),
    "model: {tie_embeddings: 1}": ("model.tie_embeddings=1", "true or false"),
    "model: {family: parce}": ("model.family='parce'", "nearest: parcae"),
    'model: {family: "${run.name}"}': ("model.family", "written out"),
    "run: {name: 3}": ("run.name=3", "text", "in quotes"),
    "run: {name: a/b}": ("run.name='a/b'", "without slashes"),
    "train: 3": ("train=3", "a section with the keys max_steps"),
    "data: {sources: {path: a}}": ("data.sources={'path': 'a'}", "a list"),
    "train: {max_steps: 0650}": ("train.max_steps='0650'", "write 650"),
    "parallel: {timeout_sec: 10:50}": ("parallel.timeout_sec='10:50'", "a number"),
    "loss: {schedules: [{term: z_loss, from_factor: -1}]}": ("loss.schedules[0].from_factor=-1", ">= 0"),
    "run: ${train}": ("run='${train}'", "a section"),
    "- 1": ("expected sections", "found a list"),
    # missing values and interpolations
    "data: {sources: [{weight: 2}]}": ("data.sources[0].path", "none is given"),
    "model:\n  width: ???": ("model.width", "none is given"),
    'optimizer: {lr: "${nope.x}"}': ("optimizer.lr", "nope.x"),
    'run: {name: "${run.name}"}': ("run.name", "Recursive"),
    'train: {max_steps: "${optimizer.lr}"}': ("train.max_steps=0.008", "an integer"),
    # YAML
    "a: [1, 2\nb: 3": ("line 2, column 2", "not valid YAML"),
    "train:\n\tmax_steps: 3": ("line 2, column 1", "never with tabs"),
    "train: {max_steps: 3, max_steps: 4}": ("line 1, column 23", "duplicate key max_steps"),
    "run: {name: !!python/object:os.system x}": ("line 1, column 13", "not valid YAML"),
    # bases
    "base: 3": ("base=3", "the name of another configuration file"),
    "base: mine.yaml": ("base='mine.yaml'", "back to itself"),
    "base: mime.yaml": ("base='mime.yaml'", "no such file; nearest:"),
    # sections by themselves
    "train: {activation_checkpointing: reentrant}": ("train.activation_checkpointing='reentrant'", "non-reentrant"),
    "zero: {stage: 4}": ("zero.stage=4", "0, 1, 2 or 3"),
    "model: {num_heads: 5}": ("model.num_heads=5", "a divisor of model.width=768"),
}


@pytest.mark.parametrize("text", FILE_REFUSALS)
def test_refused_files(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, text)
    for fragment in (str(tmp_path / "mine.yaml"), *FILE_REFUSALS[text]):
        assert fragment in message, message


OVERRIDE_REFUSALS = {
    # the key as it was typed, its value, and the nearest whole key
    "optmi.lr=3": ("optmi.lr='3'", "nearest: optimizer.lr"),
    "--optim.lr=3": ("optim.lr='3'", "nearest: optimizer.lr"),
    "model.recurence.mean_lops=3": ("model.recurence.mean_lops='3'", "nearest: model.recurrence.mean_loops"),
    "train.learning_rate=3": ("train.learning_rate='3'", "nearest: optimizer.lr"),
    "optmi.learning_rate=3": ("optmi.learning_rate='3'", "nearest: optimizer.lr"),
    "optimizer..lr=3": ("optimizer..lr", "a key such as optimizer.lr"),
    "optimizer.betas[-1]=3": ("optimizer.betas[-1]", "a key such as"),
    "optimizer.betas[2]=0.5": ("optimizer.betas[2]='0.5'", "has 2 items"),
    # bounds, declared where the field is
    "model.width=1000000000000": ("model.width=1000000000000", ">= 1 and <= 2^20"),
    "model.recurrence.mean_loops=1e9": ("model.recurrence.mean_loops=1000000000.0", ">= 1 and <= 1_000"),
    "guards.step_sec=1e308": ("guards.step_sec=1e+308", "<= 31_536_000", "or null"),
    "data.shuffle_seed=-1": ("data.shuffle_seed=-1", ">= 0 and < 2^64"),
    "optimizer.betas[0]=1": ("optimizer.betas[0]=1.0", ">= 0 and < 1"),
    "optimizer.betas=[0.9, .inf]": ("optimizer.betas[1]=inf", "a number"),
    "optimizer.eps=1e-320": ("optimizer.eps=1e-320", "> 0 (>= 1e-30)"),
    "loss.z_loss=1e308": ("loss.z_loss=1e+308", "<= 1e+06"),
    # numbers are read as they look
    "train.max_steps=0650": ("train.max_steps='0650'", "an integer", "write 650"),
    "train.max_steps=10:50": ("train.max_steps='10:50'", "an integer"),
    "train.max_steps=\uff11\uff12": ("train.max_steps='\uff11\uff12'", "an integer"),
    "optimizer.lr=\u0661": ("optimizer.lr='\u0661'", "a number"),
    "train.skip_steps=[0x10]": ("train.skip_steps[0]='0x10'", "an integer"),
    # text and names of folders
    "data.path=''": ("data.path=''", "not an empty one"),
    "data.path=~nobody_here/x": ("data.path='~nobody_here/x'", "no user 'nobody_here'"),
    'run.dir="a\\0b"': ("run.dir=", "control characters"),
    "run.dir=a\nb": ("run.dir='a\\nb'", "control characters"),
    "run.name=\udcff": ("run.name=", "control characters"),
    "run.name=a\u2028b": ("run.name=", "text in one line"),
    "logging.wandb_project=a\u2029b": ("logging.wandb_project=", "text in one line"),
    f"run.dir={'x' * 300}": ("run.dir=", "255 between two slashes"),
    f"run.name={'x' * 300}": ("run.name=", "at most 200 bytes"),
    "optimizer.lrr=3": ("optimizer.lrr='3'", "nearest: optimizer.lr"),
    "model.recurrence.foo=1": ("model.recurrence.foo='1'", "the keys of model.recurrence are"),
    "optimizer.lr.x=3": ("optimizer.lr.x", "optimizer.lr holds a value"),
    "train.seed[0]=3": ("train.seed[0]", "train.seed is not a list"),
    "optimizer.lr=abc": ("optimizer.lr='abc'", "a number"),
    "optimizer.lr=nan": ("optimizer.lr='nan'", "a number"),
    "optimizer.lr=-1": ("optimizer.lr=-1.0", "> 0"),
    "train.seed=-1": ("train.seed=-1", ">= 0 and < 2^64"),
    "train.skip_steps=[0]": ("train.skip_steps[0]=0", ">= 1"),
    "train.max_steps=1e4": ("train.max_steps='1e4'", "an integer", "write 10000"),
    "optimizer.clip_norm=None": ("optimizer.clip_norm='None'", "write null"),
    "train.compile=1": ("train.compile=1", "true or false"),
    "logging.wandb=offlin": ("logging.wandb='offlin'", "nearest: offline"),
    "optimizer.lr": ("'optimizer.lr'", "section.key=value"),
    "run.name=": ("'run.name='", "section.key=value"),
    "=3": ("'=3'", "section.key=value"),
    "train.skip_steps=[1,2": ("train.skip_steps=[1,2", "not valid YAML"),
    "data.sources[0].weight=2": ("data.sources[0].weight=2.0", "has 0 items"),
    "data.sources[0].wieght=2": ("data.sources[0].wieght", "nearest: data.sources[0].weight"),
    "model.recurrence={mean_lops: 3}": ("model.recurrence.mean_lops=3", "nearest: model.recurrence.mean_loops"),
}


@pytest.mark.parametrize("text", OVERRIDE_REFUSALS)
def test_refused_overrides(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, "train: {max_steps: 5}", text)
    for fragment in ("command line: ", *OVERRIDE_REFUSALS[text]):
        assert fragment in message, message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").touch()
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    for name, expected in (
        ("tinny.yaml", f"nearest: {tmp_path / 'tiny.yaml'}"),
        ("zzz.yaml", "the folder has latin.yaml, tiny.yaml"),
        (".", "found a folder"),
        ("nowhere/x.yaml", f"there is no folder {tmp_path / 'nowhere'}"),
        ("latin.yaml", "cannot be read"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and expected in str(caught.value)


def test_a_long_chain_of_bases_is_refused(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"b{i}.yaml").write_text(f"base: b{i + 1}.yaml\n")
    (tmp_path / "b30.yaml").touch()
    with pytest.raises(ConfigError, match=r"b20\.yaml: base='b21\.yaml': expected at most 20 files"):
        load_config(tmp_path / "b0.yaml")
    assert load_config(tmp_path / "b12.yaml") == Config()


def test_a_longer_cycle_of_bases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: ./a.yaml\n")
    with pytest.raises(ConfigError, match=r"b\.yaml: base='./a\.yaml'.*back to itself"):
        load_config(tmp_path / "a.yaml")


def test_names_of_other_frameworks_lead_to_keys_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= set(all_keys())


# --- saving ------------------------------------------------------------------------------------------------------


def same_types(one: object, two: object) -> bool:
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same_types(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same_types, one, two))
    return type(one) is type(two) and one == two


finite = st.floats(min_value=1e-30, max_value=1e30)
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1).filter(
    lambda text: "/" not in text and "${" not in text and text not in (".", "..", "???")
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lr=finite, eps=finite, name=st.one_of(names, st.sampled_from(["1e3", "007", "yes", "null", "~", "1_0", "0x1"])))
def test_a_saved_configuration_loads_back_equal(tmp_path: Path, lr: float, eps: float, name: str) -> None:
    cfg = Config(run=RunConfig(name=name), optimizer=OptimizerConfig(lr=lr, eps=eps, clip_norm=None))
    save_resolved(cfg, tmp_path / "config.yaml")  # loads it back and compares
    loaded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert loaded["optimizer"]["betas"] == list(cfg.optimizer.betas)
    assert same_types(loaded["run"], vars(cfg.run))
    assert same_types(loaded["optimizer"] | {"betas": 0}, vars(cfg.optimizer) | {"betas": 0})


def test_the_saved_file_holds_every_key_and_nothing_derived(tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text("data: {sources: [{path: a}]}\nloss: {z_loss: 1, schedules: [{term: z_loss}]}\n")
    saved = yaml.safe_load(dump_config(load(tmp_path, "base: far.yaml\n")))

    def flat(tree: dict[str, Any], prefix: str = "") -> set[str]:
        keys: set[str] = set()
        for key, value in tree.items():
            if isinstance(value, dict):
                keys |= flat(value, f"{prefix}{key}.")
            elif value and isinstance(value, list) and isinstance(value[0], dict):
                keys |= flat(value[0], f"{prefix}{key}[].")
            else:
                keys.add(prefix + key)
        return keys

    assert flat(saved) == set(all_keys())


def test_a_value_that_would_not_survive_saving_is_refused(tmp_path: Path) -> None:
    assert "run.name" in refusal(tmp_path, r"run: {name: 'a\${b}'}")


def test_a_missing_value_may_come_from_a_stronger_source(tmp_path: Path) -> None:
    assert load(tmp_path, "model:\n  width: ???", "model.width=384").model.width == 384


def test_a_difference_names_the_key_and_both_values() -> None:
    new = Config(run=RunConfig(name="b"), logging=LoggingConfig(profile_steps=[1, 2]))
    assert diff_configs(Config(), new) == [("run.name", "run", "b"), ("logging.profile_steps", [], [1, 2])]
