"""The loss of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, equations 24 and 25)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtjax.config import Config
from mtjax.training.losses import linear_cross_entropy, loss_config


class Ahead(NamedTuple):
    """What one module reads and is to predict at each position; [M, B, T], or [B, T] of these."""

    tokens: Any
    """Ids k places ahead."""
    labels: Any
    """Ids k + 1 places ahead."""
    weights: Any
    """Loss weights of those, times such a factor that they add up to the weight of the batch."""


class MtpSums(NamedTuple):
    """Sums of a model with multi-token prediction: `total` holds its loss too, `mtp` the mean over
    the modules of their cross entropies, `router` is as in RoutedSums, None without experts."""

    total: jax.Array
    cross_entropy: jax.Array
    mtp: jax.Array
    router: Any


def targets_ahead(config: Config, batch: Any) -> tuple[Ahead, ...]:
    """What each module is given, from a whole batch (`StepInput`) in the order of its text.

    A position counts for module k with the loss weight that its target has k places further on: not
    where the sequence ends before, nor where another document has begun. (The paper divides each
    loss by the length of the sequence; here it is a mean over what counts.)
    """
    segments, weights = batch.segments, batch.weights
    if batch.active is not None:
        index_M = jnp.arange(weights.shape[0])
        weights = jnp.where(index_M[:, None, None] < batch.active, weights, 0.0)
    total = jnp.sum(weights)

    def one(k: int) -> Ahead:
        own = shifted(weights, k)
        if segments is not None:
            own = jnp.where(shifted(segments, k) == segments, own, 0.0)
        factor = total / jnp.maximum(jnp.sum(own), 1e-6)
        return Ahead(shifted(batch.labels, k - 1), shifted(batch.labels, k), own * factor)

    return tuple(one(k) for k in range(1, config.model.mtp.depth + 1))


def shifted(x: jax.Array, places: int) -> jax.Array:
    """The value so many places further on in the last dim, 0 behind its end."""
    size = x.shape[-1]
    index_T = jnp.arange(size)
    return jnp.where(index_T < size - places, jnp.roll(x, -places, axis=-1), jnp.zeros((), x.dtype))


def with_mtp_loss(
    config: Config, sums: Any, hidden: list[jax.Array], table_VD: jax.Array, ahead: Any
) -> MtpSums:
    """Add the loss of the modules, whose outputs are `hidden` [B, T, D], to a microbatch's sums."""
    # The z-loss regularises the output head, which the model's own loss does already.
    settings = loss_config(config)._replace(z_loss=0.0)
    losses = [
        linear_cross_entropy(settings, h_BTD, table_VD, targets.labels, targets.weights)
        for h_BTD, targets in zip(hidden, ahead, strict=True)
    ]
    mtp = config.model.mtp
    total = sum((loss.total for loss in losses), jnp.float32(0)) / mtp.depth
    return MtpSums(
        sums.total + mtp.coefficient * total,
        sums.cross_entropy,
        jax.lax.stop_gradient(total),
        getattr(sums, "router", None),
    )
