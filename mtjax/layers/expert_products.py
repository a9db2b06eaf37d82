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
from mtjax.precision.ragged import ragged_product
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


def one_by_one(kernels: dict[str, Any]) -> dict[str, Any]:
    """Kernels and biases in which everything has a leading dim of experts."""
    num = num_experts(kernels)

    def one(kernel: Any) -> Any:
        if not isinstance(kernel, QuantizedKernel):
            return kernel
        of_all = kernel.record, kernel.scales
        record, scales = jax.tree.map(lambda a: jnp.broadcast_to(a, (num, *a.shape)), of_all)
        return kernel.replace(record=record, scales=scales)

    return {name: one(kernel) for name, kernel in kernels.items()}


def num_experts(kernels: dict[str, Any]) -> int:
    """How many experts these kernels are of."""
    return jax.tree.leaves(kernels["up"])[0].shape[0]


def round_tokens(x_BTD: jax.Array, kernel: Any) -> jax.Array | Operand:
    """Tokens as they travel to experts: rounded, unless tiles depend on where they arrive."""
    if not isinstance(kernel, QuantizedKernel) or kernel.recipe.tiled:
        return x_BTD
    axes = manual_axes("batch")
    return round_activation(kernel, x_BTD, 1, Placement(axes, axes))


def tokens(x: Any) -> jax.Array:
    """Tokens, or those that rounded ones come from: for shape and dtype."""
    return x.carrier if isinstance(x, Operand) else x


def by_token(f: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """f of tokens [..., D], or of all that makes up rounded ones but a scale that they share."""
    shape = tokens(x).shape[:-1]
    return jax.tree.map(lambda leaf: f(leaf) if leaf.shape[:-1] == shape else leaf, x)


def expert_product(
    exchange: tuple[str, ...], capacity: int, x_ECD: Any, kernel_EDF: Any, bias_EF: Any
) -> jax.Array:
    """x W + b of each expert, [E, C, F]; b may be None. Rows are sequences of `capacity` tokens.

    Inside of an island; along the mesh axes `exchange`, devices have other experts.
    """
    if isinstance(kernel_EDF, QuantizedKernel):
        x = x_ECD
        if kernel_EDF.recipe.tiled:  # tiles end where a sequence does, however many are here
            x = x.reshape(x.shape[0], -1, capacity, x.shape[-1])
        place = _placement(exchange)
        y = product(_rounded(x, kernel_EDF, place), kernel_EDF, place, num_batch=1)
        y_ECF = y.reshape(y.shape[0], -1, y.shape[-1])
    else:
        y_ECF = jnp.einsum("ECD,EDF->ECF", x_ECD, kernel_EDF)
    return y_ECF if bias_EF is None else y_ECF + bias_EF[:, None]


def one_expert_product(
    exchange: tuple[str, ...], x_BTD: Any, kernel_DF: Any, bias_F: Any
) -> jax.Array:
    """x W + b of one expert and all tokens, [B, T, F], otherwise as `expert_product`."""
    if isinstance(kernel_DF, QuantizedKernel):
        place = _placement(exchange)
        y_BTF = product(_rounded(x_BTD, kernel_DF, place), kernel_DF, place)
    else:
        y_BTF = jnp.matmul(x_BTD, kernel_DF)
    return y_BTF if bias_F is None else y_BTF + bias_F


def grouped_product(
    exchange: tuple[str, ...], sizes_L: jax.Array, x_MD: Any, kernel_LDF: Any, bias_LF: Any
) -> jax.Array:
    """x W + b of rows sorted by expert, `sizes_L` of each, [M, F], otherwise as
    `expert_product`."""
    if isinstance(kernel_LDF, QuantizedKernel):
        place = _placement(exchange)
        y_MF = ragged_product(_rounded(x_MD, kernel_LDF, place), kernel_LDF, sizes_L, place)
    else:
        y_MF = jax.lax.ragged_dot(x_MD, kernel_LDF, group_sizes=sizes_L)
    if bias_LF is None:
        return y_MF
    end_L = jnp.cumsum(sizes_L)
    row_M = jnp.arange(y_MF.shape[0])[:, None]
    mine_ML = (row_M >= end_L - sizes_L) & (row_M < end_L)
    # A product, whose gradient adds up rows in float32; that of bias[expert] would in bfloat16.
    return y_MF + jnp.matmul(mine_ML.astype(y_MF.dtype), bias_LF, precision="highest")


def _placement(exchange: tuple[str, ...]) -> Placement:
    return Placement(
        tensor_axes=tuple(a for a in AXES if a != "pipeline" and axis_size(a) > 1),
        token_axes=tuple(a for a in all_mesh_axes("batch") if a not in exchange),
    )


def _rounded(x: Any, kernel: QuantizedKernel, placement: Placement) -> Operand:
    """Rows as operand, unless they came as one."""
    if isinstance(x, Operand):
        return x
    return round_activation(kernel, x, 1, placement)
