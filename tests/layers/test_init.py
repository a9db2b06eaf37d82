"""Initial weights: moments of the normal distribution, and bits that no layout changes."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.layers.init import normal

NUM = 1 << 20


@pytest.fixture(scope="module")
def draws():
    return np.asarray(normal(0.02)(jax.random.key(0), (NUM,), jnp.float32), np.float64)


def test_moments_are_those_of_a_normal_distribution(draws):
    """Within five standard errors of each, at 2^20 draws."""
    assert draws.mean() == pytest.approx(0.0, abs=5 * 0.02 / np.sqrt(NUM))
    assert draws.std() == pytest.approx(0.02, rel=5 / np.sqrt(2 * NUM))
    unit = (draws - draws.mean()) / draws.std()
    assert np.mean(unit**3) == pytest.approx(0.0, abs=5 * np.sqrt(6 / NUM))
    assert np.mean(unit**4) == pytest.approx(3.0, abs=5 * np.sqrt(24 / NUM))


def test_shares_beyond_each_deviation_are_those_of_a_normal_distribution(draws):
    for deviations in (0.5, 1.0, 2.0, 3.0):
        share = 2 * statistics.NormalDist().cdf(-deviations)
        error = np.sqrt(share * (1 - share) / NUM)
        assert np.mean(np.abs(draws) > deviations * 0.02) == pytest.approx(share, abs=5 * error)


def test_there_are_65536_levels_and_the_largest_is_4_32_deviations(draws):
    """Of 2^16 levels, 2^20 draws leave out 65536 e^-16 = 0.007."""
    assert len(np.unique(draws)) in (65535, 65536)
    largest = statistics.NormalDist().inv_cdf(1 - 0.5 / 65536)
    assert np.abs(draws).max() / 0.02 == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((24, 7), (("x", "y"), None)), ((6, 20), ("x", "y")), ((3, 5, 8), (None, None, ("y", "x")))],
)
def test_a_sharded_weight_has_the_bits_of_a_whole_one(shape, axes):
    """Blocks of 3 x 7, 3 x 5 and 3 x 5 x 1 entries, none a whole number of vector registers."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, P(*axes))

    def init():
        return normal(0.3)(jax.random.key(1), shape, jnp.float32)

    whole = jax.jit(init)()
    np.testing.assert_array_equal(jax.jit(init, out_shardings=sharding)(), whole)
    np.testing.assert_array_equal(init(), whole)


def test_a_stacked_weight_has_the_bits_of_a_single_one():
    keys = jax.random.split(jax.random.key(2), 3)
    init = normal(0.3)
    stacked = jax.vmap(lambda key: init(key, (5, 3), jnp.float32))(keys)
    for key, layer in zip(keys, stacked, strict=True):
        np.testing.assert_array_equal(init(key, (5, 3), jnp.float32), layer)


def test_other_keys_draw_other_weights():
    a, b = (normal(1.0)(jax.random.key(seed), (1000,), jnp.float32) for seed in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(1000)
