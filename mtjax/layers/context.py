"""Attention where the shards of a sequence lie along the mesh axis `context`.

K is key/value heads of one device, C the shards of the sequence.
"""

import math
from dataclasses import replace

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
    keys_B: jax.Array | None,
) -> jax.Array:
    """Causal attention [B, T, N, H] by the exchange that `call` names.

    Tokens are in the order of `token_order`.

    Raises:
        ValueError: the backend does not support the call, or is still "auto".
    """
    check_supported(backend, call, q_BTNH.shape[-1], q_BTNH.dtype)
    local = replace(call, exchange=None)
    if call.exchange == "allgather":
        # XLA splits the rest by the queries; the mask is one of global indices.
        k_BSKH, v_BSKH = (reshard(t, _OWN, _WHOLE) for t in (k_BTKH, v_BTKH))
        return attend(backend, local, q_BTNH, k_BSKH, v_BSKH, segments_BT, keys_B, 0)
    operands = (q_BTNH, k_BTKH, v_BTKH) + (() if segments_BT is None else (segments_BT,))
    axis = mesh_axes("seq")
    names: tuple = (_OWN, _OWN, _OWN)
    if call.exchange == "ring":
        names += () if segments_BT is None else (("batch", "seq"),)

        def ring(q, k, v, segments=None):
            return ring_attention(backend, local, axis[0], q, k, v, segments)

        return local_map(ring, names, _OWN)(*operands)

    names += () if segments_BT is None else (("batch", None),)

    def ulysses(q, k, v, segments=None):
        return _ulysses(backend, local, axis[0], q, k, v, segments)

    return local_map(ulysses, names, _OWN)(*operands)


def _ulysses(backend, call, axis, q_BTNH, k_BTKH, v_BTKH, segments_BS) -> jax.Array:
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
    out = attend(backend, call, q, k, v, segments_BS, None, 0)
    return jax.lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True)
