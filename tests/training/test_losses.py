"""Chunked cross entropy against plain log-softmax and its autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.training.losses import LossConfig, linear_cross_entropy

B, T, D, V, PADDED = 3, 10, 6, 29, 32


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    table = jnp.asarray(rng.normal(size=(PADDED, D)), dtype)
    labels = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) * (rng.random((B, T)) < 0.7), jnp.float32)
    return x, table, labels, weights


def plain(x, table, labels, weights, softcap, z_loss):
    logits = (x.astype(jnp.float32) @ table.astype(jnp.float32).T)[..., :V]
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (log_z - chosen)) + z_loss * jnp.sum(weights * log_z**2)


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_loss_and_gradients_equal_plain_autodiff(chunk, softcap, z_loss):
    x, table, labels, weights = inputs()
    config = LossConfig(V, softcap, z_loss, chunk)

    def ours(x, table):
        return 0.7 * linear_cross_entropy(config, x, table, labels, weights).total

    def theirs(x, table):
        return 0.7 * plain(x, table, labels, weights, softcap, z_loss)

    got, got_gradients = jax.value_and_grad(ours, (0, 1))(x, table)
    expected, gradients = jax.value_and_grad(theirs, (0, 1))(x, table)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    for ours_leaf, leaf in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(ours_leaf, leaf, atol=1e-5)
    np.testing.assert_allclose(
        linear_cross_entropy(config, x, table, labels, weights).total * 0.7, expected, rtol=1e-6
    )


def test_padded_ids_get_no_probability_and_no_gradient():
    x, table, labels, weights = inputs()
    config = LossConfig(V, None, 0.0, 4)
    huge = table.at[V:].set(1e3)

    def loss(table):
        return linear_cross_entropy(config, x, table, labels, weights).total

    assert loss(huge) == loss(table)
    assert not np.any(jax.grad(loss)(huge)[V:])


def test_tokens_without_weight_have_no_gradient():
    x, table, labels, weights = inputs()

    def loss(x):
        return linear_cross_entropy(LossConfig(V, None, 0.1, 4), x, table, labels, weights).total

    gradient = np.asarray(jax.grad(loss)(x))
    assert not gradient[np.asarray(weights) == 0].any()
    assert np.abs(gradient[np.asarray(weights) > 0]).sum(axis=-1).all()


def test_bf16_inputs_give_the_float32_loss_of_their_values():
    x, table, labels, weights = inputs(jnp.bfloat16)
    config = LossConfig(V, None, 0.0, 4)
    got = linear_cross_entropy(config, x, table, labels, weights)
    expected = plain(x, table, labels, weights, None, 0.0)
    assert got.total.dtype == jnp.float32
    # The product is rounded to bfloat16 (2^-9) per token; the sum averages over 30 of them.
    np.testing.assert_allclose(got.total, expected, rtol=2e-3)


def test_the_metric_is_the_cross_entropy_without_the_z_loss():
    x, table, labels, weights = inputs()
    sums = linear_cross_entropy(LossConfig(V, None, 0.1, 4), x, table, labels, weights)
    expected = plain(x, table, labels, weights, None, 0.0)
    np.testing.assert_allclose(sums.cross_entropy, expected, rtol=1e-6)
    assert sums.total > sums.cross_entropy
