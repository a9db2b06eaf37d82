"""One transformer block, described by a spec."""

from dataclasses import dataclass

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.layers.attention import Attention, BlockInputs, Cache
from mtjax.layers.context import token_order
from mtjax.layers.dropout import dropout, fold_rows
from mtjax.layers.linear import Gathered
from mtjax.layers.mla import LatentAttention
from mtjax.layers.mlp import Mlp
from mtjax.layers.moe import Moe
from mtjax.layers.norm import make_norm
from mtjax.layers.router import RouterStats
from mtjax.sharding import shard


@dataclass(frozen=True)
class BlockSpec:
    """What distinguishes one block of a model from another."""

    model: ModelConfig
    window: int = 0
    """Sliding window in tokens; 0 is full attention."""
    experts: bool = False
    """The feed-forward part is made of experts."""


class DecoderBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), or both in parallel.

    Returns the residual stream, the cache with the new keys and values, and what the router did
    (None without experts).
    """

    spec: BlockSpec

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, inputs: BlockInputs, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None, RouterStats | None]:
        model = self.spec.model
        x_BTD = shard(x_BTD, "batch", "seq_sp", None)
        h_BTD = make_norm(model, "attention_norm")(x_BTD)
        if model.attention.mla.kv_rank:
            latent = LatentAttention(model, self.spec.window, name="attention")
            a_BTD, cache = latent(h_BTD, inputs, cache)
        else:
            attention = Attention(model, self.spec.window, name="attention")
            a_BTD, cache = attention(Gathered(h_BTD), inputs, cache)
        a_BTD = self._leave_branch(a_BTD, "attention_post_norm", 1, inputs.keys)
        residual_BTD = x_BTD if model.parallel_residual else x_BTD + a_BTD
        h_BTD = make_norm(model, "mlp_norm")(residual_BTD)
        stats = None
        if self.spec.experts:
            moe = Moe(model, name="moe")
            m_BTD, stats = moe(h_BTD, inputs.counts, inputs.load, inputs.keys)
        else:
            m_BTD = Mlp(model, name="mlp")(Gathered(h_BTD))
        m_BTD = self._leave_branch(m_BTD, "mlp_post_norm", 2, inputs.keys)
        out_BTD = residual_BTD + m_BTD
        return (out_BTD + a_BTD if model.parallel_residual else out_BTD), cache, stats

    def _leave_branch(self, y_BTD, norm_name: str, site: int, keys_B) -> jax.Array:
        """Back to the sequence-parallel layout, then post-norm and dropout where asked for."""
        model = self.spec.model
        y_BTD = checkpoint_name(shard(y_BTD, "batch", "seq_sp", None), "block_out")
        if model.post_norm:
            y_BTD = make_norm(model, norm_name)(y_BTD)
        if keys_B is None or model.dropout == 0:
            return y_BTD
        order_T = token_order(model, y_BTD.shape[1])
        return dropout(y_BTD, model.dropout, fold_rows(keys_B, site), order_T)
