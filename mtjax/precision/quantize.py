"""Rounding arrays to few bits, with the scales that bring them into range.

Values beyond the range saturate. A zero tensor has zeros and some finite scale. Where a value is
infinite or NaN, everything that shares its scale becomes NaN, on any device: the loss of such a
step is not finite.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mtjax.precision.recipe import E4M3, Format, Recipe, Spec

_SMALLEST_MAXIMUM = 1e-30
"""Below it a maximum counts as this: scales stay normal float32 numbers."""


class Quantized(NamedTuple):
    """values * scale is what was rounded.

    `scale`: float32, of size 1 in the dims that share it; None: it is in `tile_scale`, or the
    values are the rounded numbers themselves, in a wider dtype.
    `tile_scale`: float8_e8m0fnu, one for each tile of neighbours along the last summed dim, where
    products take such scales.
    """

    values: Any
    scale: Any
    tile_scale: Any = None

    def dequantize(self) -> jax.Array:
        """The rounded numbers, float32; scales of tiles are left to products."""
        values = self.values.astype(jnp.float32)
        return values if self.scale is None else values * self.scale


def quantize(
    x: jax.Array, format: Format, shared: Sequence[int], over: tuple[str, ...] = ()
) -> Quantized:
    """Round `x`, with one scale for all entries along the dims `shared`.

    `over`: manual mesh axes that split those dims, so that devices agree on the scale.
    """
    scale = scale_of(_largest(x, shared, over), format)
    return Quantized(_cast(x.astype(jnp.float32) / no_dims_of_one(scale), format), scale)


def quantize_by(scale: jax.Array, x: jax.Array, format: Format) -> Quantized:
    """Round `x` with a scale that is known before it, a scalar. What is not finite becomes NaN by
    itself, so that nothing waits for a reduction."""
    scaled = jnp.where(jnp.isfinite(x), x.astype(jnp.float32) / scale, jnp.nan)
    return Quantized(_cast(scaled, format), scale.reshape((1,) * x.ndim))


def quantize_groups(
    x_MF: jax.Array, format: Format, groups_M: jax.Array, num: int, over: tuple[str, ...]
) -> Quantized:
    """Round rows, with a scale for each of `num` groups of them and each column, [num, F].

    Rows of other groups become 0. `over`: as in `quantize`.
    """
    largest = jax.ops.segment_max(_magnitude(x_MF), groups_M, num + 1)[:num]
    scale = scale_of(_over_devices(jnp.maximum(largest, 0.0), over), format)
    scale_MF = scale.at[groups_M].get(mode="fill", fill_value=jnp.inf)
    return Quantized(_cast(x_MF.astype(jnp.float32) / scale_MF, format), scale)


def name_for_remat(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name`, by its bits if x is e4m3fn or e8m0fnu: JAX puts what rematerialisation
    keeps through reduce_precision, which knows no format without infinities and makes all of e4m3fn
    above 240 NaN."""
    if x.dtype not in (jnp.float8_e4m3fn, jnp.float8_e8m0fnu):
        return checkpoint_name(x, name)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint8), name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def no_dims_of_one(scale: jax.Array) -> jax.Array:
    """A scale of size 1 as a scalar: XLA would split its dims of 1 as those beside it are split,
    and spend a collective on putting it together again."""
    return scale.reshape(()) if scale.size == 1 else scale


def scale_of(largest: jax.Array, format: Format) -> jax.Array:
    """Scale, float32, that brings this largest magnitude into range; NaN if it is infinite."""
    largest = largest.astype(jnp.float32)
    scale = jnp.maximum(largest, _SMALLEST_MAXIMUM) / format.largest
    if format.power_of_two:
        mantissa, exponent = jnp.frexp(scale)  # mantissa in [0.5, 1)
        scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _largest(x: jax.Array, shared: Sequence[int], over: tuple[str, ...] = ()) -> jax.Array:
    return _over_devices(jnp.max(_magnitude(x), axis=tuple(shared), keepdims=True), over)


def _magnitude(x: jax.Array) -> jax.Array:
    # NaN counts as infinite: a maximum over devices need not keep a NaN.
    return jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)


def _over_devices(largest: jax.Array, over: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmax(largest, over) if over else largest


def _cast(x: jax.Array, format: Format) -> jax.Array:
    """To the nearest value of the format, ties to even. Clipped first: a bare cast to
    float8_e4m3fn gives NaN out of range."""
    if format.dtype == "int8":
        x = jnp.round(x)
    return jnp.clip(x, -format.largest, format.largest).astype(format.dtype)


def quantize_activation(
    recipe: Recipe,
    spec: Spec,
    x: jax.Array,
    summed: Sequence[int],
    over: tuple[str, ...] = (),
    scale: jax.Array | None = None,
) -> Quantized:
    """Round x or g for a product that sums over the dims `summed`.

    `over`: manual mesh axes that split what shares a scale; `scale`: one known before, of a tensor.
    """
    if scale is not None:
        return quantize_by(scale, x, spec.format)
    if spec.sharing == "tensor":
        return quantize(x, spec.format, range(x.ndim), over)
    if spec.sharing == "row":
        return quantize(x, spec.format, summed, over)
    return _quantize_tiles(recipe, spec, x, summed)


def quantize_weight(
    recipe: Recipe, w: jax.Array, num_batch: int, summed: Sequence[int]
) -> Quantized:
    """Round kernels whose dims `summed` are summed over, in an automatic region.

    The first `num_batch` dims (layers, experts) never share a scale.
    """
    spec = recipe.w
    if spec.sharing == "tensor":
        return quantize(w, spec.format, range(num_batch, w.ndim))
    if spec.sharing == "row":
        return quantize(w, spec.format, summed)
    if spec.sharing == "tile":
        return _quantize_tiles(recipe, spec, w, summed)
    return Quantized(_round_blocks(spec, w, summed), None)


def _quantize_tiles(recipe: Recipe, spec: Spec, x: jax.Array, summed: Sequence[int]) -> Quantized:
    """x in tiles of neighbours along the summed dims: real values and scales, of whole tiles along
    the last of these dims, if products take them, else the rounded numbers."""
    if not recipe.block_scaled:
        return Quantized(_round_tiles(recipe, spec, x, summed), None)
    axis = summed[-1] % x.ndim
    tiles = _cut(x, axis, spec.size)
    values, scale = quantize(tiles, spec.format, (axis + 1,))[:2]
    whole = (*x.shape[:axis], tiles.shape[axis] * spec.size, *x.shape[axis + 1 :])
    tile_scale = jnp.squeeze(scale, axis + 1).astype(jnp.float8_e8m0fnu)
    return Quantized(values.reshape(whole), None, tile_scale)


def _round_tiles(recipe: Recipe, spec: Spec, x: jax.Array, summed: Sequence[int]) -> jax.Array:
    """x rounded in tiles of neighbours along the summed dims, in the dtype of x."""
    rows, back = _last(x, summed)
    tiles = _cut(rows, -1, spec.size)
    if recipe.scaled_tiles:
        rounded = _round_twice_scaled(tiles, spec.format)
    else:
        rounded = quantize(tiles, spec.format, (-1,)).dequantize()
    return back(rounded.reshape(*rows.shape[:-1], -1)[..., : rows.shape[-1]])


def _round_twice_scaled(tiles: jax.Array, format: Format) -> jax.Array:
    """Tiles under e4m3 scales, those under one for the tensor (NVIDIA 2025, arXiv 2509.25149).

    The outer one is a power of two here, so that bf16 holds the products exactly.
    """
    wanted = _largest(tiles, (-1,)).astype(jnp.float32) / format.largest
    outer = scale_of(jnp.max(wanted), E4M3)
    inner = _cast(wanted / outer, E4M3).astype(jnp.float32)
    # A tile whose scale rounds to zero holds values too small for any of its steps.
    scale = jnp.where(inner == 0, 1.0, inner) * outer
    return _cast(tiles / scale, format).astype(jnp.float32) * scale


def _round_blocks(spec: Spec, w: jax.Array, summed: Sequence[int]) -> jax.Array:
    """w rounded in square blocks of the matrix of its summed dims by its last ones."""
    first, behind = min(summed), max(summed) + 1
    rows = math.prod(w.shape[first:behind])
    matrix = w.reshape(*w.shape[:first], rows, -1)
    blocks = _cut(_cut(matrix, -1, spec.size), -3, spec.size)  # [..., R, size, C, size]
    rounded = quantize(blocks, spec.format, (-3, -1)).dequantize()
    padded = rounded.reshape(*matrix.shape[:-2], blocks.shape[-4] * spec.size, -1)
    return padded[..., :rows, : matrix.shape[-1]].reshape(w.shape).astype(w.dtype)


def _last(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, Any]:
    """x with these dims flattened behind the others, and the way back."""
    target = tuple(range(x.ndim - len(dims), x.ndim))
    moved = jnp.moveaxis(x, tuple(dims), target)

    def back(flat: jax.Array) -> jax.Array:
        return jnp.moveaxis(flat.reshape(moved.shape), target, tuple(dims)).astype(x.dtype)

    return moved.reshape(*moved.shape[: x.ndim - len(dims)], -1), back


def _cut(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cut a dim into pieces of `size`, a further dim; the last one is filled up with zeros."""
    axis %= x.ndim
    pieces = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, pieces * size - x.shape[axis])
    return jnp.pad(x, padding).reshape(*x.shape[:axis], pieces, size, *x.shape[axis + 1 :])
