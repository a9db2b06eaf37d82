"""What rounding did to the operands of a product, in a form that can be added up.

Microbatches, devices and stages each see some of the values. What each reports is a histogram with
one count, at the largest magnitude that it met: their sum tells the largest of all, on any layout,
where a sum of maxima would not. Bins are numbers of four significant bits, and a magnitude counts
as the next of them: as the largest values of f8 formats are such numbers too, a scale that is a
power of two comes out the same as from the magnitude itself.

A kernel's record is an array [3 SIZE] of floats, for x, w and g in turn (see
`mtjax.precision.recipe`): the histogram, then how many values underflow, saturate and are not zero.
Zeros don't count: how many rows are padding depends on the layout.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtjax.precision.quantize import Quantized, no_dims_of_one
from mtjax.precision.recipe import Recipe, Spec

_MANTISSA_BITS = 3
_SHIFT = 23 - _MANTISSA_BITS  # of the bits of a float32 number
_FIRST = (127 - 64) << _MANTISSA_BITS
_BINS = 128 << _MANTISSA_BITS  # 2^-64 to 2^64
SIZE = _BINS + 3


def report(recipe: Recipe, spec: Spec, x: jax.Array, rounded: Quantized) -> jax.Array:
    """Record [SIZE] of one rounding."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    histogram = _histogram(jnp.max(magnitude))
    if not recipe.counted:
        return jnp.concatenate([histogram, jnp.zeros(3)])
    count = partial(jnp.sum, dtype=jnp.float32)
    underflow = count((magnitude > 0) & (rounded.values == 0))
    saturation = jnp.float32(0)  # a scale that the values themselves gave reaches all of them
    if recipe.delayed:
        limit = no_dims_of_one(rounded.scale) * spec.format.largest
        saturation = count(magnitude > limit)
    return jnp.concatenate([histogram, jnp.stack([underflow, saturation, count(magnitude > 0)])])


def _histogram(largest: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    bin = jnp.clip(((bits + (1 << _SHIFT) - 1) >> _SHIFT) - _FIRST, 0, _BINS - 1)
    return (jnp.arange(_BINS) == bin).astype(jnp.float32)


class Statistics(NamedTuple):
    """Of the operands x, w and g of products: arrays [..., 3]."""

    amax: jax.Array
    """Largest magnitude, rounded up to four significant bits; 2^-64 of zeros, 0 of no report."""
    underflow: jax.Array
    """Share of the values other than zero that were rounded to it."""
    saturation: jax.Array
    """Share of the values other than zero that were beyond the range."""


def read(record: jax.Array) -> Statistics:
    """From the sum [..., 3 SIZE] of records."""
    record = record.reshape(*record.shape[:-1], 3, SIZE)
    seen = record[..., :_BINS] > 0
    last = jnp.max(jnp.where(seen, jnp.arange(_BINS), -1), axis=-1)
    value = jax.lax.bitcast_convert_type((last + _FIRST) << _SHIFT, jnp.float32)
    underflow, saturation, number = (record[..., _BINS + i] for i in range(3))
    number = jnp.maximum(number, 1.0)
    return Statistics(jnp.where(last < 0, 0.0, value), underflow / number, saturation / number)
