"""RMSNorm and LayerNorm, computed in float32."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from mtjax.config.model import ModelConfig
from mtjax.layers.linear import named


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale (Zhang & Sennrich 2019, arXiv 1910.07467).

    With `unit_offset` the parameter is scale - 1, so that weight decay pulls to 1.
    """

    epsilon: float
    unit_offset: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale = self.param("scale", named(init, ("norm",)), x.shape[-1:], jnp.float32)
        h = x.astype(jnp.float32)
        h *= jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + self.epsilon)
        return (h * (scale.astype(jnp.float32) + float(self.unit_offset))).astype(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + epsilon) * scale + bias (Ba et al. 2016, arXiv 1607.06450)."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = x.shape[-1:]
        scale = self.param("scale", named(nn.initializers.ones, ("norm",)), shape, jnp.float32)
        bias = self.param("bias", named(nn.initializers.zeros, ("norm",)), shape, jnp.float32)
        h = x.astype(jnp.float32)
        h -= jnp.mean(h, axis=-1, keepdims=True)
        h *= jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + self.epsilon)
        return (h * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def make_norm(model: ModelConfig, name: str) -> nn.Module:
    """The norm over the residual stream that the model asks for."""
    if model.norm == "layernorm":
        return LayerNorm(model.norm_epsilon, name=name)
    return RMSNorm(model.norm_epsilon, model.norm_unit_offset, name=name)
