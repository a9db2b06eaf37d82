"""Routers in the step: their losses, their metrics, and biases that even out the loads.

Everything is a sum over tokens of the whole batch, divided once, so that neither the mesh nor the
number of microbatches changes it (but for balance scope microbatch, whose meaning depends on it).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtjax.config.model import ModelConfig
from mtjax.config.moe import MoeConfig
from mtjax.layers.router import RouterStats, next_score_bias
from mtjax.models.decoder import block_groups, mtp_spec
from mtjax.training.losses import LossSums


class RoutedSums(NamedTuple):
    """LossSums of a model with experts: `total` holds the router losses, `router` what routers
    did, as from `mtjax.parallel.stack.run_model`."""

    total: jax.Array
    cross_entropy: jax.Array
    router: Any


class RouterScales(NamedTuple):
    """Factors that turn a layer's sums into its share of the loss sum."""

    balance: jax.Array
    device_balance: jax.Array
    z: jax.Array


def counted(weights: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Which positions [..., T] are no padding.

    Attention is causal, so a position with no weight at or behind it can't reach the loss: rows
    and row ends without weight count as padding, and segment 0 always.
    """
    matters = jax.lax.cummax(weights, axis=weights.ndim - 1, reverse=True) > 0
    return matters if segments is None else matters & (segments > 0)


class BatchSize(NamedTuple):
    """What the sums of a batch are divided by: loss weight, tokens and sequences that count."""

    weight: jax.Array
    tokens: jax.Array
    sequences: jax.Array


def batch_size(weights_MBT: jax.Array, segments_MBT: Any, active: Any) -> BatchSize:
    """Over the first `active` microbatches, or all of them (None)."""
    if active is not None:
        index_M = jnp.arange(weights_MBT.shape[0])
        weights_MBT = jnp.where(index_M[:, None, None] < active, weights_MBT, 0.0)
    counts = counted(weights_MBT, segments_MBT)
    sequences = jnp.sum(jnp.any(counts, axis=-1))
    return BatchSize(jnp.sum(weights_MBT), jnp.sum(counts), sequences)


def router_scales(moe: MoeConfig, size: BatchSize) -> RouterScales:
    """Scales such that the loss sum by its weight is the loss: cross entropy per weighted token,
    plus, of each layer, coefficient times the mean over tokens (sequences) of its losses."""
    per_token = size.weight / jnp.maximum(size.tokens, 1)
    per_sequence = size.weight / jnp.maximum(size.sequences, 1)
    per_scope = per_sequence if moe.balance_scope == "sequence" else per_token
    return RouterScales(
        moe.balance_coefficient * per_scope,
        moe.device_balance_coefficient * per_scope,
        moe.z_coefficient * per_token,
    )


def with_router_losses(sums: LossSums, stats: Any, scales: RouterScales | None) -> RoutedSums:
    """Add each layer's losses to the total; without scales, as in evaluation, none."""
    total = sums.total + router_loss(stats, scales)
    return RoutedSums(total, sums.cross_entropy, jax.lax.stop_gradient(stats))


def router_loss(stats: Any, scales: RouterScales | None) -> jax.Array:
    """The losses of these layers, float32; 0 without scales."""
    total = jnp.float32(0)
    if scales is not None:
        for layer in _layers(stats):
            total += scales.balance * jnp.sum(layer.balance)
            total += scales.device_balance * jnp.sum(layer.device_balance)
            total += scales.z * jnp.sum(layer.z)
    return total


def zero_stats(model: ModelConfig) -> Any:
    """Statistics of no tokens, in the structure that training's forward pass returns."""

    def zero(repeat: int) -> RouterStats:
        scalar = jnp.zeros((repeat,), jnp.float32)
        load = jnp.zeros((repeat, model.moe.num_experts), jnp.float32)
        return RouterStats(load, *[scalar] * (len(RouterStats._fields) - 1))

    stats: dict[str, Any] = {
        f"group{i}": {
            f"block{p}": zero(group.repeat) if spec.experts else None
            for p, spec in enumerate(group.unit)
        }
        for i, group in enumerate(block_groups(model))
    }
    if model.mtp.depth:
        stats["mtp"] = {"block": zero(model.mtp.depth) if mtp_spec(model).experts else None}
    return stats


def loads(stats: Any) -> Any:
    """The loads alone, as `mtjax.parallel.stack.Extra` takes them."""
    return jax.tree.map(lambda layer: layer.load, stats, is_leaf=_is_stats)


def router_metrics(moe: MoeConfig, stats: Any, size: BatchSize) -> dict[str, jax.Array]:
    """Means over layers; the load ratio is that of the most uneven layer."""
    whole = RouterStats(*(jnp.concatenate(parts) for parts in zip(*_layers(stats), strict=True)))
    pairs_L = jnp.maximum(jnp.sum(whole.load, axis=1), 1.0)
    tokens, sequences = (jnp.maximum(n, 1) for n in (size.tokens, size.sequences))
    scope = sequences if moe.balance_scope == "sequence" else tokens
    balance, z = jnp.mean(whole.balance) / scope, jnp.mean(whole.z) / tokens
    device_balance = jnp.mean(whole.device_balance) / scope
    weighted = moe.balance_coefficient * balance + moe.z_coefficient * z
    weighted += moe.device_balance_coefficient * device_balance
    metrics = {
        "train/aux_loss": whole.load.shape[0] * weighted,
        "moe/dropped_ratio": jnp.sum(whole.dropped) / jnp.sum(pairs_L),
        "moe/load_ratio": jnp.max(jnp.max(whole.load, axis=1) * moe.num_experts / pairs_L),
        "moe/entropy": jnp.mean(whole.entropy) / tokens,
        "moe/balance_loss": balance,
        "moe/z_loss": z,
    }
    if moe.device_groups > 1:
        metrics["moe/device_balance_loss"] = device_balance
    return metrics


def bias_metrics(params: Any, stats: Any) -> dict[str, jax.Array]:
    """How far the score biases of all layers have moved; the norm is that of the largest layer."""
    units_of = params["blocks"] | {"mtp": params.get("mtp")}
    found = [
        units_of[group][name]["moe"]["router"]["bias"]
        for group, units in stats.items()
        for name, layer in units.items()
        if layer is not None
    ]
    bias_LE = jnp.concatenate(found)
    return {
        "moe/bias_min": jnp.min(bias_LE),
        "moe/bias_max": jnp.max(bias_LE),
        "moe/bias_norm": jnp.max(jnp.linalg.norm(bias_LE, axis=1)),
    }


def move_score_biases(moe: MoeConfig, params: Any, stats: Any) -> Any:
    """Parameters with each router's bias moved towards an even load, once per optimizer step."""

    def moved(units: Any, stats: Any) -> Any:
        units = dict(units)
        for name, layer in stats.items():
            if layer is not None:
                part = units[name]["moe"]
                router = part["router"]
                router = router | {"bias": next_score_bias(moe, router["bias"], layer.load)}
                units[name] = units[name] | {"moe": part | {"router": router}}
        return units

    groups = {name: units for name, units in stats.items() if name != "mtp"}
    blocks = {name: moved(params["blocks"][name], units) for name, units in groups.items()}
    params = params | {"blocks": blocks}
    if "mtp" in stats:
        params["mtp"] = moved(params["mtp"], stats["mtp"])
    return params


def _is_stats(x: Any) -> bool:
    return isinstance(x, RouterStats)


def _layers(stats: Any) -> list[RouterStats]:
    """Statistics of the blocks that have experts, each [repeat, ...]."""
    return [leaf for leaf in jax.tree.leaves(stats, is_leaf=_is_stats) if _is_stats(leaf)]
