"""Token and position embeddings, and the output head's table."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from mtjax.config.model import ModelConfig
from mtjax.layers.init import normal
from mtjax.layers.linear import named
from mtjax.layers.norm import make_norm
from mtjax.sharding import all_mesh_axes, local_map, reshard, shard, sum_and_scatter


class Embedding(nn.Module):
    """Vocab-parallel token lookup (Megatron-LM, arXiv 1909.08053), plus learned positions."""

    model: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        model = self.model
        table_VD = self.param(
            "embedding",
            named(normal(model.init_std), ("vocab", "embed")),
            (model.padded_vocab_size, model.embed_dim),
            jnp.float32,
        )
        x_BTD = lookup(table_VD.astype(self.dtype), tokens_BT)
        if model.embed_scale:
            # Gemma rounds the factor to the activation dtype.
            x_BTD *= jnp.sqrt(jnp.float32(model.embed_dim)).astype(self.dtype)
        if model.position == "learned":
            positions_PD = self.param(
                "position",
                named(normal(model.init_std), ("position", "embed")),
                (model.max_positions, model.embed_dim),
                jnp.float32,
            )
            table = reshard(
                positions_PD.astype(self.dtype), ("position", "embed"), ("position", None)
            )
            x_BTD += shard(table[positions_BT], "batch", "seq_sp", None)
        return shard(x_BTD, "batch", "seq_sp", None)


def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows of a table whose vocabulary is split, scattered over the sequence.

    Each device looks up the ids it holds and contributes zeros for others; the sum is a
    reduce-scatter under sequence parallelism.
    """
    axes = all_mesh_axes("vocab")

    def local(table, tokens):
        if not axes:
            return table[tokens]
        ids = tokens - jax.lax.axis_index(axes) * table.shape[0]
        held = (ids >= 0) & (ids < table.shape[0])
        rows = jnp.where(held[..., None], table[jnp.where(held, ids, 0)], 0)
        return sum_and_scatter(rows, axes)

    table_VD = reshard(table_VD, ("vocab", "embed"), ("vocab", None))
    names = (("vocab", None), ("batch", "seq"))
    return local_map(local, names, ("batch", "seq_sp", None))(table_VD, tokens_BT)


class Head(nn.Module):
    """Final norm, and the output table [V, D] unless it is tied to the embedding."""

    model: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x_BTD = make_norm(self.model, "norm")(x_BTD)
        if self.model.tied_embeddings:
            return x_BTD, None
        table_VD = self.param(
            "kernel",
            named(normal(self.model.init_std), ("vocab", "embed")),
            (self.model.padded_vocab_size, self.model.embed_dim),
            jnp.float32,
        )
        return x_BTD, table_VD.astype(x_BTD.dtype)
