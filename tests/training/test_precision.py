"""Half precision: float32 masters, and dynamic loss scaling in fp16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import LossScaleConfig, OptimizerConfig
from mtjax.training.state import LossScale
from tests.training.one_device import BASE, ROWS, SEQ, make_batch, same, start

BF16 = dataclasses.replace(
    BASE,
    precision="bf16",
    optimizer=OptimizerConfig(learning_rate=1e-6, weight_decay=0.0),
)
FP16 = dataclasses.replace(
    BASE,
    precision="fp16",
    loss_scale=LossScaleConfig(initial=8.0, growth_interval=3, minimum=2.0),
)


@pytest.mark.parametrize("config", [BF16, FP16], ids=["bf16", "fp16"])
def test_masters_and_moments_are_float32(config):
    state, run = start(config)
    after, metrics = run(state, make_batch())
    for leaf in jax.tree.leaves((after.params, after.opt_state)):
        assert leaf.dtype in (np.float32, np.int32)
    # The same problem as in float32: the first loss is that of a uniform guess.
    assert metrics["train/loss"] == pytest.approx(np.log(64), abs=0.1)


def test_masters_keep_a_step_that_bf16_would_round_away():
    """At 1 bfloat16 moves by 2^-8 or 2^-7; Adam's first step moves by the rate, 1e-6."""
    state, run = start(BF16)
    before = state.params["head"]["norm"]["scale"]
    after = run(state, make_batch())[0].params["head"]["norm"]["scale"]
    np.testing.assert_allclose(np.abs(after - before), 1e-6, rtol=0.1)
    np.testing.assert_array_equal(after.astype(jnp.bfloat16), before.astype(jnp.bfloat16))


def scaled(state, factor):
    return state._replace(loss_scale=LossScale(np.float32(factor), np.int32(0)))


def test_a_half_precision_overflow_skips_the_step_and_halves_the_scale():
    state, run = start(FP16)
    state = scaled(state, 2.0**40)
    after, metrics = run(state, make_batch())
    assert np.isfinite(metrics["train/loss"])
    assert not np.isfinite(metrics["train/grad_norm"])
    assert metrics["train/skipped"] == 1.0
    assert after.loss_scale == (2.0**39, 0)
    assert same(after.params, state.params)
    assert same(after.opt_state, state.opt_state)


def test_the_scale_never_falls_below_its_minimum():
    state, run = start(FP16)
    factors = []
    for _ in range(4):
        state, _ = run(state, make_batch(weights=np.full((ROWS, SEQ), np.inf)))
        factors.append(float(state.loss_scale.factor))
    assert factors == [4.0, 2.0, 2.0, 2.0]


def test_the_scale_doubles_after_enough_good_steps_in_a_row():
    state, run = start(FP16)
    factors = []
    for good in (True, True, False, True, True, True, True):
        weights = np.full((ROWS, SEQ), 1.0 if good else np.nan)
        state, metrics = run(state, make_batch(weights=weights))
        assert metrics["train/skipped"] == float(not good)
        factors.append(float(state.loss_scale.factor))
    assert factors == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_the_scale_does_not_change_the_gradient():
    """Powers of two shift the exponent only, but for entries that underflow."""
    state, run = start(FP16)
    norms = [run(scaled(state, f), make_batch())[1]["train/grad_norm"] for f in (256.0, 1024.0)]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-4)
