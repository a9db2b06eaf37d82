"""Rounding by the definition, in numpy: tables of all values of a format, float64 throughout."""

import numpy as np

from mtjax.precision.recipe import E2M1, E4M3, E5M2, INT8, RECIPES


def _all_values(exponent_bits, mantissa_bits, bias, largest):
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:
                values.append(fraction * 2.0 ** (1 - bias))
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(sorted(value for value in values if value <= largest))


# Index in the table has the parity of the last mantissa bit: ties go to the even one.
TABLES = {
    E4M3: _all_values(4, 3, 7, 448.0),
    E5M2: _all_values(5, 2, 15, 57344.0),
    E2M1: _all_values(2, 1, 1, 6.0),
    INT8: np.arange(128, dtype=np.float64),
}


def nearest(x, format):
    """Each value's nearest in the format, ties to even, saturating."""
    table = TABLES[format]
    magnitude = np.abs(np.asarray(x, np.float64))
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    middle = (low + high) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return np.where(np.signbit(x), -1.0, 1.0) * np.where(up, high, low)


def scale(largest, format):
    """Scale for a largest magnitude, 1e-30 at least: up to a power of two for floating formats."""
    ratio = max(largest, 1e-30) / format.largest
    if not format.power_of_two:
        return ratio
    power = 2.0 ** np.floor(np.log2(ratio))
    return power if power >= ratio else 2 * power


def rounded(x, format, shared):
    """x rounded with one scale along the dims `shared`."""
    x = np.asarray(x, np.float64)
    largest = np.max(np.abs(x), axis=shared, keepdims=True)
    scales = np.vectorize(lambda m: scale(m, format))(largest)
    return nearest(x / scales, format) * scales


def tiled(x, spec, axis, recipe=None):
    """x rounded in tiles along one axis."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    out = np.empty_like(x)
    outer = None
    if recipe == RECIPES["nvfp4"]:
        outer = scale(np.max(np.abs(x)) / spec.format.largest, E4M3)
    for row in np.ndindex(x.shape[:-1]):
        for begin in range(0, x.shape[-1], spec.size):
            tile = x[row][begin : begin + spec.size]
            if outer is None:
                out[row][begin : begin + spec.size] = rounded(tile, spec.format, (0,))
            else:
                wanted = np.max(np.abs(tile)) / spec.format.largest
                inner = nearest(wanted / outer, E4M3)
                factor = (inner if inner else 1.0) * outer
                out[row][begin : begin + spec.size] = nearest(tile / factor, spec.format) * factor
    return np.moveaxis(out, -1, axis)
