"""Products of sorted rows, each with the kernel of its group, on quantised operands.

As in `mtjax.precision.product`. M rows, L groups, rows [M, D] times kernels [L, D, F]. Rows behind
the last group have no kernel; what they give is never read.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtjax.precision.product import (
    Operand,
    Placement,
    QuantizedKernel,
    record_so_far,
    whole_record,
)
from mtjax.precision.quantize import (
    no_dims_of_one,
    quantize_activation,
    quantize_groups,
)
from mtjax.precision.recipe import Recipe


class _How(NamedTuple):
    recipe: Recipe
    placement: Placement


def ragged_product(
    x_MD: Operand, kernel_LDF: QuantizedKernel, sizes_L: jax.Array, placement: Placement
) -> jax.Array:
    """Rows times their kernels, [M, F], in the compute dtype; `sizes_L`: rows of each group."""
    assert not kernel_LDF.recipe.tiled, "tiles along the rows would mix groups"
    how = _How(kernel_LDF.recipe, placement)
    return _product(how, x_MD, kernel_LDF, sizes_L)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: Operand, kernel: QuantizedKernel, sizes_L: jax.Array):
    w, dtype = kernel.forward, kernel.carrier.dtype
    y_MF = _ragged(x.forward.values, w.values, sizes_L, ((1,), (1,)), dtype, "default")
    scale = no_dims_of_one(x.forward.scale) * _of_rows(w.scale, x.forward.values, sizes_L)
    return (y_MF * scale).astype(dtype)


def _forward(how, x, kernel, sizes_L):
    g_scale = None if kernel.scales is None else kernel.scales[1]
    like = jnp.zeros(0, kernel.carrier.dtype)
    saved = x.forward, kernel.forward, sizes_L, like, g_scale, record_so_far(x, kernel)
    return _product(how, x, kernel, sizes_L), saved


def _backward(how, saved, g_MF):
    (x, w, sizes_L, like, known_scale, record), recipe = saved, how.recipe
    dtype, ragged = like.dtype, partial(_ragged, precision="highest", dtype=like.dtype)
    w_scale = _of_rows(w.scale, x.values, sizes_L)
    if recipe.one_gradient:
        axes = how.placement.tensor_axes
        g = quantize_activation(recipe, recipe.g, g_MF, (1,), axes, known_scale)
        g_scale = no_dims_of_one(g.scale)
        g_in, in_scale = g.values, g_scale * w_scale
        g_w, scale_LDF = g.values, g_scale * no_dims_of_one(x.scale)
    else:
        # Scales that vary along a sum are multiplied into g before it is rounded.
        g_MF = g_MF.astype(jnp.float32)
        g = quantize_activation(recipe, recipe.g, g_MF * w_scale, (1,))
        g_in, in_scale = g.values, g.scale
        folded, groups = g_MF * no_dims_of_one(x.scale), _groups(x.values, sizes_L)
        over = how.placement.token_axes
        g_w, scale_LF, _ = quantize_groups(folded, recipe.g.format, groups, len(sizes_L), over)
        scale_LDF = scale_LF[:, None]
    dx_MD = (ragged(g_in, w.values, sizes_L, ((1,), (2,))) * in_scale).astype(dtype)
    dw_LDF = (ragged(x.values, g_w, sizes_L, ((0,), (0,))) * scale_LDF).astype(dtype)
    record = whole_record(recipe, record, g_MF, g)
    return Operand(dx_MD, None, None), QuantizedKernel(dw_LDF, None, None, recipe, record), None


_product.defvjp(_forward, _backward)


def _ragged(a, b, sizes_L, contracting, dtype, precision) -> jax.Array:
    """The products alone, float32: of rows with kernels, or of rows with rows."""
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0] if b.ndim == 3 else [],
    )
    out = jnp.int32 if a.dtype == jnp.int8 else dtype
    y = jax.lax.ragged_dot_general(
        a, b, sizes_L, dims, precision=precision, preferred_element_type=out
    )
    return y.astype(jnp.float32)


def _groups(x_MD: jax.Array, sizes_L: jax.Array) -> jax.Array:
    """The group of each row, int32 [M]; L behind the last one."""
    rows_M = jnp.arange(x_MD.shape[0])
    return jnp.searchsorted(jnp.cumsum(sizes_L), rows_M, side="right").astype(jnp.int32)


def _of_rows(scale_L11: jax.Array, x_MD: jax.Array, sizes_L: jax.Array) -> jax.Array:
    """The scale that each row's kernel has, [M, 1 or F]; 1 without a kernel."""
    return scale_L11[:, 0].at[_groups(x_MD, sizes_L)].get(mode="fill", fill_value=1)
