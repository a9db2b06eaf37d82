"""What a step does with good, bad and partial batches."""

import dataclasses

import jax
import numpy as np
import pytest

from mtjax.config import BatchRampConfig, OptimizerConfig, TrainConfig
from tests.training.one_device import BASE, OPEN, ROWS, SEQ, make_batch, num_traces, same, start

SGD = OptimizerConfig(name="sgd", momentum=0.0, learning_rate=1.0, weight_decay=0.0, clip_norm=None)


def test_the_loss_falls_on_a_batch_seen_again():
    state, run = start(BASE)
    losses = []
    for _ in range(20):
        state, metrics = run(state, make_batch())
        losses.append(float(metrics["train/loss"]))
    assert losses[0] == pytest.approx(np.log(64), abs=0.1), "a uniform guess at first"
    assert losses[-1] < 0.7 * losses[0]


def test_accumulated_microbatches_equal_one_batch_whatever_their_weights():
    """A mean of the microbatches' means would weight the first row, alone in its part, by half."""
    weights = np.ones((ROWS, SEQ))
    weights[1] = 0.0
    weights[2:] = 0.3
    results = []
    for microbatches in (1, 2):
        train = dataclasses.replace(BASE.train, microbatches=microbatches)
        state, run = start(dataclasses.replace(BASE, train=train, optimizer=SGD))
        results.append(run(state, make_batch(microbatches, weights)))
    (whole, metrics), (accumulated, accumulated_metrics) = results
    assert metrics["train/weight"] == pytest.approx(SEQ * 1.6)
    for name in ("train/loss", "train/grad_norm", "train/weight"):
        assert accumulated_metrics[name] == pytest.approx(metrics[name], rel=1e-5)
    for a, b in zip(
        jax.tree.leaves(accumulated.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_gradients_are_clipped_to_the_global_norm():
    """At rate 1, plain gradient descent moves the weights by exactly the clipped norm."""
    clipped = dataclasses.replace(BASE, optimizer=dataclasses.replace(SGD, clip_norm=0.01))
    state, run = start(clipped)
    after, metrics = run(state, make_batch())
    moved = jax.tree.leaves(jax.tree.map(np.subtract, after.params, state.params))
    assert metrics["train/grad_norm"] > 0.1
    assert np.sqrt(sum(np.sum(m.astype(float) ** 2) for m in moved)) == pytest.approx(
        0.01, rel=1e-3
    )


def test_a_step_with_a_nan_leaves_weights_and_moments_untouched():
    state, run = start(BASE)
    after, metrics = run(state, make_batch(weights=np.full((ROWS, SEQ), np.nan)))
    assert metrics["train/skipped"] == 1.0
    assert same(after._replace(step=state.step), state)
    assert after.step == 1
    assert not same(run(state, make_batch())[0].params, state.params)


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_step_above_a_limit_is_left_out(field):
    state, run = start(BASE)
    after, metrics = run(state, make_batch(), OPEN._replace(**{field: np.float32(0.1)}))
    assert metrics[f"train/{field}"] > 0.1
    assert metrics["train/skipped"] == 1.0
    assert same(after._replace(step=state.step), state)


def test_a_step_at_its_limits_is_taken():
    state, run = start(BASE)
    _, metrics = run(state, make_batch())
    limits = OPEN._replace(loss=metrics["train/loss"], grad_norm=metrics["train/grad_norm"])
    after, metrics = run(state, make_batch(), limits)
    assert metrics["train/skipped"] == 0.0
    assert not same(after.params, state.params)


def test_a_batch_without_weight_is_finite_and_has_no_gradient():
    state, run = start(BASE)
    after, metrics = run(state, make_batch(weights=np.zeros((ROWS, SEQ))))
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["train/weight"] == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    norm = state.params["head"]["norm"]["scale"]
    np.testing.assert_array_equal(after.params["head"]["norm"]["scale"], norm)


def test_a_batch_ramp_grows_by_equal_increments():
    ramp = BatchRampConfig(start=4, increment=4, steps=8)
    train = TrainConfig(batch_size=16, microbatches=4, batch_ramp=ramp)
    sizes = [train.batch_size_at(step) for step in range(10)]
    assert sizes == [4, 4, 8, 8, 12, 12, 16, 16, 16, 16]


def test_a_batch_ramp_compiles_one_step_for_all_its_sizes():
    ramp = BatchRampConfig(start=1, increment=1, steps=4)
    train = dataclasses.replace(BASE.train, microbatches=4, batch_ramp=ramp)
    config = dataclasses.replace(BASE, train=train)
    state, run = start(config)
    for step in range(5):
        active = train.batch_size_at(step)
        weights = np.ones((ROWS, SEQ)) * (np.arange(ROWS) < active)[:, None]
        state, metrics = run(state, make_batch(4, weights, np.int32(active)))
        assert metrics["train/weight"] == SEQ * min(step + 1, 4)
    assert num_traces(config) == 1


@pytest.mark.parametrize(
    "ramp", [{"start": 3, "increment": 4, "steps": 8}, {"start": 4, "increment": 8, "steps": 8}]
)
def test_a_batch_ramp_that_does_not_fit_is_refused(ramp):
    with pytest.raises(ValueError, match="batch_ramp"):
        TrainConfig(batch_size=16, microbatches=4, batch_ramp=BatchRampConfig(**ramp))
