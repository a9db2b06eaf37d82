"""Norms against float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import ModelConfig
from mtjax.layers.norm import LayerNorm, RMSNorm, make_norm

X = np.random.default_rng(0).normal(2.0, 3.0, (4, 16)).astype(np.float32)
SCALE = np.random.default_rng(1).normal(size=16).astype(np.float32)
BIAS = np.random.default_rng(2).normal(size=16).astype(np.float32)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_rmsnorm_divides_by_the_root_mean_square(unit_offset):
    x = X.astype(np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * (SCALE + unit_offset)
    got = RMSNorm(1e-3, unit_offset).apply({"params": {"scale": SCALE}}, X)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_layernorm_subtracts_the_mean_and_divides_by_the_deviation():
    x = X.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * SCALE + BIAS
    got = LayerNorm(1e-3).apply({"params": {"scale": SCALE, "bias": BIAS}}, X)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_half_precision_is_squared_in_float32():
    """300^2 overflows fp16, whose largest number is 65504."""
    x = jnp.full((1, 8), 300.0, jnp.float16)
    out = RMSNorm(1e-5).apply({"params": {"scale": jnp.ones(8, jnp.float16)}}, x)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(out, 1.0)


@pytest.mark.parametrize(
    ("settings", "kind", "start"),
    [
        ({}, RMSNorm, 1.0),
        ({"norm_unit_offset": True}, RMSNorm, 0.0),
        ({"norm": "layernorm"}, LayerNorm, 1.0),
    ],
)
def test_the_model_config_chooses_the_norm_and_its_neutral_scale(settings, kind, start):
    norm = make_norm(ModelConfig(norm_epsilon=0.5, **settings), "norm")
    assert isinstance(norm, kind)
    assert norm.epsilon == 0.5
    params = norm.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    np.testing.assert_array_equal(params["scale"].value, start)
