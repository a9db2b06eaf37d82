"""Chunked cross entropy against plain log-softmax and its autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.training.losses import LossConfig, linear_cross_entropy

B, T, D, V, PADDED = 3, 10, 6, 29, 32
FAST = {"xla_backend_optimization_level": 0}


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

    got, got_gradients = jax.jit(jax.value_and_grad(ours, (0, 1)), compiler_options=FAST)(x, table)
    expected, gradients = jax.jit(jax.value_and_grad(theirs, (0, 1)), compiler_options=FAST)(
        x, table
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    for ours_leaf, leaf in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(ours_leaf, leaf, atol=1e-5)
    np.testing.assert_allclose(jax.jit(ours, compiler_options=FAST)(x, table), expected, rtol=1e-6)


def test_padded_ids_get_no_probability_and_no_gradient():
    x, table, labels, weights = inputs()
    config = LossConfig(V, None, 0.0, 4)
    huge = table.at[V:].set(1e3)

    def loss(table):
        return linear_cross_entropy(config, x, table, labels, weights).total

    assert loss(huge) == loss(table)
    assert not np.any(jax.grad(loss)(huge)[V:])


def test_tokens_without_weight_add_nothing_and_have_no_gradient_whatever_they_hold():
    x, table, labels, weights = inputs()
    config = LossConfig(V, None, 0.1, 4)

    def loss(x, table):
        return linear_cross_entropy(config, x, table, labels, weights).total

    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=FAST)
    expected, (of_x, of_table) = value_and_grad(x, table)
    ignored = np.asarray(weights) == 0
    assert not np.asarray(of_x)[ignored].any()
    assert np.abs(np.asarray(of_x)[~ignored]).sum(axis=-1).all()
    garbage = jnp.where(ignored[..., None], 1e6 * x, x)
    got, (of_garbage, table_of_garbage) = value_and_grad(garbage, table)
    assert got == expected
    np.testing.assert_array_equal(of_garbage, of_x)
    np.testing.assert_array_equal(table_of_garbage, of_table)


def test_without_weights_the_loss_and_its_gradients_are_zero():
    x, table, labels, weights = inputs()

    def loss(x, table):
        config = LossConfig(V, 2.0, 0.1, 4)
        return linear_cross_entropy(config, x, table, labels, 0 * weights).total

    got, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=FAST)(x, table)
    assert got == 0.0
    assert not any(np.any(g) for g in gradients)


def test_equal_logits_cost_the_logarithm_of_the_unpadded_vocabulary():
    x, table, labels, _ = inputs()
    ones = jnp.ones((B, T))
    config = LossConfig(V, None, 0.5, 4)
    sums = linear_cross_entropy(config, 0 * x, table, labels, ones)
    np.testing.assert_allclose(sums.cross_entropy, B * T * np.log(V), rtol=1e-6)
    np.testing.assert_allclose(sums.total, B * T * (np.log(V) + 0.5 * np.log(V) ** 2), rtol=1e-6)


def test_huge_logits_stay_finite():
    """exp(89) overflows float32; a token that is sure of its label costs nothing."""
    x, labels = jnp.full((1, 1, 1), 1e4), jnp.zeros((1, 1), jnp.int32)
    table = jnp.zeros((PADDED, 1)).at[0].set(1.0)

    def loss(x, labels):
        config = LossConfig(V, None, 0.0, 4)
        return linear_cross_entropy(config, x, table, labels, jnp.ones((1, 1))).total

    assert loss(x, labels) == 0.0
    assert loss(x, labels + 1) == 1e4
    assert jax.grad(loss)(x, labels + 1) == 1.0


def test_bf16_inputs_give_the_float32_loss_and_gradients_of_their_values():
    """The product is rounded to bfloat16 (2^-9) per token, and so are the gradients of logits."""
    x, table, labels, weights = inputs(jnp.bfloat16)

    def ours(x, table):
        config = LossConfig(V, None, 0.0, 4)
        return linear_cross_entropy(config, x, table, labels, weights).total

    def theirs(x, table):
        return plain(x, table, labels, weights, None, 0.0)

    got, got_gradients = jax.jit(jax.value_and_grad(ours, (0, 1)), compiler_options=FAST)(x, table)
    wide = (x.astype(jnp.float32), table.astype(jnp.float32))
    expected, gradients = jax.value_and_grad(theirs, (0, 1))(*wide)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=2e-3)
    for ours_leaf, leaf in zip(got_gradients, gradients, strict=True):
        assert ours_leaf.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(ours_leaf, np.float32) - leaf) / np.linalg.norm(leaf)
        assert error < 1e-2


def test_the_metric_is_the_cross_entropy_without_the_z_loss():
    x, table, labels, weights = inputs()
    sums = linear_cross_entropy(LossConfig(V, None, 0.1, 4), x, table, labels, weights)
    expected = plain(x, table, labels, weights, None, 0.0)
    np.testing.assert_allclose(sums.cross_entropy, expected, rtol=1e-6)
    assert sums.total > sums.cross_entropy
