"""Products of operands with a scale for each tile along the sum: MXFP8 on Blackwell."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from mtjax.precision.quantize import Quantized
from mtjax.sharding import Names, local_sum


def block_scaled_dot(
    a: Quantized, b: Quantized, dims: Any, names: Any, dtype: Any, *, apart: bool = False
) -> jax.Array:
    """Product of operands with `tile_scale`, `dims` as in `jax.lax.dot_general`, batch dims first.

    On a GPU it is one call of cuDNN, which XLA partitions in no region that is manual over some
    axes only: hence an island over those that are left.

    Args:
        names: logical dims of a, of b and of the result; None: all of it is local.
        apart: each device keeps its part of the sum, along a leading dim "act_ffn".
    """
    (summed, _), _ = dims

    def multiply(*operands: jax.Array) -> jax.Array:
        y = _scaled_matmul(dims, dtype, *operands)
        return y[None] if apart else y

    operands = a.values, a.tile_scale, b.values, b.tile_scale
    if names is None:
        return multiply(*operands)
    of_a, of_b, of_result = names
    ins: tuple[Names, ...] = of_a, of_a, of_b, of_b
    if apart:
        return local_sum(multiply, ins, ("act_ffn", *of_result), ())(*operands)
    return local_sum(multiply, ins, of_result, summed)(*operands)


def _scaled_matmul(
    dims: Any, dtype: Any, a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array
) -> jax.Array:
    (a_summed, b_summed), (a_batch, b_batch) = dims
    y = jax.nn.scaled_matmul(
        _as_matrices(a, a_batch, a_summed),
        _as_matrices(b, b_batch, b_summed),
        _as_matrices(a_scale, a_batch, a_summed),
        _as_matrices(b_scale, b_batch, b_summed),
        preferred_element_type=dtype,
    )
    batch = [a.shape[dim] for dim in a_batch]
    left = [
        x.shape[dim]
        for x, used in ((a, (*a_batch, *a_summed)), (b, (*b_batch, *b_summed)))
        for dim in range(x.ndim)
        if dim not in used
    ]
    return y.reshape(*batch, *left)


def _as_matrices(x: jax.Array, batch: Sequence[int], summed: Sequence[int]) -> jax.Array:
    """x as [batch, rows, what is summed]."""
    rows = [dim for dim in range(x.ndim) if dim not in (*batch, *summed)]
    sizes = (math.prod(x.shape[dim] for dim in part) for part in (batch, rows, summed))
    return x.transpose(*batch, *rows, *summed).reshape(*sizes)
