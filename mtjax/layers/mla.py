"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are made from one latent of a token and, if q_rank is set, queries from
another. R is the width of a latent. The part of a head that rotates stands behind the part that
doesn't, in the half-split layout of `apply_rope`; published DeepSeek weights have its pairs
interleaved, which is another order of the same columns of queries and keys.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.layers.attention import BlockInputs, Cache, attend_heads, out_projection
from mtjax.layers.init import normal
from mtjax.layers.linear import Linear, named
from mtjax.layers.norm import RMSNorm
from mtjax.layers.rope import apply_rope
from mtjax.sharding import reshard, shard

_HEADS = ("batch", "seq", "act_heads", None)


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
        q_nope, q_rope = jnp.split(self._queries(x_BTD), (mla.nope_dim,), axis=-1)
        q_rope = apply_rope(q_rope, inputs.rope)
        latent_BTR = self._latent("kv", mla.kv_rank, x_BTD)
        shared = Linear((mla.rope_dim,), ("embed", None), model.init_std, name="key_rope")(x_BTD)
        k_rope_BT1H = apply_rope(_whole(shared)[:, :, None], inputs.rope)
        key_RNH = self._from_latent("key", mla.nope_dim).astype(x_BTD.dtype)
        value_RNH = self._from_latent("value", mla.value_dim).astype(x_BTD.dtype)

        if cache is None:
            k_nope = jnp.einsum("BTR,RNH->BTNH", latent_BTR, key_RNH)
            k_rope = jnp.broadcast_to(k_rope_BT1H, (*k_nope.shape[:-1], mla.rope_dim))
            q_BTNH, k_BTNH, v_BTNH = (
                checkpoint_name(shard(t, *_HEADS), "qkv")
                for t in (
                    jnp.concatenate([q_nope, q_rope], axis=-1),
                    jnp.concatenate([k_nope, k_rope], axis=-1),
                    jnp.einsum("BTR,RNH->BTNH", latent_BTR, value_RNH),
                )
            )
            out_BTNH = attend_heads(model, self.window, q_BTNH, k_BTNH, v_BTNH, inputs)
        else:
            # (q U) . c = q . (U c): queries meet the cached latents themselves, as in multi-query
            # attention, and no key or value of an earlier token is made again.
            offset, cache = cache.length, cache.append(latent_BTR[:, :, None], k_rope_BT1H)
            c_BS1R, k_rope = (x.astype(x_BTD.dtype) for x in (cache.keys, cache.values))
            q_BTNR = jnp.einsum("BTNH,RNH->BTNR", q_nope, key_RNH)
            q = jnp.concatenate([q_BTNR, q_rope], axis=-1)
            k = jnp.concatenate([c_BS1R, k_rope], axis=-1)
            out_BTNR = attend_heads(model, self.window, q, k, c_BS1R, inputs, offset)
            out_BTNH = jnp.einsum("BTNR,RNH->BTNH", out_BTNR, value_RNH)
        return out_projection(model)(out_BTNH), cache

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        model, rank = self.model, self.model.attention.mla.q_rank
        if rank:
            latent_BTR = self._latent("query", rank, x_BTD)
        else:
            latent_BTR = reshard(x_BTD, ("batch", "seq_sp", None), ("batch", "seq", None))
        return Linear(
            (model.attention.num_heads, model.head_dim),
            ("latent" if rank else "embed", "heads", "head_dim"),
            model.init_std,
            name="query",
        )(latent_BTR)

    def _latent(self, name: str, rank: int, x_BTD: jax.Array) -> jax.Array:
        """A normalised latent of every token."""
        model = self.model
        down = Linear((rank,), ("embed", "latent"), model.init_std, name=f"{name}_down")
        norm = RMSNorm(model.norm_epsilon, model.norm_unit_offset, name=f"{name}_norm")
        return checkpoint_name(_whole(norm(down(x_BTD))), "latent")

    def _from_latent(self, name: str, width: int) -> jax.Array:
        """Kernel [R, N, H] from the latent of keys and values to all heads."""
        model = self.model
        init = named(normal(model.init_std), ("latent", "heads", "head_dim"))
        shape = (model.attention.mla.kv_rank, model.attention.num_heads, width)
        return self.param(name, init, shape, jnp.float32)


def _whole(x_BTR: jax.Array) -> jax.Array:
    return reshard(x_BTR, ("batch", "seq_sp", None), ("batch", "seq", None))
