"""Initial weights whose bits depend on nothing but key, shape and standard deviation."""

import functools
import statistics

import jax
import numpy as np

_LEVELS = 1 << 16


@functools.cache
def _quantiles() -> np.ndarray:
    """Quantiles of the standard normal distribution at (k + 1/2) / 65536, with variance 1."""
    inverse = statistics.NormalDist().inv_cdf
    values = np.array([inverse((k + 0.5) / _LEVELS) for k in range(_LEVELS)])
    return values / values.std()


def normal(std: float):
    """Initializer that draws from N(0, std^2) by looking 16 random bits up in a table.

    Computing the inverse error function on the device instead would round differently in a
    vectorised loop and in its remainder, so that the last bit of a weight would depend on how its
    array is cut; integers and a lookup are exact on every layout and platform.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        table = jax.numpy.asarray(std * _quantiles(), dtype)
        return table[jax.random.bits(key, shape, np.uint16)]

    return init
