"""Who computes softmax(Q K^T) V. Each backend declares what it supports."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mtjax.config.model import Exchange
from mtjax.layers.dropout import keep_at
from mtjax.layers.sinks import cudnn_with_sinks
from mtjax.sharding import local_map, shard


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The static features of one attention call; it is always causal."""

    scale: float
    value_dim: int | None = None
    """Width of a value head; None: that of a key head."""
    window: int = 0
    """Tokens a query sees, itself included; 0 is all before it."""
    softcap: float | None = None
    dropout: float = 0.0
    packed: bool = False
    """Segment ids are given."""
    cached: bool = False
    """Keys are a buffer longer than the queries, at an offset known at run time."""
    exchange: Exchange | None = None
    """How shards of the sequence get at each other's keys; None: each holds all of it."""


def unsupported(backend: str, call: AttentionCall, head_dim: int, dtype: Any) -> str | None:
    """Why `backend` can't compute `call` on heads of this width and dtype; None if it can."""
    if call.packed and call.cached:
        # The ids are the queries'; of the keys in the buffer none are known.
        return "packed documents with a cache"
    if backend == "xla":
        return None
    if call.exchange == "allgather":
        return "the allgather exchange, where queries of a shard start amid the keys"
    # jax.nn's cuDNN path: fused attention, forward and backward, without an attention-logit
    # hook or a dropout argument.
    if call.softcap is not None:
        return "attention.logit_softcap"
    if call.dropout > 0:
        return "attention.dropout"
    if call.cached:
        return "generation with a cache"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(dtype).name} activations"
    if head_dim > 128 or head_dim % 8:
        return f"head_dim {head_dim} (at most 128, a multiple of 8)"
    if call.value_dim not in (None, head_dim):
        return f"values of width {call.value_dim} with keys of width {head_dim}"
    return None


def attend(
    backend: str,
    call: AttentionCall,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    words_BN2: jax.Array | None,
    offset: int | jax.Array,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B, T, N, H]; query t stands at key index t + offset.

    With the xla backend values, and so the output, may have another width than keys. `words_BN2`:
    dropout keys, as from `mtjax.layers.dropout.head_keys`. `sinks_N`: a logit per head that takes
    part in the softmax's denominator alone.

    Raises:
        ValueError: the backend does not support the call, or is still "auto".
    """
    check_supported(backend, call, q_BTNH.shape[-1], q_BTNH.dtype)
    if backend == "cudnn":
        return _attend_cudnn(call, q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N)
    return _attend_xla(call, q_BTNH, k_BSKH, v_BSKH, segments_BT, words_BN2, offset, sinks_N)


def check_supported(backend: str, call: AttentionCall, head_dim: int, dtype: Any) -> None:
    """Check that `backend` can compute `call`.

    Raises:
        ValueError: it can't, or is still "auto".
    """
    if backend == "auto":
        raise ValueError(
            "attention.backend: got 'auto' inside the model, expected it resolved for the mesh's "
            "platform; use mtjax.config.resolve_backends(config, platform)"
        )
    reason = unsupported(backend, call, head_dim, dtype)
    if reason:
        raise ValueError(
            f"attention.backend: got {backend!r}, which does not support {reason}; "
            "set attention.backend to xla or auto, or change that setting"
        )


def attention_mask(
    call: AttentionCall,
    num_queries: int,
    num_keys: int,
    segments_BT: jax.Array | None,
    offset: int | jax.Array,
) -> jax.Array:
    """Who sees whom: bool [B or 1, T, S], causal, within the window and the document."""
    query = jnp.arange(num_queries)[:, None] + offset
    key = jnp.arange(num_keys)[None, :]
    mask = key <= query
    if call.window:
        mask &= key > query - call.window
    mask = mask[None]
    if segments_BT is not None:
        mask &= segments_BT[:, :, None] == segments_BT[:, None, :]
    return mask


def _attend_xla(call, q_BTNH, k_BSKH, v_BSKH, segments_BT, words_BN2, offset, sinks_N):
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * jnp.asarray(call.scale, q_BTNH.dtype)
    # Scores and softmax in float32: bfloat16 loses the small weights of long sequences.
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    if call.softcap is not None:
        logits = call.softcap * jnp.tanh(logits / call.softcap)
    mask = attention_mask(call, T, S, segments_BT, offset)[:, None, None]
    logits = jnp.where(mask, logits, -1e30)
    if sinks_N is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        sinks_KG1 = sinks_N.astype(jnp.float32).reshape(K, N // K, 1)
        total = jnp.logaddexp(jax.nn.logsumexp(logits, axis=-1), sinks_KG1)
        weights = jnp.exp(logits - total[..., None])
    weights = weights.astype(v_BSKH.dtype)
    if call.dropout > 0:
        keep = keep_weights(call, words_BN2, K, jnp.arange(T)[None] + offset, jnp.arange(S)[None])
        keep = shard(keep, "batch", "act_heads", None, "seq", None)
        weights = jnp.where(keep, weights / (1.0 - call.dropout), jnp.zeros((), weights.dtype))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH).reshape(B, T, N, -1)


def keep_weights(
    call: AttentionCall,
    words_BN2: jax.Array,
    num_kv_heads: int,
    queries_BT: jax.Array,
    keys_BS: jax.Array,
) -> jax.Array:
    """Dropout mask [B, K, G, T, S], given where in the text queries and keys stand."""
    B, N, _ = words_BN2.shape
    words = words_BN2.reshape(B, num_kv_heads, N // num_kv_heads, 1, 1, 2)
    queries, keys = queries_BT[:, None, None, :, None], keys_BS[:, None, None, None, :]
    return keep_at(call.dropout, words, queries, keys)


def _attend_cudnn(call, q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N) -> jax.Array:
    def core(q, k, v, segments, sinks):
        mask = None
        if segments is not None:
            # cuDNN has no segment argument: a mask, which becomes a [B, 1, T, S] bias.
            mask = segments[:, :, None] == segments[:, None, :]
        if sinks is not None:
            return cudnn_with_sinks(call.scale, call.window, q, k, v, mask, sinks)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=None if mask is None else mask[:, None],
            scale=call.scale,
            is_causal=True,
            local_window_size=(call.window - 1, 0) if call.window else None,
            implementation="cudnn",
        )

    # An island: its custom partitioning does not survive a partly manual region.
    heads = ("batch", None, "act_heads", None)
    names = (heads, heads, heads, ("batch", None), ("act_heads",))
    return local_map(core, names, heads)(q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N)
