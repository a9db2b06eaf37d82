"""Attention: projections, rotation, and the backends that compute softmax(QK)V."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.layers.attention_backends import AttentionCall, attend
from mtjax.layers.context import attend_across
from mtjax.layers.dropout import fold_rows, head_keys
from mtjax.layers.init import normal
from mtjax.layers.linear import Gathered, Linear, named
from mtjax.layers.norm import RMSNorm
from mtjax.layers.rope import apply_rope, product_factor
from mtjax.sharding import all_mesh_axes, shard


class Cache(NamedTuple):
    """Keys and values of the tokens already seen, for generation.

    `keys`, `values`: [B, S, K, H] buffers, of `cache_shapes`; with latent attention the latent and
    the key that rotates, of one head that all share; `length`: int32 scalar, tokens already stored.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> "Cache":
        """Write T new tokens behind the stored ones."""
        start = (0, self.length, 0, 0)
        return Cache(
            jax.lax.dynamic_update_slice(self.keys, k_BTKH.astype(self.keys.dtype), start),
            jax.lax.dynamic_update_slice(self.values, v_BTKH.astype(self.values.dtype), start),
            self.length + k_BTKH.shape[1],
        )


class BlockInputs(NamedTuple):
    """What every block of a stack reads beside the residual stream.

    `rope`: [2, B, T, H/2] from `rope_table`, for the part of a head that rotates; None without
    rotation. `segments`: int [B, T], tokens attend within equal ids; None when sequences hold one
    document. `keys`: dropout keys [B], None outside training. `counts`: bool [B, T], False where a
    position holds padding that experts leave out; None: all count. `load`: [E], pairs per expert of
    this layer over the whole batch, for a balance loss of that scope; None elsewhere.
    """

    rope: jax.Array | None
    segments: jax.Array | None
    keys: jax.Array | None
    counts: jax.Array | None = None
    load: jax.Array | None = None


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query causal self-attention."""

    model: ModelConfig
    window: int

    @nn.compact
    def __call__(
        self, x_BTD: Gathered, inputs: BlockInputs, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        config = self.model.attention
        q_BTNH = self._project("query", "heads", config.num_heads)(x_BTD)
        k_BTKH = self._project("key", "kv_heads", self.model.num_kv_heads)(x_BTD)
        v_BTKH = self._project("value", "kv_heads", self.model.num_kv_heads)(x_BTD)
        if config.qk_norm:
            q_BTNH = self._head_norm("query_norm")(q_BTNH)
            k_BTKH = self._head_norm("key_norm")(k_BTKH)
        if inputs.rope is not None:
            q_BTNH, k_BTKH = apply_rope(q_BTNH, inputs.rope), apply_rope(k_BTKH, inputs.rope)
        names = ("batch", "seq", "act_heads", None)
        q_BTNH, k_BSKH, v_BSKH = (
            checkpoint_name(shard(t, *names), "qkv") for t in (q_BTNH, k_BTKH, v_BTKH)
        )

        offset = None
        if cache is not None:
            offset, cache = cache.length, cache.append(k_BSKH, v_BSKH)
            k_BSKH, v_BSKH = (x.astype(q_BTNH.dtype) for x in (cache.keys, cache.values))
        sinks_N = self._sinks() if config.sinks else None
        operands = (q_BTNH, k_BSKH, v_BSKH, inputs, offset, sinks_N)
        return out_projection(self.model)(attend_heads(self.model, self.window, *operands)), cache

    def _project(self, name: str, heads_name: str, num_heads: int) -> Linear:
        return Linear(
            (num_heads, self.model.head_dim),
            ("embed", heads_name, "head_dim"),
            self.model.init_std,
            "qkv",
            use_bias=self.model.attention.qkv_bias,
            name=name,
        )

    def _sinks(self) -> jax.Array:
        init = named(normal(self.model.init_std), ("heads",))
        return self.param("sinks", init, (self.model.attention.num_heads,), jnp.float32)

    def _head_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.model.norm_epsilon, self.model.norm_unit_offset, name=name)


def attend_heads(
    model: ModelConfig,
    window: int,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    inputs: BlockInputs,
    offset: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """What each head gives [B, T, N, H of values], by the backend and exchange of the config.

    `offset`: index of the first query among the keys of a cache; None without one. `sinks_N`: a
    logit per head that takes part in the softmax's denominator alone.
    """
    config = model.attention
    call = AttentionCall(
        scale=(config.scale or model.head_dim**-0.5) * product_factor(model.rope),
        value_dim=v_BSKH.shape[-1],
        window=window,
        softcap=config.logit_softcap,
        dropout=config.dropout if inputs.keys is not None else 0.0,
        packed=inputs.segments is not None,
        cached=offset is not None,
        exchange=config.exchange if all_mesh_axes("seq") else None,
    )
    words_BN2 = None
    if inputs.keys is not None and config.dropout > 0:
        words_BN2 = head_keys(fold_rows(inputs.keys, 0), q_BTNH.shape[2])
    operands = (config.backend, call, q_BTNH, k_BSKH, v_BSKH, inputs.segments, words_BN2)
    if call.exchange:
        out_BTNH = attend_across(*operands, sinks_N)
    else:
        out_BTNH = attend(*operands, 0 if offset is None else offset, sinks_N)
    return checkpoint_name(shard(out_BTNH, "batch", "seq", "act_heads", None), "attention_out")


def out_projection(model: ModelConfig) -> Linear:
    """From the heads back to the residual stream."""
    return Linear(
        (model.embed_dim,),
        ("heads", "head_dim", "embed"),
        model.init_std / (2 * model.num_layers) ** 0.5,
        "attention_out",
        num_in=2,
        use_bias=model.attention.out_bias,
        name="out",
    )


def cache_shapes(model: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and width of what a cache keeps of a token, as keys and as values."""
    mla = model.attention.mla
    if mla.kv_rank:
        return (1, mla.kv_rank), (1, mla.rope_dim)
    return (model.num_kv_heads, model.head_dim), (model.num_kv_heads, model.head_dim)
