"""Attention: projections, rotation, and the backends that compute softmax(QK)V."""

from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.layers.attention_backends import AttentionCall, attend
from mtjax.layers.context import attend_across
from mtjax.layers.dropout import fold_rows
from mtjax.layers.linear import Gathered, Linear
from mtjax.layers.norm import RMSNorm
from mtjax.layers.rope import apply_rope
from mtjax.sharding import all_mesh_axes, shard


class Cache(NamedTuple):
    """Keys and values of the tokens already seen, for generation.

    `keys`, `values`: [B, S, K, H] buffers; `length`: int32 scalar, tokens already stored.
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

    `rope`: [2, B, T, H/2] from `rope_table`, None without rotation. `segments`: int [B, T],
    tokens attend within equal ids; None when sequences hold one document. `keys`: dropout keys
    [B], None outside training. `counts`: bool [B, T], False where a position holds padding that
    experts leave out; None: all count. `load`: [E], pairs per expert of this layer over the whole
    batch, for a balance loss of that scope; None elsewhere.
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

        offset: Any = 0
        if cache is not None:
            offset, cache = cache.length, cache.append(k_BSKH, v_BSKH)
            k_BSKH, v_BSKH = (x.astype(q_BTNH.dtype) for x in (cache.keys, cache.values))
        call = AttentionCall(
            scale=config.scale or self.model.head_dim**-0.5,
            window=self.window,
            softcap=config.logit_softcap,
            dropout=config.dropout if inputs.keys is not None else 0.0,
            packed=inputs.segments is not None,
            cached=cache is not None,
            exchange=config.exchange if all_mesh_axes("seq") else None,
        )
        keys_B = None if inputs.keys is None else fold_rows(inputs.keys, 0)
        operands = (config.backend, call, q_BTNH, k_BSKH, v_BSKH, inputs.segments, keys_B)
        out_BTNH = attend_across(*operands) if call.exchange else attend(*operands, offset)
        out_BTNH = checkpoint_name(shard(out_BTNH, *names), "attention_out")
        projection = Linear(
            (self.model.embed_dim,),
            ("heads", "head_dim", "embed"),
            self.model.init_std / (2 * self.model.num_layers) ** 0.5,
            "attention_out",
            num_in=2,
            use_bias=config.out_bias,
            name="out",
        )
        return projection(out_BTNH), cache

    def _project(self, name: str, heads_name: str, num_heads: int) -> Linear:
        return Linear(
            (num_heads, self.model.head_dim),
            ("embed", heads_name, "head_dim"),
            self.model.init_std,
            "qkv",
            use_bias=self.model.attention.qkv_bias,
            name=name,
        )

    def _head_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.model.norm_epsilon, self.model.norm_unit_offset, name=name)
