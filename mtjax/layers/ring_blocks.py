"""One block of ring attention, forward with its log-sum-exp and backward from those of all blocks.

A block is what queries see of some keys. `mask` is bool [B or 1, T, S] or None; `causal` hides
later keys of the same index range on top. Results are float32.
"""

import jax
import jax.numpy as jnp

from mtjax.layers.attention_backends import AttentionCall
from mtjax.layers.cudnn import cudnn_backward, cudnn_forward

# A row that sees nothing of a block has this log-sum-exp, beside which any other one wins.
_HIDDEN = -1e30

Block = tuple[jax.Array, jax.Array]


def block_forward(
    backend: str,
    call: AttentionCall,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: jax.Array | None,
    *,
    causal: bool,
) -> Block:
    """Softmax average [B, T, N, H] over the keys of the block, and its log-sum-exp [B, N, T]."""
    if backend == "cudnn":
        out, lse = cudnn_forward(q_BTNH, k_BSKH, v_BSKH, mask, scale=call.scale, causal=causal)
        return out.astype(jnp.float32), lse.astype(jnp.float32)
    B, T, N, _ = q_BTNH.shape
    logits_BKGTS, _ = _logits(call, q_BTNH, k_BSKH, mask, causal)
    lse_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
    weights = jnp.exp(logits_BKGTS - lse_BKGT[..., None]).astype(v_BSKH.dtype)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH, preferred_element_type=jnp.float32)
    return out.reshape(B, T, N, -1), lse_BKGT.reshape(B, N, T)


def block_backward(
    backend: str,
    call: AttentionCall,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: jax.Array | None,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v from this block; `out` and `lse` are those over all keys.

    With them exp(logits - lse) is each key's final weight, so that blocks just add up
    (Dao et al. 2022, arXiv 2205.14135, algorithm 4).
    """
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

    logits, slope = _logits(call, q_BTNH, k_BSKH, mask, causal)
    weights = jnp.exp(logits - lse_BNT.reshape(B, K, N // K, T)[..., None])
    q, out, dout = (grouped(x.astype(jnp.float32)) for x in (q_BTNH, out_BTNH, dout_BTNH))
    k, v = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)
    dv = jnp.einsum("BKGTS,BTKGH->BSKH", weights, dout)
    dweights = jnp.einsum("BTKGH,BSKH->BKGTS", dout, v)
    total = jnp.moveaxis(jnp.sum(dout * out, axis=-1), 1, 3)
    dlogits = weights * (dweights - total[..., None]) * slope * call.scale
    dq = jnp.einsum("BKGTS,BSKH->BTKGH", dlogits, k).reshape(B, T, N, H)
    return dq, jnp.einsum("BKGTS,BTKGH->BSKH", dlogits, q), dv


def _logits(call, q_BTNH, k_BSKH, mask, causal):
    """Masked float32 logits [B, K, G, T, S], and the softcap's derivative."""
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
