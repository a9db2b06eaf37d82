"""Records of what was rounded: they add up, and tell the largest value of all."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.precision.quantize import quantize, quantize_by, scale_of
from mtjax.precision.recipe import E4M3, E5M2, RECIPES
from mtjax.precision.statistics import SIZE, read, report

FEW = settings(max_examples=25, deadline=None)
CURRENT = dataclasses.replace(RECIPES["fp8"], counted=True)
DELAYED = dataclasses.replace(RECIPES["fp8_delayed"], counted=True)


def record_of(x, recipe=CURRENT, scale=None):
    """A kernel's record in which all operands are x."""
    x = jnp.asarray(x, jnp.float32)
    rounded = quantize(x, E4M3, (0,)) if scale is None else quantize_by(scale, x, E4M3)
    one = report(recipe, recipe.x, x, rounded)
    assert one.shape == (SIZE,)
    return jnp.tile(one, 3)


@FEW
@given(st.floats(2**-60, 2**60, width=32))
def test_the_largest_value_is_rounded_up_to_four_bits(value):
    found = float(read(record_of([value, -value / 3])).amax[0])
    assert value <= found <= value * (1 + 1 / 8)
    mantissa, _ = np.frexp(found)
    assert mantissa * 16 == int(mantissa * 16)


@FEW
@given(st.floats(2**-30, 2**30, width=32))
def test_its_scale_is_that_of_the_value_itself(value):
    found = read(record_of([value])).amax[0]
    for format in (E4M3, E5M2):
        assert scale_of(found, format) == scale_of(jnp.float32(value), format)


@FEW
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=9), st.integers(1, 8))
def test_a_sum_of_records_is_the_record_of_all(values, cut):
    cut = min(cut, len(values) - 1)
    parts = [record_of(values[:cut]), record_of(values[cut:])]
    assert read(sum(parts)).amax[0] == read(record_of(values)).amax[0]


def test_values_that_vanish_and_values_beyond_the_range_are_counted():
    x = [1.0, 1e-5, 0.0, 500.0, -1000.0, 2.0, 3.0, 4.0]
    found = read(record_of(x, DELAYED, jnp.float32(1.0)))
    assert float(found.underflow[0]) == pytest.approx(1 / 7)
    assert float(found.saturation[0]) == pytest.approx(2 / 7)
    # A scale from the values at hand reaches all of them, and is larger: 1000 / 448 -> 4.
    found = read(record_of([*x[:-2], 0.003, 0.005], CURRENT))
    assert float(found.saturation[0]) == 0
    assert float(found.underflow[0]) == pytest.approx(2 / 7)


def test_ratios_are_those_of_all_values_together_and_zeros_change_nothing():
    one = jnp.float32(1)
    parts = record_of([1.0, 1e-5], DELAYED, one) + record_of([2.0, 3.0, 900.0], DELAYED, one)
    padded = parts + record_of([0.0, 0.0, 0.0], DELAYED, one)
    for found in (read(parts), read(padded)):
        assert float(found.underflow[1]) == float(found.saturation[1]) == pytest.approx(1 / 5)


def test_without_a_report_there_is_no_largest_value_and_zeros_have_a_small_one():
    assert not read(jnp.zeros(3 * SIZE)).amax.any()
    assert (read(record_of([0.0, 0.0])).amax == 2.0**-64).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_known_before_does_not_hide_what_is_not_finite(bad):
    rounded = quantize_by(jnp.float32(1), jnp.asarray([1.0, bad, 1e9]), E4M3)
    np.testing.assert_array_equal(rounded.dequantize(), [1.0, np.nan, 448.0])
