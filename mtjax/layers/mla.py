"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are made from one latent of a token and, if q_rank is set, queries from
another. R is the width of a latent. The part of a head that rotates stands behind the part that
doesn't, in the half-split layout of `apply_rope`; published DeepSeek weights have its pairs
interleaved, which is another order of the same columns of queries and keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.layers.attention import BlockInputs, Cache, attend_heads, out_projection
from mtjax.layers.init import normal
from mtjax.layers.linear import Gathered, Linear, Shared, named, placement
from mtjax.layers.norm import RMSNorm
from mtjax.layers.rope import apply_rope
from mtjax.precision.product import QuantizedKernel, product
from mtjax.sharding import Names, Product, reshard, shard

_HEADS = ("batch", "seq", "act_heads", None)
_UP = ("latent", "heads", "head_dim")


class LatentAttention(nn.Module):
    """Causal self-attention with keys and values from a latent.

    Takes and returns what `Attention` does, except that x [B, T, D] is sequence-parallel: latents
    are made where tokens are, and the sequence is gathered when it has become small.
    """

    model: ModelConfig
    window: int

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, inputs: BlockInputs, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        model, mla = self.model, self.model.attention.mla
        assert inputs.rope is not None, "the config asks for position rope"
        shared_BTD = Shared(x_BTD)
        q_nope, q_rope = jnp.split(self._queries(shared_BTD), (mla.nope_dim,), axis=-1)
        q_rope = apply_rope(q_rope, inputs.rope)
        latent_BTR = self._latent("kv", mla.kv_rank, shared_BTD)
        k_rope = self._project("key_rope", (mla.rope_dim,), ("embed", None))(shared_BTD)
        k_rope_BT1H = apply_rope(_whole(k_rope)[:, :, None], inputs.rope)
        key_RNH = self._from_latent("key", mla.nope_dim)
        value_RNH = self._from_latent("value", mla.value_dim)

        if cache is None:
            k_nope = _heads(latent_BTR, key_RNH)
            k_rope = jnp.broadcast_to(k_rope_BT1H, (*k_nope.shape[:-1], mla.rope_dim))
            q_BTNH, k_BTNH, v_BTNH = (
                checkpoint_name(shard(t, *_HEADS), "qkv")
                for t in (
                    jnp.concatenate([q_nope, q_rope], axis=-1),
                    jnp.concatenate([k_nope, k_rope], axis=-1),
                    _heads(latent_BTR, value_RNH),
                )
            )
            out_BTNH = attend_heads(model, self.window, q_BTNH, k_BTNH, v_BTNH, inputs)
        else:
            # (q U) . c = q . (U c): queries meet the cached latents themselves, as in multi-query
            # attention, and no key or value of an earlier token is made again.
            key_RNH, value_RNH = (kernel.astype(x_BTD.dtype) for kernel in (key_RNH, value_RNH))
            latents = latent_BTR.value[:, :, None]
            offset, cache = cache.length, cache.append(latents, k_rope_BT1H)
            c_BS1R, k_rope = (x.astype(x_BTD.dtype) for x in (cache.keys, cache.values))
            q_BTNR = jnp.einsum("BTNH,RNH->BTNR", q_nope, key_RNH)
            q = jnp.concatenate([q_BTNR, q_rope], axis=-1)
            k = jnp.concatenate([c_BS1R, k_rope], axis=-1)
            out_BTNR = attend_heads(model, self.window, q, k, c_BS1R, inputs, offset)
            out_BTNH = jnp.einsum("BTNR,RNH->BTNH", out_BTNR, value_RNH)
        return out_projection(model)(out_BTNH), cache

    def _project(self, name: str, out_shape: tuple[int, ...], names: Names) -> Linear:
        return Linear(out_shape, names, self.model.init_std, "qkv", name=name)

    def _queries(self, x_BTD: Shared) -> jax.Array:
        model, rank = self.model, self.model.attention.mla.q_rank
        shape = (model.attention.num_heads, model.head_dim)
        if not rank:
            project = self._project("query", shape, ("embed", "heads", "head_dim"))
            return project(Gathered(x_BTD))
        return self._project("query", shape, _UP)(self._latent("query", rank, x_BTD))

    def _latent(self, name: str, rank: int, x_BTD: Shared) -> Gathered:
        """A normalised latent of every token."""
        model = self.model
        down = self._project(f"{name}_down", (rank,), ("embed", "latent"))
        norm = RMSNorm(model.norm_epsilon, model.norm_unit_offset, name=f"{name}_norm")
        return Gathered(norm(down(x_BTD)), "latent")

    def _from_latent(self, name: str, width: int) -> Any:
        """Kernel [R, N, H] from the latent of keys and values to all heads."""
        model = self.model
        init = named(normal(model.init_std), _UP, Product("qkv", 1))
        shape = (model.attention.mla.kv_rank, model.attention.num_heads, width)
        return self.param(name, init, shape, jnp.float32)


def _heads(latent_BTR: Gathered, kernel_RNH: Any) -> jax.Array:
    """Keys or values of all heads, [B, T, N, H]."""
    if isinstance(kernel_RNH, QuantizedKernel):
        place = placement(_UP, 1, gathered=True)
        return product(latent_BTR.rounded(kernel_RNH), kernel_RNH, place)
    x_BTR = latent_BTR.value
    return jnp.einsum("BTR,RNH->BTNH", x_BTR, kernel_RNH.astype(x_BTR.dtype))


def _whole(x_BTR: jax.Array) -> jax.Array:
    return reshard(x_BTR, ("batch", "seq_sp", None), ("batch", "seq", None))
