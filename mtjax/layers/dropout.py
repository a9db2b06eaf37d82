"""Random numbers of layers: functions of what they belong to, never of where they are computed.

A number belongs to a sequence, a site in the model (a key per sequence, and head of attention) and
two indices, such as the place of a token in the text and a feature. Threefry (Salmon et al. 2011)
maps key and indices to bits, element by element, so that any layout and any order of tokens
computes its own and nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from mtjax.sharding import shard


def row_keys(key: jax.Array, rows_B: jax.Array) -> jax.Array:
    """One key per sequence, from the step's key and the sequence's row in the global batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def fold_rows(keys_B: jax.Array, data: int | jax.Array) -> jax.Array:
    """Derive keys for a layer or a site from each row's key."""
    return jax.vmap(lambda key: jax.random.fold_in(key, data))(keys_B)


def head_keys(keys_B: jax.Array, num_heads: int) -> jax.Array:
    """A key for each head of attention, as two words: uint32 [B, N, 2]."""
    over_heads = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys_BN = jax.vmap(over_heads, in_axes=(0, None))(keys_B, jnp.arange(num_heads))
    return shard(jax.random.key_data(keys_BN), "batch", "act_heads", None)


def keep_at(rate: float, words: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Mask, true with probability 1 - rate, for keys [..., 2] as words and two indices [...]."""
    limit = min(round((1.0 - rate) * 2**32), 2**32 - 1)
    return _bits_at(words, first, second) < np.uint32(limit)


def normal_of_tokens(keys_B: jax.Array, order_T: np.ndarray | None, size: int, num: int):
    """Standard normal [B, T, num] for the `size` tokens of each row, float32.

    `order_T` as `dropout` takes it.
    """
    bits = _bits_at(*_of_tokens(keys_B, order_T, size, num))
    # The middles of 2^23 equal parts of (-1, 1), which float32 holds exactly.
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-22 + (2.0**-23 - 1.0)
    return jnp.sqrt(jnp.float32(2)) * jax.lax.erf_inv(uniform)


def dropout(
    x_BTD: jax.Array, rate: float, keys_B: jax.Array | None, order_T: np.ndarray | None
) -> jax.Array:
    """Zero a share `rate` of `x`, sequence-parallel, and scale the rest; identity without keys.

    `order_T`: which token of the text stands at each place; None is their own order.
    """
    if keys_B is None or rate == 0.0:
        return x_BTD
    _, T, D = x_BTD.shape
    keep_BTD = keep_at(rate, *_of_tokens(keys_B, order_T, T, D))
    keep_BTD = shard(keep_BTD, "batch", "seq_sp", None)
    return jnp.where(keep_BTD, x_BTD / (1.0 - rate), jnp.zeros((), x_BTD.dtype))


def _of_tokens(keys_B: jax.Array, order_T: np.ndarray | None, size: int, num: int):
    """Keys as words, and the indices of `num` numbers for each token of a row."""
    index_T = jnp.arange(size) if order_T is None else jnp.asarray(order_T)
    return jax.random.key_data(keys_B)[:, None, None], index_T[:, None], jnp.arange(num)


def _bits_at(words: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """uint32, one for each element of what the arguments are together when broadcast."""
    key = words[..., 0], words[..., 1]
    # Mixed with the key, which is the layer's, while they are small: counters that no layer changes
    # would be computed ahead of the loop over layers, and kept, as large as what they count.
    counters = (i.astype(jnp.uint32) ^ word for i, word in zip((first, second), key, strict=True))
    high, low = threefry2x32_p.bind(*jnp.broadcast_arrays(*key, *counters))
    return high ^ low
