"""Attention where the shards of a sequence lie along the mesh axis `context`.

K is key/value heads of one device, C the shards of the sequence.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config.model import ModelConfig
from mtjax.layers.attention_backends import AttentionCall, attend, check_supported
from mtjax.layers.ring import ring_attention, zigzag_order
from mtjax.sharding import all_mesh_axes, axis_size, local_map, mesh_axes, reshard

_OWN, _WHOLE = ("batch", "seq", "act_heads", None), ("batch", None, "act_heads", None)


def token_order(model: ModelConfig, num_tokens: int) -> np.ndarray | None:
    """Index [T] of the token at each place of a sequence; None: tokens are in their own order."""
    num_shards = math.prod(axis_size(axis) for axis in all_mesh_axes("seq"))
    if num_shards == 1 or model.attention.exchange != "ring":
        return None
    return zigzag_order(num_tokens, num_shards)


def attend_across(
    backend: str,
    call: AttentionCall,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    words_BN2: jax.Array | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B, T, N, H] by the exchange that `call` names.

    Tokens are in the order of `token_order`. `words_BN2`: dropout keys, as `attend` takes them.

    Raises:
        ValueError: the backend does not support the call, or is still "auto".
    """
    check_supported(backend, call, q_BTNH.shape[-1], q_BTNH.dtype)
    local = replace(call, exchange=None)
    if call.exchange == "allgather":
        # XLA splits the rest by the queries; the mask is one of global indices.
        k_BSKH, v_BSKH = (reshard(t, _OWN, _WHOLE) for t in (k_BTKH, v_BTKH))
        return attend(backend, local, q_BTNH, k_BSKH, v_BSKH, segments_BT, words_BN2, 0, sinks_N)
    ring = call.exchange == "ring"
    exchange = partial(ring_attention if ring else _ulysses, backend, local, mesh_axes("seq")[0])
    segments, words = ("batch", "seq" if ring else None), ("batch", "act_heads", None)
    return local_map(exchange, (_OWN, _OWN, _OWN, segments, words, ("act_heads",)), _OWN)(
        q_BTNH, k_BTKH, v_BTKH, segments_BT, words_BN2, sinks_N
    )


def _ulysses(backend, call, axis, q_BTNH, k_BTKH, v_BTKH, segments_BS, words_BN2, sinks_N):
    """All-to-alls give each device all tokens of 1/C of its heads (Jacobs et al. 2023)."""
    size = jax.lax.axis_size(axis)
    if k_BTKH.shape[2] < size:
        # Neighbouring shards of the query heads share a key head: each gets a copy.
        copies = size // k_BTKH.shape[2]
        k_BTKH, v_BTKH = (jnp.repeat(t, copies, axis=2) for t in (k_BTKH, v_BTKH))
    q, k, v = (
        jax.lax.all_to_all(t, axis, split_axis=2, concat_axis=1, tiled=True)
        for t in (q_BTNH, k_BTKH, v_BTKH)
    )

    def own_heads(leaf: jax.Array, dim: int) -> jax.Array:
        own = leaf.shape[dim] // size
        return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(axis) * own, own, dim)

    if sinks_N is not None:
        sinks_N = own_heads(sinks_N, 0)
    if words_BN2 is not None:
        words_BN2 = own_heads(words_BN2, 1)
    out = attend(backend, call, q, k, v, segments_BS, words_BN2, 0, sinks_N)
    return jax.lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True)
