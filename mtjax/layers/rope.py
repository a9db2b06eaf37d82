"""Rotary position embedding and its long-context variants."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config.model import RopeConfig


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies [H/2] in radians per token, and the factor on cos and sin.

    linear: positions divided by the factor (Chen et al. 2023, arXiv 2306.15595).
    llama3: long wavelengths divided by the factor, short ones kept, a linear blend between
    (Llama 3 report, arXiv 2407.21783).
    yarn: the blend runs over dims, between beta_fast and beta_slow turns in the original
    context, widened to whole dims with `truncate`, and attention is tempered (Peng et al. 2023,
    arXiv 2309.00071, equations 18 to 22).
    """
    half = head_dim // 2
    frequencies = config.theta ** -(np.arange(half) / half)
    if config.scaling == "none":
        return frequencies, 1.0
    stretched = frequencies / config.factor
    if config.scaling == "linear":
        return stretched, 1.0
    if config.scaling == "llama3":
        turns = config.original_max_positions * frequencies / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return stretched + (frequencies - stretched) * keep, 1.0
    bounds = [_dim_with_turns(config, head_dim, beta) for beta in _yarn_betas(config)]
    if config.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    first, last = max(bounds[0], 0), min(bounds[1], head_dim - 1)
    ramp = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0.0, 1.0)
    temper = _yarn_temper(config, config.mscale) / _yarn_temper(config, config.mscale_all_dim)
    return frequencies + (stretched - frequencies) * ramp, temper


def product_factor(config: RopeConfig) -> float:
    """Factor on query-key products beside what cos and sin carry: YaRN's, as DeepSeek-V2 has it."""
    return _yarn_temper(config, config.mscale_all_dim) ** 2 if config.scaling == "yarn" else 1.0


def _yarn_temper(config: RopeConfig, mscale: float) -> float:
    return 0.1 * mscale * math.log(config.factor) + 1.0


def _yarn_betas(config: RopeConfig) -> tuple[float, float]:
    return config.beta_fast, config.beta_slow


def _dim_with_turns(config: RopeConfig, head_dim: int, turns: float) -> float:
    """Index of the frequency that makes this many turns in the original context."""
    wavelength = config.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(config.theta))


def rope_table(config: RopeConfig, head_dim: int, positions_BT: jax.Array) -> jax.Array:
    """cos and sin of each position's angles, float32 [2, B, T, H/2]."""
    frequencies, factor = rope_frequencies(config, head_dim)
    # float32 angles: bfloat16 can't tell positions above 256 apart.
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies.astype(np.float32)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * np.float32(factor)


def apply_rope(x_BTNH: jax.Array, table: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + H/2) of each head by the angles of `rope_table`."""
    cos, sin = table[0][:, :, None], table[1][:, :, None]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
