"""Products of operands with a scale for each tile along the sum: MXFP8 on Blackwell."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from mtjax.precision.island import in_island
from mtjax.precision.quantize import Quantized


def block_scaled_dot(
    a: Quantized, b: Quantized, dims: Any, names: Any, dtype: Any, apart: bool
) -> jax.Array:
    """Product of operands with `tile_scale`, `dims` as in `jax.lax.dot_general`, batch dims first;
    one call of cuDNN on a GPU. `names`, `apart`: as in `in_island`."""

    def multiply(a: Quantized, b: Quantized) -> jax.Array:
        return _scaled_matmul(dims, dtype, a.values, a.tile_scale, b.values, b.tile_scale)

    return in_island(multiply, a, b, dims[0][0], names, apart)


def _scaled_matmul(
    dims: Any, dtype: Any, a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array
) -> jax.Array:
    (a_summed, b_summed), (a_batch, b_batch) = dims
    y = jax.lax.platform_dependent(
        _as_matrices(a, a_batch, a_summed),
        _as_matrices(b, b_batch, b_summed),
        _as_matrices(a_scale, a_batch, a_summed),
        _as_matrices(b_scale, b_batch, b_summed),
        cuda=partial(jax.nn.scaled_matmul, preferred_element_type=dtype),
        default=partial(_of_rounded_numbers, dtype),
    )
    batch = [a.shape[dim] for dim in a_batch]
    left = [
        x.shape[dim]
        for x, used in ((a, (*a_batch, *a_summed)), (b, (*b_batch, *b_summed)))
        for dim in range(x.ndim)
        if dim not in used
    ]
    return y.reshape(*batch, *left)


def _of_rounded_numbers(
    dtype: Any, a_BMK: jax.Array, b_BNK: jax.Array, a_scale: jax.Array, b_scale: jax.Array
) -> jax.Array:
    """The same product of numbers in the dtype of the result, which holds each exactly."""

    def rounded(x: jax.Array, scale: jax.Array) -> jax.Array:
        tiles = x.astype(dtype).reshape(*scale.shape, -1)
        return (tiles * scale.astype(dtype)[..., None]).reshape(x.shape)

    a_BMK, b_BNK = rounded(a_BMK, a_scale), rounded(b_BNK, b_scale)
    dims = (((2,), (2,)), ((0,), (0,)))
    return jax.lax.dot_general(a_BMK, b_BNK, dims, preferred_element_type=dtype)


def _as_matrices(x: jax.Array, batch: Sequence[int], summed: Sequence[int]) -> jax.Array:
    """x as [batch, rows, what is summed]."""
    rows = [dim for dim in range(x.ndim) if dim not in (*batch, *summed)]
    sizes = (math.prod(x.shape[dim] for dim in part) for part in (batch, rows, summed))
    return x.transpose(*batch, *rows, *summed).reshape(*sizes)
