"""The demo on a tiny run: baselines, report, samples, exit code; and what it is made of."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.build_shards import build
from data_prep.packing import BuildSettings
from data_prep.sources import TextFormat
from data_prep.train_tokenizer import train_tokenizer
from pretrain.config.families import make_model_config
from pretrain.errors import CheckpointError, ConfigError
from pretrain.model.init import init_parameters
from pretrain.model.looped import LoopedLM
from pretrain.model.ops import TensorOps
from pretrain.train.metrics import METRICS_NAME, read_metrics
from tools import demo
from tools.baselines import Bigram, Unigram, split_rows
from tools.generate import continue_text, generate
from tools.loading import load_model

V = 7
ROWS = np.random.default_rng(0).integers(0, V - 1, (50, 9)) // 2 * 2  # of 0 .. 6 the even ones only


def test_unigram_by_hand() -> None:
    unigram = Unigram(np.array([[0, 1, 1, 2]]), 4)
    np.testing.assert_allclose(unigram.probability, [1 / 7, 3 / 7, 2 / 7, 1 / 7])
    assert unigram.loss(np.array([[3, 1, 3]])) == pytest.approx(-(math.log(3 / 7) + math.log(1 / 7)) / 2)


def test_bigram_by_hand() -> None:
    bigram = Bigram(np.array([[0, 1, 0, 1, 0, 2], [2, 2, 2, 2, 2, 0]]), 3, 0.5)
    # After 0: 1 twice, 2 once, of two kinds. Before 0 stand 1 and 2, before 1 stands 0, before 2 stand 0 and 2.
    lower = np.array([3, 2, 3]) / (5 + 3)
    expected = np.array([0, 1.5, 0.5]) / 3 + 0.5 * 2 / 3 * lower
    np.testing.assert_allclose(bigram.probability(np.zeros(3, int), np.arange(3)), expected)


@pytest.mark.parametrize("discount", [0.05, 0.5, 0.95])
def test_bigram_sums_to_one_after_every_token(discount: float) -> None:
    bigram = Bigram(ROWS, V, discount)  # after 1, 3, 5 nothing was ever seen
    previous, following = np.divmod(np.arange(V * V), V)
    probability = bigram.probability(previous, following).reshape(V, V)
    assert (probability > 0).all()
    np.testing.assert_allclose(probability.sum(1), 1)


def test_bigram_discount_comes_from_held_out_rows() -> None:
    cycle = np.arange(400).reshape(40, 10) % 5
    assert Bigram.tuned(cycle, 5).discount == pytest.approx(0.05), "a deterministic chain wants all its counts"
    noise = np.random.default_rng(0).integers(0, 50, (40, 10))
    assert Bigram.tuned(noise, 50).discount > 0.5, "counts of noise are worth little"


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    cfg = make_model_config(
        "parcae", vocab_size=40, context_length=16, width=32, num_heads=2, ffn_width=32, prelude_layers=1,
        core_layers=1, coda_layers=1,
    )  # fmt: skip
    model = LoopedLM(cfg).eval()
    init_parameters(model, cfg, 0, TensorOps())
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # projections that start at 0 would hide the cache
        parameter.data += torch.empty_like(parameter).normal_(std=0.1, generator=generator)
    return model


def test_greedy_generation_with_the_cache_is_that_without(model: LoopedLM) -> None:
    tokens = torch.tensor([[0, 5, 9], [0, 7, 1]])
    for _ in range(6):
        tokens = torch.cat((tokens, model.logits(tokens, 3)[:, -1:].argmax(-1)), 1)
    assert generate(model, tokens[:, :3], 6, temperature=0, num_loops=3).tolist() == tokens.tolist()


def test_sampling_follows_the_seed_and_the_probabilities(model: LoopedLM) -> None:
    prompt = torch.zeros(2_000, 1, dtype=torch.int64)
    drawn = generate(model, prompt, 1, seed=1)
    assert torch.equal(drawn, generate(model, prompt, 1, seed=1))
    assert not torch.equal(drawn, generate(model, prompt, 1, seed=2))
    expected = model.logits(prompt[:1])[0, -1].softmax(-1)
    found = torch.bincount(drawn[:, 1], minlength=40) / 2_000
    assert (found - expected).abs().max() < 0.04


def test_generation_beyond_the_context_is_refused(model: LoopedLM) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens=14: expected at most 13"):
        generate(model, torch.zeros(1, 3, dtype=torch.int64), 14)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of three steps, over a data set of its own."""
    folder = tmp_path_factory.mktemp("demo")
    words, rng = ["the", "loop", "reads", "its", "state", "twice", "and", "halts"], random.Random(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=40)) + "." for _ in range(200)))
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", vocab_size=270)
    build(
        BuildSettings(
            inputs=(str(folder / "text.txt"),), tokenizer=folder / "tokenizer", out=folder / "data", row_tokens=33,
            validation_fraction=0.2, text_format=TextFormat(separator="\n\n"),
        )
    )  # fmt: skip
    model = {"vocab_size": 270, "context_length": 32, "width": 32, "num_heads": 2, "ffn_width": 32}
    return [
        f"data.path={folder / 'data'}", "data.num_workers=0", f"run.dir={folder / 'runs'}", "train.max_steps=3",
        "schedule.warmup_steps=0", "train.global_batch_size=8", "validation.rows=20", "validation.every_steps=2",
        "logging.wandb=disabled",
        *(f"model.{key}={value}" for key, value in model.items()),
    ]  # fmt: skip


def test_demo_end_to_end(
    overrides: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", ("", "the loop"))
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    code = demo.main(overrides)
    output, errors = capfd.readouterr()
    assert code == 1 and "FAILED" in output, errors[-2_000:]  # three steps do not beat a bigram
    cfg = demo.load_config(demo.ROOT / demo.CONFIG, overrides)
    folder = Path(cfg.run.dir) / cfg.run.name
    assert "$ python pretrain/main.py --config configs/tiny.yaml" in output
    assert "data_prep" not in output.split("$ python")[1], "the data set was there"
    for text in ("unigram", "bigram, interpolated", *(f"model, loops: {t}" for t in (1, 2, 4, 8)), "'the loop"):
        assert text in output
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    losses = demo.measure(cfg, folder)
    assert losses.bigram < losses.unigram < math.log(270)
    assert losses.by_loops == {
        int(loops): loss for loops, loss in read_metrics(folder / METRICS_NAME)[-1]["val_loss"].items()
    }
    assert demo.verdict(demo.Losses(5.0, 4.0, {1: 4.0, 4: 3.7}, 4)) == 0
    assert demo.verdict(demo.Losses(5.0, 4.0, {1: 3.0, 4: 3.9}, 4)) == 1
    assert demo.verdict(demo.Losses(5.0, 4.0, {1: 5.0, 4: 4.7}, 4), short=True) == 0
    assert demo.verdict(demo.Losses(5.0, 4.0, {1: 4.0, 4: 4.9}, 4), short=True) == 1

    trained = load_model(folder)
    assert (trained.step, trained.config.train.max_steps) == (3, 3)
    rows = torch.from_numpy(split_rows(cfg.data.path, "validation")[: cfg.validation.rows])
    loops = sorted(losses.by_loops)
    measured = trained.model.loop_losses(rows[:, :-1], rows[:, 1:], loops).double().mean((1, 2))
    assert measured.tolist() == pytest.approx([losses.by_loops[t] for t in loops], rel=1e-5), "the weights of the run"
    assert continue_text(trained, "the loop", 4, seed=3) == continue_text(trained, "the loop", 4, seed=3)

    (folder / "checkpoints" / "step_00000003" / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_model(folder)
