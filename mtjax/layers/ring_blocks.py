"""One block of ring attention, forward with its log-sum-exp and backward from those of all blocks.

Results are float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtjax.layers.attention_backends import AttentionCall, keep_weights
from mtjax.layers.cudnn import cudnn_backward, cudnn_forward

# A row that sees nothing of a block has this log-sum-exp, beside which any other one wins.
_HIDDEN = -1e30


class Block(NamedTuple):
    """What some queries see of some keys."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    mask: jax.Array | None
    """bool [B or 1, T, S]; None: everyone sees everyone."""
    causal: bool
    """Hides later keys of the same index range on top."""
    words_BN2: jax.Array | None
    """Dropout keys, as from `mtjax.layers.dropout.head_keys`."""
    queries_at: jax.Array
    """[B or 1, T]: where in the text the queries stand."""
    keys_at: jax.Array
    """[B or 1, S]"""


def block_forward(backend: str, call: AttentionCall, block: Block) -> tuple[jax.Array, jax.Array]:
    """Softmax average [B, T, N, H] over the keys of the block, and its log-sum-exp [B, N, T]."""
    q_BTNH, k_BSKH, v_BSKH, mask, causal = block[:5]
    if backend == "cudnn":
        out, lse = cudnn_forward(q_BTNH, k_BSKH, v_BSKH, mask, scale=call.scale, causal=causal)
        return out.astype(jnp.float32), lse.astype(jnp.float32)
    B, T, N, _ = q_BTNH.shape
    logits_BKGTS, _ = _logits(call, block)
    lse_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
    weights = jnp.exp(logits_BKGTS - lse_BKGT[..., None]).astype(v_BSKH.dtype)
    weights = _dropout(call, block)(weights)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH, preferred_element_type=jnp.float32)
    return out.reshape(B, T, N, -1), lse_BKGT.reshape(B, N, T)


def block_backward(
    backend: str,
    call: AttentionCall,
    block: Block,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v from this block; `out` and `lse` are those over all keys.

    With them exp(logits - lse) is each key's final weight, so that blocks just add up
    (Dao et al. 2022, arXiv 2205.14135, algorithm 4). That holds with dropout too (appendix B.4).
    """
    q_BTNH, k_BSKH, v_BSKH, mask, causal = block[:5]
    if backend == "cudnn":
        qkv = (q_BTNH, k_BSKH, v_BSKH)
        dq, dk, dv = cudnn_backward(
            qkv, mask, out_BTNH, lse_BNT, dout_BTNH, scale=call.scale, causal=causal
        )
        return dq.astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(B, T, K, N // K, -1)

    logits, slope = _logits(call, block)
    drop = _dropout(call, block)
    weights = jnp.exp(logits - lse_BNT.reshape(B, K, N // K, T)[..., None])
    q, out, dout = (grouped(x.astype(jnp.float32)) for x in (q_BTNH, out_BTNH, dout_BTNH))
    k, v = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)
    dv = jnp.einsum("BKGTS,BTKGH->BSKH", drop(weights), dout)
    dweights = drop(jnp.einsum("BTKGH,BSKH->BKGTS", dout, v))
    total = jnp.moveaxis(jnp.sum(dout * out, axis=-1), 1, 3)
    dlogits = weights * (dweights - total[..., None]) * slope * call.scale
    dq = jnp.einsum("BKGTS,BSKH->BTKGH", dlogits, k).reshape(B, T, N, H)
    return dq, jnp.einsum("BKGTS,BTKGH->BSKH", dlogits, q), dv


def _dropout(call: AttentionCall, block: Block) -> Callable[[jax.Array], jax.Array]:
    """What dropout does to weights [B, K, G, T, S], or to their cotangent."""
    if call.dropout == 0:
        return lambda weights: weights
    assert block.words_BN2 is not None
    K = block.k_BSKH.shape[2]
    keep = keep_weights(call, block.words_BN2, K, block.queries_at, block.keys_at)
    return lambda w: jnp.where(keep, w / (1.0 - call.dropout), jnp.zeros((), w.dtype))


def _logits(call: AttentionCall, block: Block) -> tuple[jax.Array, jax.Array]:
    """Masked float32 logits [B, K, G, T, S], and the softcap's derivative."""
    q_BTNH, k_BSKH, _, mask, causal = block[:5]
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * jnp.asarray(call.scale, q_BTNH.dtype)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    slope = jnp.float32(1)
    if call.softcap is not None:
        squashed = jnp.tanh(logits / call.softcap)
        logits, slope = call.softcap * squashed, 1 - jnp.square(squashed)
    if causal:
        below = jnp.tril(jnp.ones((1, T, S), bool))
        mask = below if mask is None else mask & below
    if mask is not None:
        logits = jnp.where(mask[:, None, None], logits, _HIDDEN)
    return logits, slope
