"""Each way of rounding against its definition, edge cases included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mtjax.precision.quantize import (
    quantize,
    quantize_activation,
    quantize_weight,
    scale_of,
)
from mtjax.precision.recipe import E2M1, E4M3, E5M2, INT8, RECIPES
from tests.precision import reference

by_row = jax.jit(lambda x, format: quantize(x, format, (1,)).dequantize(), static_argnums=1)
FORMATS = [E4M3, E5M2, E2M1, INT8]
# Magnitudes over 60 powers of two, zeros and both signs among them.
ARRAYS = hnp.arrays(
    np.float32,
    (2, 24),
    elements=st.one_of(
        st.just(0.0),
        st.floats(-448.0, 448.0, width=32),
        st.floats(-(2.0**20), 2.0**20, width=32),
        st.floats(-(2.0**-40), 2.0**-40, width=32, allow_subnormal=False),
    ),
)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.dtype)
@settings(max_examples=60, deadline=None)
@given(x=ARRAYS)
def test_values_are_the_nearest_under_one_scale_of_a_row(format, x):
    got = by_row(x, format)
    expected = reference.rounded(x, format, (1,))
    # An integer format's x / scale is rounded to float32 first, which can cross a tie.
    off = np.abs(np.asarray(got, np.float64) - expected)
    step = np.max(np.abs(x), axis=1, keepdims=True) / format.largest
    ties = np.abs(np.abs(x) / np.maximum(step, 1e-30) % 1 - 0.5) < 1e-5
    allowed = 0 if format.power_of_two else 1e-6 * step * format.largest + ties * step
    assert np.all(off <= allowed)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.dtype)
def test_all_values_of_a_format_stay_as_they_are(format):
    values = reference.TABLES[format]
    values = np.concatenate([values, -values]).astype(np.float32)
    got = quantize(jnp.asarray(values), format, (0,)).dequantize()
    np.testing.assert_allclose(got, values, rtol=0 if format.power_of_two else 1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.dtype)
def test_zeros_stay_zero_and_the_scale_finite(format):
    values, scale, _ = quantize(jnp.zeros((4, 3)), format, (0, 1))
    assert not np.any(np.asarray(values, np.float32))
    assert np.isfinite(scale) and scale > 0


@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1], ids=lambda f: f.dtype)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_shares_a_scale_with_a_value_that_is_not_finite_is_nan(format, bad):
    x = np.ones((2, 4), np.float32)
    x[1, 2] = bad
    got = quantize(jnp.asarray(x), format, (1,)).dequantize()
    assert np.all(np.isnan(got[1])) and np.all(np.isfinite(got[0]))


@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1], ids=lambda f: f.dtype)
@settings(max_examples=200, deadline=None)
@given(largest=st.floats(2.0**-80, 2.0**80, width=32))
def test_scales_are_powers_of_two_rounded_up(format, largest):
    scale = float(jax.jit(scale_of, static_argnums=1)(jnp.float32(largest), format))
    assert np.frexp(scale)[0] == 0.5
    ratio = np.float32(largest) / np.float32(format.largest)
    assert scale / 2 < ratio <= scale


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("axis", [1, 2])
def test_tiles_along_either_dim(name, axis):
    recipe = RECIPES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 150, 70)).astype(np.float32) * 2.0 ** rng.integers(-6, 6, (2, 150, 70))
    got = quantize_activation(recipe, recipe.x, jnp.asarray(x), (axis,)).dequantize()
    np.testing.assert_array_equal(got, reference.tiled(x, recipe.x, axis, recipe))


def test_tiles_run_over_the_flattened_summed_dims():
    recipe = RECIPES["mxfp8"]
    x = np.random.default_rng(1).normal(size=(3, 6, 10)).astype(np.float32)
    got = quantize_activation(recipe, recipe.x, jnp.asarray(x), (1, 2)).dequantize()
    flat = reference.tiled(x.reshape(3, 60), recipe.x, 1)
    np.testing.assert_array_equal(got, flat.reshape(x.shape))


def test_blocks_of_a_kernel():
    recipe = RECIPES["fp8_block"]
    w = np.random.default_rng(2).normal(size=(2, 5, 40, 130)).astype(np.float32)
    w *= 2.0 ** np.arange(40)[:, None]
    got = quantize_weight(recipe, jnp.asarray(w), 1, (1, 2)).dequantize()
    matrix = w.reshape(2, 200, 130)
    expected = np.empty_like(matrix)
    for layer in range(2):
        for r in range(0, 200, 128):
            for c in range(0, 130, 128):
                at = (layer, slice(r, r + 128), slice(c, c + 128))
                expected[at] = reference.rounded(matrix[at], E4M3, (0, 1))
    np.testing.assert_array_equal(got, expected.reshape(w.shape))


def test_rows_and_tensors_of_a_kernel_keep_layers_and_experts_apart():
    w = np.random.default_rng(3).normal(size=(2, 3, 4, 8)).astype(np.float32)
    w *= 10.0 ** np.arange(2)[:, None, None, None]
    whole = quantize_weight(RECIPES["fp8"], jnp.asarray(w), 2, (2,))
    assert whole.scale.shape == (2, 3, 1, 1)
    np.testing.assert_array_equal(whole.dequantize(), reference.rounded(w, E4M3, (2, 3)))
    rows = quantize_weight(RECIPES["fp8_rowwise"], jnp.asarray(w), 2, (2,))
    assert rows.scale.shape == (2, 3, 1, 8)
    np.testing.assert_array_equal(rows.dequantize(), reference.rounded(w, E4M3, (2,)))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_bf16_holds_what_tiles_are_rounded_to(name):
    """So that products of emulated recipes are exact up to the order of their sums."""
    recipe = RECIPES[name]
    x = jnp.asarray(np.random.default_rng(4).normal(size=(4, 256)), jnp.float32)
    exact = quantize_activation(recipe, recipe.x, x, (1,)).values
    np.testing.assert_array_equal(exact, exact.astype(jnp.bfloat16).astype(jnp.float32))
