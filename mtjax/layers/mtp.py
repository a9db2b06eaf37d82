"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

import jax
from flax import linen as nn

from mtjax.layers.attention import BlockInputs
from mtjax.layers.block import BlockSpec, DecoderBlock
from mtjax.layers.linear import Linear
from mtjax.layers.norm import make_norm
from mtjax.layers.router import RouterStats
from mtjax.sharding import shard

_SPLIT = ("batch", "seq_sp", None)


class MtpModule(nn.Module):
    """norm(block(M [norm(embedding); norm(hidden)])): what the output head reads one token further.

    `hidden` is what it read before, [B, T, D]; `embedding` [B, T, D] is that of the token which was
    to be predicted from it. Output table and embedding are the model's own. M is kept as its two
    halves [D, D]: the product of a concatenation is the sum of two.
    """

    spec: BlockSpec

    @nn.compact
    def __call__(
        self, hidden_BTD: jax.Array, embedding_BTD: jax.Array, inputs: BlockInputs
    ) -> tuple[jax.Array, RouterStats | None]:
        model = self.spec.model
        x_BTD = self._half("hidden", hidden_BTD) + self._half("embedding", embedding_BTD)
        x_BTD, _, stats = DecoderBlock(self.spec, name="block")(shard(x_BTD, *_SPLIT), inputs)
        return make_norm(model, "norm")(x_BTD), stats

    def _half(self, name: str, x_BTD: jax.Array) -> jax.Array:
        model = self.spec.model
        x_BTD = make_norm(model, f"{name}_norm")(shard(x_BTD, *_SPLIT))
        names = ("embed", "residual")
        return Linear((model.embed_dim,), names, model.init_std, "ffn_in", name=name)(x_BTD)
