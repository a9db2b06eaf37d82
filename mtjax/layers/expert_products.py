"""Products of all experts at once, of arrays or of quantised operands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtjax.config.mesh import AXES
from mtjax.precision.product import (
    Operand,
    Placement,
    QuantizedKernel,
    product,
    round_activation,
)
from mtjax.sharding import Names, all_mesh_axes, axis_size, manual_axes, reshard


def held(leaf: jax.Array) -> Names:
    """Logical dims of a kernel or bias on the devices that use it; what all experts of a layer
    share has one dim."""
    return () if leaf.ndim == 1 else ("experts", *[None] * (leaf.ndim - 1))


def hold(kernel: Any, names: Names) -> Any:
    """A kernel or bias, or what makes up a quantised kernel, where its experts live."""

    def one(leaf: jax.Array) -> jax.Array:
        # A scale has size 1 where the kernel is split over fsdp.
        own = (n if size > 1 else None for n, size in zip(names, leaf.shape, strict=True))
        return reshard(leaf, tuple(own), held(leaf))

    return kernel.map_kernel(one) if isinstance(kernel, QuantizedKernel) else one(kernel)


def num_experts(kernels: dict[str, Any]) -> int:
    """How many experts these kernels are of."""
    return jax.tree.leaves(kernels["up"])[0].shape[0]


def round_tokens(x_BTD: jax.Array, kernel: Any) -> jax.Array | Operand:
    """Tokens as they travel to experts: rounded, unless tiles depend on where they arrive."""
    if not isinstance(kernel, QuantizedKernel) or kernel.recipe.emulated:
        return x_BTD
    axes = manual_axes("batch")
    return round_activation(kernel, x_BTD, 1, Placement(axes, axes))


def by_token(f: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """f of tokens [..., D], or of all that makes up rounded ones but a scale that they share."""
    shape = (x.carrier if isinstance(x, Operand) else x).shape[:-1]
    return jax.tree.map(lambda leaf: f(leaf) if leaf.shape[:-1] == shape else leaf, x)


def expert_product(
    exchange: tuple[str, ...], capacity: int, x_ECD: Any, kernel_EDF: Any, bias_EF: Any
) -> jax.Array:
    """x W + b of each expert, [E, C, F]; b may be None. Rows are sequences of `capacity` tokens.

    Inside of an island; along the mesh axes `exchange`, devices have other experts.
    """
    if isinstance(kernel_EDF, QuantizedKernel):
        y_ECF = _quantized_product(exchange, capacity, x_ECD, kernel_EDF)
    else:
        y_ECF = jnp.einsum("ECD,EDF->ECF", x_ECD, kernel_EDF)
    return y_ECF if bias_EF is None else y_ECF + bias_EF[:, None]


def _quantized_product(
    exchange: tuple[str, ...], capacity: int, x_ECD: Any, kernel_EDF: QuantizedKernel
) -> jax.Array:
    recipe = kernel_EDF.recipe
    place = Placement(
        tensor_axes=tuple(a for a in AXES if a != "pipeline" and axis_size(a) > 1),
        token_axes=tuple(a for a in all_mesh_axes("batch") if a not in exchange),
    )
    if isinstance(x_ECD, Operand):
        return product(x_ECD, kernel_EDF, place, num_batch=1)
    x = x_ECD
    if recipe.emulated:  # tiles end where a sequence does, however many are here
        x = x.reshape(x.shape[0], -1, capacity, x.shape[-1])
    y = product(round_activation(kernel_EDF, x, 1, place), kernel_EDF, place, num_batch=1)
    return y.reshape(*x_ECD.shape[:2], -1)
