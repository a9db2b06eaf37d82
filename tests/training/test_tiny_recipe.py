"""The first run of a new user: real text, one command."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtjax.data.store import EMBEDDED_TEXT, open_stores
from mtjax.operation.metrics import read_metrics
from mtjax.planning.flops import count_active_params, count_params
from mtjax.recipes import load_recipe
from tests.data.trigram import trigram_bits_per_byte

ROOT = Path(__file__).parents[2]

DENSE_LOSS = 1.5259
"""Held-out loss of tiny_gpt, the twin of tiny_moe with equal active parameters (README)."""


def launch(recipe, directory, *flags):
    """Trains as a user does, with one device and XLA's defaults; returns what is printed."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    argv = ["launch.py", "--config", recipe, "--run.directory", str(directory), *flags]
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_experts_learn_no_less_than_their_dense_twin_at_even_loads(tmp_path):
    config = load_recipe("tiny_moe")[0]
    twin = load_recipe("tiny_gpt")[0]
    routers = 4 * 256 * 8
    assert count_active_params(config.model) == count_params(twin.model) + routers
    assert config.train == twin.train and config.optimizer == twin.optimizer
    launch("tiny_moe", tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[-1]["eval/loss"] <= DENSE_LOSS
    last = [r for r in records if "moe/load_ratio" in r][-1]
    assert last["moe/load_ratio"] < 1.5
    assert last["moe/dropped_ratio"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("steps", [80, pytest.param(200, marks=pytest.mark.nightly)])
def test_the_tiny_recipe_learns(tmp_path, steps):
    """In 80 steps to half of a uniform guess, in all of them more than a trigram model."""
    config = load_recipe("tiny_gpt")[0]
    shown = launch("tiny_gpt", tmp_path, "--train.steps", str(steps))
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [r["train/loss"] for r in records if "train/loss" in r]
    assert losses[-1] < 0.5 * math.log(config.model.vocab_size)
    for file in ("loss.png", "config.json", "metrics.jsonl"):
        assert (tmp_path / file).stat().st_size > 0
    assert list((tmp_path / "tensorboard").iterdir())
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step_{steps:08}"]
    assert f"sample: {config.train.sample_prompt}" in shown
    assert "held-out loss" in shown
    if steps < config.train.steps:
        return
    splits = []
    for name in ("train", "valid"):
        store = open_stores(config.data, name, config.model.vocab_size)[0]
        begin, end = store.span
        ids = store.tokens[begin:end]
        splits.append(bytes(ids[ids < 256].astype("uint8")))
    trigram = trigram_bits_per_byte(*splits)
    bits = [r["eval/bits_per_byte"] for r in records if "eval/bits_per_byte" in r]
    assert bits[-1] < 0.9 * trigram, f"{bits[-1]:.3f} against {trigram:.3f} of {EMBEDDED_TEXT}"
    assert bits[-1] == pytest.approx(records[-1]["eval/loss"] / math.log(2), rel=1e-3)
