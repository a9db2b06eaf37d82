"""Rotary embedding and its long-context variants against published formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import RopeConfig
from mtjax.layers.rope import apply_rope, rope_frequencies, rope_table


def rotate(x_H, position, config=RopeConfig()):  # noqa: B008 (frozen)
    x_BTNH = jnp.asarray(x_H, jnp.float32)[None, None, None]
    table = rope_table(config, x_BTNH.shape[-1], jnp.array([[position]]))
    return np.asarray(apply_rope(x_BTNH, table))[0, 0, 0]


def test_ones_at_position_one_turn_by_the_angles_one_and_a_hundredth():
    cos, sin = math.cos, math.sin
    expected = [cos(1) - sin(1), cos(0.01) - sin(0.01), cos(1) + sin(1), cos(0.01) + sin(0.01)]
    np.testing.assert_allclose(rotate(np.ones(4), 1), expected, rtol=1e-6)


def test_position_zero_changes_nothing():
    x = np.arange(8.0)
    np.testing.assert_array_equal(rotate(x, 0), x)


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_scores_depend_on_the_difference_of_positions_alone(shift):
    q, k = np.random.default_rng(0).normal(size=(2, 16))
    near = rotate(q, 9) @ rotate(k, 4)
    assert rotate(q, 9 + shift) @ rotate(k, 4 + shift) == pytest.approx(near, abs=2e-3)
    assert abs(rotate(q, 10) @ rotate(k, 4) - near) > 0.05


def test_linear_scaling_is_plain_rotation_at_divided_positions():
    x = np.random.default_rng(0).normal(size=16)
    stretched = RopeConfig(scaling="linear", factor=4.0)
    np.testing.assert_allclose(rotate(x, 36, stretched), rotate(x, 9), atol=1e-5)


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between():
    config = RopeConfig(
        theta=500_000.0,
        scaling="llama3",
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    got, temper = rope_frequencies(config, 128)
    kinds = set()
    for i, frequency in enumerate(got):
        plain = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        kinds.add(round(frequency / plain, 3))
        assert frequency == pytest.approx(expected, rel=1e-9)
    assert temper == 1.0
    assert {1.0, 0.125} < kinds


def test_yarn_keeps_fast_dims_divides_slow_ones_and_tempers_attention():
    """Of 32 frequencies, number 10 makes 32 turns in 4096 tokens, and 22.5 makes one."""
    config = RopeConfig(scaling="yarn", factor=40.0, original_max_positions=4096)
    got, temper = rope_frequencies(config, 64)
    ratio = got / 10_000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(ratio[:11], 1.0)
    np.testing.assert_allclose(ratio[23:], 1 / 40)
    np.testing.assert_allclose(ratio[16], 1 - 6 / 13 * (1 - 1 / 40))
    assert temper == pytest.approx(1.3688879454, abs=1e-10)
    # Queries and keys both carry the factor.
    length = np.linalg.norm(rotate(np.ones(64), 7, config)) / 8
    assert length == pytest.approx(1.3688879454, rel=1e-6)


def test_yarn_without_truncate_blends_between_the_exact_ends():
    """gpt-oss-20b: 32 turns in 4096 tokens by frequency 8.09 of 32, and one by 17.40."""
    settings = {"theta": 150_000.0, "scaling": "yarn", "factor": 32.0}
    config = RopeConfig(original_max_positions=4096, truncate=False, **settings)
    ratio = rope_frequencies(config, 64)[0] / 150_000.0 ** (-np.arange(32) / 32)
    first, last = (32 * math.log(4096 / (n * 2 * math.pi)) / math.log(150_000) for n in (32, 1))
    assert (round(first, 2), round(last, 2)) == (8.09, 17.4)
    for i in (9, 12, 17):
        kept = (last - i) / (last - first)
        assert ratio[i] == pytest.approx(kept + (1 - kept) / 32, rel=1e-12)
    rounded = rope_frequencies(RopeConfig(original_max_positions=4096, **settings), 64)[0]
    assert rounded[9] != pytest.approx(ratio[9] * 150_000.0 ** (-9 / 32), rel=1e-3)


def test_bf16_heads_turn_by_angles_of_float32():
    """bfloat16 has no 257: rotated by it, positions 256 and 257 would be one."""
    table = rope_table(RopeConfig(), 4, jnp.array([[256, 257]]))
    assert table.dtype == jnp.float32
    x_BTNH = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    out = apply_rope(x_BTNH, table)
    assert out.dtype == jnp.bfloat16
    expected = [math.cos(p) - math.sin(p) for p in (256, 257)]
    np.testing.assert_allclose(np.asarray(out[0, :, 0, 0], np.float32), expected, rtol=2**-8)
