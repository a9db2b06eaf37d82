"""cuDNN's fused attention with its log-sum-exp, and its backward pass given those of other keys.

The public wrapper, `jax.nn.dot_product_attention`, rounds the log-sum-exp to the output's dtype.
"""

import jax
import jax.numpy as jnp


def cudnn_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Softmax average [B, T, N, H], in the dtype of q, and its log-sum-exp [B, N, T], float32.

    `mask`: bool [B or 1, T, S] or None. `window`: tokens a query sees, its own included; 0 is all.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    B, T, S = q_BTNH.shape[0], q_BTNH.shape[1], k_BSKH.shape[1]
    return dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=None if mask is None else jnp.broadcast_to(mask[:, None], (B, 1, T, S)),
        scale=scale,
        mask_type=MaskType.CAUSAL if causal else MaskType.NO_MASK,
        sliding_window_length=window or None,
        return_residual=True,
    )


def cudnn_backward(
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array | None,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v by cuDNN's own kernel, given another output and log-sum-exp than theirs.

    They are residuals of its VJP, found there by identity; the forward kernel is then dead code.
    """

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cudnn_forward(q, k, v, mask, scale=scale, causal=causal, window=window)

    (own_out, own_lse), vjp = jax.vjp(forward, *qkv)
    leaves, structure = jax.tree.flatten(vjp)
    found = [leaf is own_out or leaf is own_lse for leaf in leaves]
    if sum(found) != 2:
        raise NotImplementedError(
            f"attention.backend: got cudnn on jax {jax.__version__}, expected its VJP to keep the "
            f"output and the log-sum-exp, found {sum(found)} of 2; set attention.backend to xla"
        )
    leaves = [
        out_BTNH.astype(leaf.dtype)
        if leaf is own_out
        else lse_BNT.astype(leaf.dtype)
        if leaf is own_lse
        else leaf
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, leaves)((dout_BTNH, jnp.zeros_like(own_lse)))
