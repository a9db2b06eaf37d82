"""Dropout by rows of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layers.dropout import dropout, fold_rows, keep_mask, row_keys

KEYS = row_keys(jax.random.key(3), jnp.arange(4))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_the_share_of_zeros_and_the_rest_keeps_the_mean(rate):
    """Five standard deviations of a binomial over 40,000 entries."""
    out = np.asarray(dropout(jnp.ones((4, 100, 100)), rate, KEYS, "batch", None, None))
    bound = 5 * np.sqrt(rate * (1 - rate) / 40_000)
    assert np.mean(out == 0) == pytest.approx(rate, abs=bound)
    np.testing.assert_allclose(np.unique(out), [0.0, 1 / (1 - rate)], rtol=1e-6)


def test_a_row_has_the_same_mask_wherever_the_batch_is_cut():
    whole = keep_mask(KEYS, 0.5, (7, 5), "batch", None, None)
    for rows in ([0, 1], [2, 3], [3], [2, 0, 3]):
        keys = row_keys(jax.random.key(3), jnp.array(rows))
        part = keep_mask(keys, 0.5, (7, 5), "batch", None, None)
        np.testing.assert_array_equal(part, whole[jnp.array(rows)])


def test_rows_steps_and_sites_have_masks_of_their_own():
    """Independent masks at rate 1/2 agree in half of 1,000 entries, give or take 5 deviations."""

    def mask(keys):
        return np.asarray(keep_mask(keys, 0.5, (1000,), "batch", None))

    whole = mask(KEYS)
    others = {
        "rows": np.roll(whole, 1, axis=0),
        "step": mask(row_keys(jax.random.key(4), jnp.arange(4))),
        "site 0": mask(fold_rows(KEYS, 0)),
        "site 1": mask(fold_rows(KEYS, 1)),
    }
    for name, other in others.items():
        agreement = np.mean(other == whole, axis=1)
        assert np.all(np.abs(agreement - 0.5) < 5 * 0.5 / np.sqrt(1000)), name
    assert np.mean(others["site 0"] == others["site 1"]) < 0.6


def test_without_keys_or_rate_nothing_changes():
    x = jnp.arange(8.0).reshape(4, 2)
    assert dropout(x, 0.5, None, "batch", None) is x
    assert dropout(x, 0.0, KEYS, "batch", None) is x
