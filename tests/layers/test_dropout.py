"""Random numbers by row of the global batch and place in the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layers.attention_backends import AttentionCall, keep_weights
from mtjax.layers.dropout import (
    dropout,
    fold_rows,
    head_keys,
    normal_of_tokens,
    row_keys,
)
from mtjax.layers.ring import zigzag_order

KEYS = row_keys(jax.random.key(3), jnp.arange(4))
ORDER = zigzag_order(12, 3)
CALL = AttentionCall(scale=1.0, dropout=0.5)


def kept(keys, shape, rate=0.5, order_T=None):
    """The mask of ones [B, *shape]."""
    out = dropout(jnp.ones((len(keys), *shape)), rate, keys, order_T)
    return np.asarray(out) > 0


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_the_share_of_zeros_and_the_rest_keeps_the_mean(rate):
    """Five standard deviations of a binomial over 40,000 entries."""
    out = np.asarray(dropout(jnp.ones((4, 100, 100)), rate, KEYS, None))
    bound = 5 * np.sqrt(rate * (1 - rate) / 40_000)
    assert np.mean(out == 0) == pytest.approx(rate, abs=bound)
    np.testing.assert_allclose(np.unique(out), [0.0, 1 / (1 - rate)], rtol=1e-6)


def test_a_row_has_the_same_mask_wherever_the_batch_is_cut():
    whole = kept(KEYS, (7, 5))
    for rows in ([0, 1], [2, 3], [3], [2, 0, 3]):
        keys = row_keys(jax.random.key(3), jnp.array(rows))
        np.testing.assert_array_equal(kept(keys, (7, 5)), whole[jnp.array(rows)])


def test_a_token_has_the_same_numbers_wherever_it_is_stored():
    plain, moved = (kept(KEYS, (12, 5), order_T=order) for order in (None, ORDER))
    np.testing.assert_array_equal(moved, plain[:, ORDER])
    plain, moved = (normal_of_tokens(KEYS, order, 12, 5) for order in (None, ORDER))
    np.testing.assert_array_equal(moved, plain[:, ORDER])


def test_a_block_of_attention_has_its_part_of_the_whole_mask():
    """Of two of six heads, in groups or not, and of tokens that stand anywhere in the text."""
    words_BN2 = head_keys(KEYS, 6)
    at = jnp.arange(12)[None]
    whole = keep_weights(CALL, words_BN2, 3, at, at).reshape(4, 6, 12, 12)
    queries, keys = ORDER[None, :4], jnp.array([[9, 2, 3]])
    part = keep_weights(CALL, words_BN2[:, 2:4], 2, queries, keys)
    np.testing.assert_array_equal(part[:, :, 0], whole[:, 2:4, ORDER[:4]][..., keys[0]])


def test_rows_steps_sites_heads_tokens_and_features_have_masks_of_their_own():
    """Independent masks at rate 1/2 agree in half of 1,000 entries, give or take 5 deviations."""
    shape = (40, 25)
    whole = kept(KEYS, shape)
    at = jnp.arange(40)[None]
    heads = np.asarray(keep_weights(CALL, head_keys(fold_rows(KEYS, 0), 2), 2, at, at[:, :25]))
    others = {
        "rows": np.roll(whole, 1, axis=0),
        "step": kept(row_keys(jax.random.key(4), jnp.arange(4)), shape),
        "site 0": kept(fold_rows(KEYS, 0), shape),
        "site 1": kept(fold_rows(KEYS, 1), shape),
        "head 0": heads[:, 0, 0],
        "head 1": heads[:, 1, 0],
        "tokens": np.roll(whole, 1, axis=1),
        "features": np.roll(whole, 1, axis=2),
    }
    names = [*others, "whole"]
    others["whole"] = whole
    for i, name in enumerate(names):
        for other in names[:i]:
            agreement = np.mean(others[other] == others[name], axis=(1, 2))
            assert np.all(np.abs(agreement - 0.5) < 5 * 0.5 / np.sqrt(1000)), (name, other)


def test_noise_is_standard_normal():
    """Moments of 160,000 draws, within five standard deviations of each."""
    noise = np.asarray(normal_of_tokens(KEYS, None, 200, 200), np.float64).ravel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        bound = 5 * np.sqrt(variance / noise.size)
        assert np.mean(noise**power) == pytest.approx(moment, abs=bound)
    assert 4 < np.abs(noise).max() < 6
    extremes = np.sqrt(2) * jax.lax.erf_inv(jnp.float32([2**-23 - 1, 1 - 2**-23]))
    assert np.all(np.isfinite(extremes)), "of the smallest and the largest bits"


def test_without_keys_or_rate_nothing_changes():
    x = jnp.arange(8.0).reshape(2, 2, 2)
    assert dropout(x, 0.5, None, None) is x
    assert dropout(x, 0.0, KEYS, None) is x
