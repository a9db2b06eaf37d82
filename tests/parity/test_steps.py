"""Whole steps on a mixed mesh beside one device: optimizers, bad steps, half precision."""

import dataclasses

import jax
import numpy as np
import pytest

from mtjax.config import OptimizerConfig
from mtjax.training.state import LossScale
from mtjax.training.step import Limits
from tests.parity.layouts import (
    TOLERANCE,
    assert_close,
    by_name,
    changed,
    first_gradients,
    first_state,
    run_steps,
)

MIXED = "data=2,fsdp=2,tensor=2,microbatches=4"
ADAMW = dataclasses.replace(changed(), optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.1))


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=marker)
            for names, marker in (
                (("muon",), pytest.mark.slow),
                (("adamw", "adafactor", "lion", "sgd"), pytest.mark.nightly),
            )
            for name in names
        ),
    ],
)
def test_an_optimizer_moves_the_weights_alike_on_a_mixed_mesh(name):
    """Clipping, weight decay and schedule included; each leaf relative to how far it moved.

    Gradients agree to 1e-5 and most optimizers keep that. Adam and Lion divide each entry by its
    own size, so the few entries that are zero but for rounding move by another amount, of up to a
    whole step: 1e-4 allows for one entry in some thousand that moves half as far.
    """
    optimizer = dataclasses.replace(ADAMW.optimizer, name=name)
    config = dataclasses.replace(ADAMW, optimizer=optimizer)
    start = first_state(config).params
    state, metrics = run_steps(config, MIXED, 2)
    expected, expected_metrics = run_steps(config, "data=1", 2)
    for key in ("train/loss", "train/grad_norm"):
        np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=TOLERANCE)
    moves, expected_moves = (jax.tree.map(np.subtract, s.params, start) for s in (state, expected))
    assert_close(moves, expected_moves, 1e-4 if name in ("adamw", "lion") else 2 * TOLERANCE)


@pytest.mark.parametrize(
    "limits",
    [Limits(np.float32(1), np.float32(np.inf)), Limits(np.float32(np.inf), np.float32(1e-3))],
)
def test_a_spike_leaves_every_shard_as_it_was(limits):
    state, metrics = run_steps(ADAMW, MIXED, 1, limits)
    assert metrics["train/skipped"] == 1
    assert state.step == 1
    start = first_state(ADAMW)
    assert jax.tree.all(jax.tree.map(np.array_equal, state._replace(step=start.step), start))


FP16 = dataclasses.replace(changed(), precision="fp16")


@pytest.mark.slow
def test_fp16_with_loss_scaling_steps_alike_on_a_mixed_mesh():
    """Half precision rounds to 5e-4; the loss is a mean over many tokens."""
    scale = LossScale(np.float32(2.0**10), np.int32(0))
    _, metrics = run_steps(FP16, MIXED, 3, loss_scale=scale)
    _, expected = run_steps(FP16, "data=1", 3, loss_scale=scale)
    assert metrics["train/skipped"] == expected["train/skipped"] == 0
    np.testing.assert_allclose(metrics["train/loss"], expected["train/loss"], rtol=1e-4)
    np.testing.assert_allclose(metrics["train/grad_norm"], expected["train/grad_norm"], rtol=1e-3)


def test_an_fp16_overflow_on_one_shard_halves_the_scale_of_all():
    scale = LossScale(np.float32(2.0**40), np.int32(7))
    start = first_state(FP16)
    for layout in (MIXED, "data=1"):
        state, metrics = run_steps(FP16, layout, 2, loss_scale=scale)
        assert metrics["train/skipped"] == 1
        assert state.loss_scale == (2.0**38, 0)
        assert jax.tree.all(jax.tree.map(np.array_equal, state.params, start.params))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp=2,tensor=2", marks=pytest.mark.nightly),
        pytest.param("data=2,tensor=2", marks=pytest.mark.nightly),
        pytest.param(MIXED, marks=pytest.mark.slow),
    ],
)
def test_bf16_gradients_are_those_of_one_device_but_for_rounding(layout):
    """One device and each mesh are about 2e-2 from the float32 gradients: at most twice that apart.

    A mesh is the nearer one, because its partial sums are shorter or leave in float32.
    """
    config = dataclasses.replace(changed(), precision="bf16")
    sums, gradients = first_gradients(config, layout)
    expected_sums, expected = first_gradients(config, "data=1")
    np.testing.assert_allclose(sums, expected_sums, rtol=2e-4)
    assert_close(gradients, expected, 4e-2)
    assert {leaf.dtype for leaf in by_name(gradients).values()} == {np.dtype(np.float32)}
