"""Parameters with logical names, and the linear projection."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.precision import Role
from mtjax.layers.init import normal
from mtjax.precision.product import (
    Operand,
    Placement,
    ProductNames,
    QuantizedKernel,
    product,
    round_activation,
)
from mtjax.precision.recipe import Recipe
from mtjax.sharding import (
    Boxed,
    Names,
    Product,
    axis_size,
    manual_axes,
    mesh_axes,
    reshard,
    shard,
)

_SPLIT, _WHOLE = ("batch", "seq_sp", None), ("batch", "seq", None)


def named(
    init: Callable[..., jax.Array], names: Names, use: Product | None = None
) -> Callable[..., Any]:
    """Initializer whose result carries the logical names of its dims, and how it is used in a
    product that may be quantised, until Linen unboxes it."""
    return lambda key, shape, dtype: Boxed(init(key, shape, dtype), names, use)


class Shared:
    """Input of several projections, split over the sequence: rounded once for all of them.

    `name`: what rematerialisation knows it by, if anything.
    """

    def __init__(self, x_BTD: jax.Array, name: str | None = None) -> None:
        self.split = x_BTD
        self.name = name
        self._rounded: dict[Recipe, Operand] = {}

    @property
    def value(self) -> jax.Array:
        """In the dtype that it came in."""
        return self.split

    def rounded(self, kernel: QuantizedKernel) -> Operand:
        """As operand of quantised products with this kernel, and those of its recipe."""
        if kernel.recipe not in self._rounded:
            self._rounded[kernel.recipe] = self._round(kernel)
        return self._rounded[kernel.recipe]

    def _round(self, kernel: QuantizedKernel) -> Operand:
        x_BTD = shard(self._named(self.split), *_SPLIT)
        axes = manual_axes("batch")
        return round_activation(kernel, x_BTD, 1, Placement(axes, axes))

    def _named(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.name is None else checkpoint_name(x_BTD, self.name)


class Gathered(Shared):
    """The same of projections which each need the whole sequence.

    Gathered in the format that they multiply it in (all-gather over tensor, Korthikanti et al.
    2022), once for all of them.
    """

    def __init__(self, x: jax.Array | Shared, name: str | None = None) -> None:
        self._shared = x if isinstance(x, Shared) else Shared(x, name)
        super().__init__(self._shared.split, self._shared.name)

    @cached_property
    def _whole(self) -> jax.Array:
        return self._named(reshard(self.split, _SPLIT, _WHOLE))

    @property
    def value(self) -> jax.Array:
        return self._whole

    def _round(self, kernel: QuantizedKernel) -> Operand:
        x = self._shared.rounded(kernel)
        forward, backward = jax.tree.map(self._gather, (x.forward, x.backward))
        # Each device adds up its parts of the gradient from all projections, which then are
        # summed and scattered once: in the carrier they are apart.
        parts = (math.prod(axis_size(axis) for axis in mesh_axes("act_ffn")), *x.carrier.shape)
        carrier = shard(jnp.broadcast_to(self._whole, parts), "act_ffn", *_WHOLE)
        return Operand(carrier, forward, backward, x.record)

    def _gather(self, leaf: jax.Array) -> jax.Array:
        """Of values and row scales; one scale for the tensor is everywhere."""
        return leaf if leaf.size == 1 else reshard(leaf, _SPLIT, _WHOLE)


_ACTIVATIONS = {"heads": "act_heads", "kv_heads": "act_heads", "ffn": "act_ffn"}
"""Logical dims of kernels that are split alike in what goes into or comes out of them."""


def placement(names: Names, num_in: int, *, gathered: bool) -> Placement:
    """Placement of a projection whose kernel has these logical dims, outside of manual islands.

    `gathered`: of an input that was split over the sequence and no longer is.
    """
    axes = manual_axes("batch")
    x, y = (
        tuple(_ACTIVATIONS.get(n or "") for n in part) for part in (names[:num_in], names[num_in:])
    )
    # Inputs that are split over heads or width have the whole sequence.
    x_seq = "seq" if gathered or any(x) else "seq_sp"
    y_seq = "seq_sp" if names[-1] == "embed" else x_seq
    return Placement(axes, axes, ProductNames(("batch", x_seq, *x), names, ("batch", y_seq, *y)))


class Linear(nn.Module):
    """y = x W (+ b), contracting the last `num_in` dims of x.

    Attributes:
        out_shape: sizes of the output dims.
        names: logical names of the kernel, input dims first.
        role: what the projection is for; None: never quantised.
        std: standard deviation of the initial kernel.
    """

    out_shape: tuple[int, ...]
    names: Names
    std: float
    role: Role | None = None
    num_in: int = 1
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array | Shared) -> jax.Array:
        shape = x.split.shape if isinstance(x, Shared) else x.shape
        use = None if self.role is None else Product(self.role, self.num_in)
        kernel = self.param(
            "kernel",
            named(normal(self.std), self.names, use),
            shape[len(shape) - self.num_in :] + self.out_shape,
            jnp.float32,
        )
        y = self._multiply(x, kernel)
        if not self.use_bias:
            return y
        bias = self.param(
            "bias",
            named(nn.initializers.zeros, self.names[self.num_in :]),
            self.out_shape,
            jnp.float32,
        )
        return y + bias.astype(y.dtype)

    def _multiply(self, x: jax.Array | Shared, kernel: Any) -> jax.Array:
        if isinstance(kernel, QuantizedKernel):
            place = placement(self.names, self.num_in, gathered=isinstance(x, Gathered))
            if isinstance(x, Shared):
                return product(x.rounded(kernel), kernel, place)
            rounded = round_activation(kernel, x, self.num_in, place)
            return product(rounded, kernel, place, self.num_in)
        x = x.value if isinstance(x, Shared) else x
        contract = (tuple(range(x.ndim - self.num_in, x.ndim)), tuple(range(self.num_in)))
        return jax.lax.dot_general(x, kernel.astype(x.dtype), (contract, ((), ())))
