"""Dropout whose mask depends on the row of the global batch, never on where the row is computed."""

import jax
import jax.numpy as jnp

from mtjax.sharding import shard


def row_keys(key: jax.Array, rows_B: jax.Array) -> jax.Array:
    """One key per sequence, from the step's key and the sequence's row in the global batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def fold_rows(keys_B: jax.Array, data: int | jax.Array) -> jax.Array:
    """Derive keys for a layer or a site from each row's key."""
    return jax.vmap(lambda key: jax.random.fold_in(key, data))(keys_B)


def keep_mask(keys_B: jax.Array, rate: float, shape: tuple[int, ...], *names: str | None):
    """Mask [B, *shape], true with probability 1 - rate, laid out by the logical names."""
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys_B)
    return shard(mask, *names)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, *names: str | None) -> jax.Array:
    """Zero a share `rate` of `x` [B, ...] and scale the rest; identity without keys."""
    if keys_B is None or rate == 0.0:
        return x
    mask = keep_mask(keys_B, rate, x.shape[1:], *names)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros((), x.dtype))
