"""Which changes a resumed run may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pretrain.config.check import all_keys
from pretrain.config.load import load_config
from pretrain.config.resume import RESUME_KEYS, check_resume, resume_rule
from pretrain.config.schema import Config
from pretrain.errors import ConfigError

SAVED = Config()


def changed(**sections: dict[str, object]) -> Config:
    return replace(SAVED, **{name: replace(getattr(SAVED, name), **values) for name, values in sections.items()})


def test_every_key_has_a_rule_and_every_rule_has_keys() -> None:
    keys = [key.replace("[]", "") for key in all_keys()]
    for key in keys:
        assert resume_rule(key)
    for prefix in RESUME_KEYS:
        assert any(key == prefix or key.startswith(prefix + ".") for key in keys), prefix


def test_a_key_takes_the_rule_of_its_longest_prefix() -> None:
    assert resume_rule("optimizer.lr")[0] == "override"
    assert resume_rule("optimizer.name")[0] == "never"
    assert resume_rule("model.recurrence.mean_loops")[0] == "never"
    assert resume_rule("data.num_workers")[0] == "free"
    assert resume_rule("data.shuffle_seed")[0] == "never"


def test_free_changes_are_returned_for_the_log() -> None:
    now = changed(train={"max_steps": 2_000, "stop_step": 9}, parallel={"tensor": 2}, zero={"stage": 3})
    assert [str(change) for change in check_resume(SAVED, now)] == [
        "train.max_steps: 1000 -> 2000", "train.stop_step: None -> 9", "parallel.tensor: 1 -> 2", "zero.stage: 1 -> 3",
    ]  # fmt: skip
    assert check_resume(SAVED, SAVED) == []


def test_hyperparameters_need_the_override() -> None:
    now = changed(run={}, optimizer={"lr": 1e-4}, loss={"z_loss": 0.1})
    with pytest.raises(ConfigError) as caught:
        check_resume(SAVED, now)
    message = str(caught.value)
    assert "optimizer.lr: 0.008 -> 0.0001" in message and "loss.z_loss: 0.0 -> 0.1" in message
    assert message.count("run.override=true allows it") == 2
    now.run.override = True
    assert {change.key for change in check_resume(SAVED, now)} == {"run.override", "optimizer.lr", "loss.z_loss"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"width": 1_536}}, "model.width: 768 -> 1536"),
        ({"train": {"seed": 1}}, "train.seed: 0 -> 1"),
        ({"train": {"global_batch_size": 8}}, "train.global_batch_size: 256 -> 8"),
        ({"data": {"canonical_nodes": 2}}, "data.canonical_nodes: 1 -> 2"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name: 'adamw' -> 'muon'"),
    ],
)
def test_what_makes_another_run_is_refused_with_the_override_too(sections, key) -> None:
    now = changed(run={"override": True}, **sections)
    with pytest.raises(ConfigError, match="start another run") as caught:
        check_resume(SAVED, now)
    assert key in str(caught.value)


def test_a_saved_file_may_name_the_checkpoint_it_resumes_from(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {resume: step, resume_step: 0}\n")
    assert load_config(path).run.resume_step == 0
