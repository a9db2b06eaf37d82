"""Attention sinks: one learned logit per head that takes part in the softmax's denominator alone.

A head may so attend to nothing (OpenAI 2025, arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453).
Whatever computed a softmax and its log-sum-exp, the sink is a last factor on both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mtjax.layers.cudnn import cudnn_backward, cudnn_forward


def with_sinks(
    out_BTNH: jax.Array, lse_BNT: jax.Array, sinks_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax average and log-sum-exp, float32, once each head's sink is in the denominator."""
    total_BNT = jnp.logaddexp(lse_BNT, sinks_N.astype(jnp.float32)[:, None])
    share_BTN = jnp.swapaxes(jnp.exp(lse_BNT - total_BNT), 1, 2)
    return out_BTNH.astype(jnp.float32) * share_BTN[..., None], total_BNT


def sink_gradient(
    sinks_N: jax.Array, out_BTNH: jax.Array, lse_BNT: jax.Array, dout_BTNH: jax.Array
) -> jax.Array:
    """Gradient [N] of the sinks, given output and log-sum-exp with them.

    The sink's weight p has the value 0 where keys have their own: dlogit = p (0 - dout . out).
    """
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[:, None] - lse_BNT)
    product = out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)
    gradient = -jnp.einsum("BNT,BTN->N", weight_BNT, jnp.sum(product, axis=-1))
    return gradient.astype(sinks_N.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def cudnn_with_sinks(
    scale: float,
    window: int,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    mask: jax.Array | None,
    sinks_N: jax.Array,
) -> jax.Array:
    """Causal attention [B, T, N, H] by cuDNN's kernels, which know no sinks."""
    return _forward(scale, window, q_BTNH, k_BTKH, v_BTKH, mask, sinks_N)[0]


def _forward(scale, window, q, k, v, mask, sinks) -> tuple[jax.Array, Any]:
    out, lse = cudnn_forward(q, k, v, mask, scale=scale, causal=True, window=window)
    out, lse = with_sinks(out, lse, sinks)
    out = out.astype(q.dtype)
    return out, (q, k, v, mask, sinks, out, lse)


def _backward(scale, window, residuals, dout):
    q, k, v, mask, sinks, out, lse = residuals
    gradients = cudnn_backward(
        (q, k, v), mask, out, lse, dout, scale=scale, causal=True, window=window
    )
    return *gradients, None, sink_gradient(sinks, out, lse, dout)


cudnn_with_sinks.defvjp(_forward, _backward)
