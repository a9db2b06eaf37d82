"""Parameters with logical names, and the linear projection."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from mtjax.layers.init import normal
from mtjax.sharding import Boxed, Names


def named(init: Callable[..., jax.Array], names: Names) -> Callable[..., Any]:
    """Initializer whose result carries the logical names of its dims, until Linen unboxes it."""
    return lambda key, shape, dtype: Boxed(init(key, shape, dtype), names)


class Linear(nn.Module):
    """y = x W (+ b), contracting the last `num_in` dims of x.

    Attributes:
        out_shape: sizes of the output dims.
        names: logical names of the kernel, input dims first.
        std: standard deviation of the initial kernel.
    """

    out_shape: tuple[int, ...]
    names: Names
    std: float
    num_in: int = 1
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        in_shape = x.shape[x.ndim - self.num_in :]
        kernel = self.param(
            "kernel",
            named(normal(self.std), self.names),
            in_shape + self.out_shape,
            jnp.float32,
        )
        contract = (tuple(range(x.ndim - self.num_in, x.ndim)), tuple(range(self.num_in)))
        y = jax.lax.dot_general(x, kernel.astype(x.dtype), (contract, ((), ())))
        if not self.use_bias:
            return y
        bias = self.param(
            "bias",
            named(nn.initializers.zeros, self.names[self.num_in :]),
            self.out_shape,
            jnp.float32,
        )
        return y + bias.astype(x.dtype)
