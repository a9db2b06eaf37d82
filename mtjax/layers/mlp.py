"""Feed-forward part of a block."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.layers.linear import Gathered, Linear
from mtjax.sharding import shard

ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    # Squared ReLU (So et al. 2021, Primer, arXiv 2109.08668).
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activate(model: ModelConfig, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """What goes into the down-projection; `gate` is None where the activation isn't gated."""
    if gate is None:
        return ACTIVATIONS[model.activation](up)
    if model.activation == "clamped_swiglu":
        # OpenAI 2025, arXiv 2508.10925: x sigmoid(1.702 x) is nearly GELU (Hendrycks 2016).
        bound = model.activation_clamp
        gate, up = jnp.minimum(gate, bound), jnp.clip(up, -bound, bound)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return ACTIVATIONS[model.activation](gate) * up


class Mlp(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated (Shazeer 2020)."""

    model: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array | Gathered) -> jax.Array:
        model = self.model
        up_BTF = self._project_in("up")(x_BTD)
        gate_BTF = self._project_in("gate")(x_BTD) if model.gated else None
        h_BTF = activate(model, up_BTF, gate_BTF)
        down = Linear(
            (model.embed_dim,),
            ("ffn", "embed"),
            model.init_std / (2 * model.num_layers) ** 0.5,
            "ffn_out",
            use_bias=model.mlp_bias,
            name="down",
        )
        return down(shard(h_BTF, "batch", "seq", "act_ffn"))

    def _project_in(self, name: str):
        model = self.model
        linear = Linear(
            (model.ffn_dim,),
            ("embed", "ffn"),
            model.init_std,
            "ffn_in",
            use_bias=model.mlp_bias,
            name=name,
        )
        return lambda x: checkpoint_name(shard(linear(x), "batch", "seq", "act_ffn"), "ffn_in")
