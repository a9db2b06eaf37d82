"""Kernels rounded once per step, on the shards where they are stored.

In the tree of parameters a `QuantizedKernel` takes the place of a kernel that the config selects.
Where only some layers of a group are quantised, a tuple of segments takes the place of the group:
each holds consecutive layers that are treated alike.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.config import Config
from mtjax.models.decoder import BlockGroup, block_groups
from mtjax.precision.product import QuantizedKernel, Trained, is_trained
from mtjax.precision.quantize import Quantized, quantize_weight
from mtjax.precision.recipe import RECIPES, Recipe
from mtjax.precision.statistics import report
from mtjax.sharding import Boxed, is_boxed

QUANTIZED_PARTS = ("blocks", "mtp")
"""Of a model's parameters; a model may lack the second."""

_pin = jax.lax.with_sharding_constraint


def quantize_blocks(
    config: Config,
    boxes: Any,
    masters: Any,
    computed: Any,
    stored: Any,
    used: Any,
    scales: Any,
    *,
    recorded: bool,
) -> Any:
    """Blocks with the selected kernels rounded, and with room for records if they are asked for.

    Trees of the same structure: `masters` float32 at rest, `computed` in the compute dtype where
    layers use them; `stored` and `used` the shardings of the two; `scales` of x and g [layers, 2],
    None where they come from the values at hand.
    """
    recipe, recorded = _recipe(config, recorded)
    groups = {}
    for i, group in enumerate(block_groups(config.model)):
        name = f"group{i}"
        trees = [tree[name] for tree in (boxes, masters, computed, stored, used, scales)]
        segments = []
        for begin, end, quantized in _segments(config, group):
            segments.append(
                {
                    f"block{place}": jax.tree.map(
                        _rounding(config, recipe, begin, end, quantized[place], recorded),
                        *(tree[f"block{place}"] for tree in trees),
                        is_leaf=is_boxed,
                    )
                    for place in range(len(group.unit))
                }
            )
        groups[name] = segments[0] if len(segments) == 1 else tuple(segments)
    return groups


def quantize_modules(config: Config, *trees: Any, recorded: bool) -> Any:
    """The same of the modules of multi-token prediction, which go with the model's last layer."""
    recipe, recorded = _recipe(config, recorded)
    one = _rounding(config, recipe, 0, config.model.mtp.depth, _last_is_rounded(config), recorded)
    return jax.tree.map(one, *trees, is_leaf=is_boxed)


def _recipe(config: Config, recorded: bool) -> tuple[Recipe, bool]:
    """The recipe, and whether its products keep records where there is to be room for them."""
    counted = config.quantize.statistics or config.quantize.fallback_ratio > 0
    backend = config.quantize.backend
    assert backend != "auto", "mtjax.config.resolve_backends replaces it"
    recomputed = config.train.remat != "none"
    recipe = dataclasses.replace(
        RECIPES[config.precision], counted=counted, recomputed=recomputed, backend=backend
    )
    return recipe, recorded and (recipe.delayed or counted)


def _last_is_rounded(config: Config) -> bool:
    layers = config.model.num_layers
    return layers - 1 not in config.quantize.kept_layers(layers)


def is_selected(config: Config, box: Boxed) -> bool:
    """Whether the role of a kernel is one that is quantised."""
    return box.product is not None and box.product.role in config.quantize.roles


def quantized_share(config: Config, part: str, box: Boxed) -> float:
    """Share of the layers in which a kernel of a part of the model ("blocks") is quantised."""
    if not (config.quantized and is_selected(config, box)):
        return 0.0
    if part == "mtp":
        return float(_last_is_rounded(config))
    layers = config.model.num_layers
    return 1 - len(config.quantize.kept_layers(layers)) / layers


def bytes_per_value(config: Config, dtype: Any) -> int:
    """Of a quantised kernel as layers use it, without its scales; `dtype`: the compute dtype."""
    if not config.quantized:
        return jnp.dtype(dtype).itemsize
    recipe, _ = _recipe(config, False)
    roundings = 2 if recipe.w.sharing == "tile" else 1
    real = recipe.block_scaled or not recipe.tiled
    return roundings * (1 if real else jnp.dtype(dtype).itemsize)


def join_segments(blocks: Any) -> Any:
    """Groups of stacked layers again, from gradients of a tree with segments."""

    def join(*parts: Any) -> Any:
        records = [part.record for part in parts if is_trained(part)]
        whole = jnp.concatenate([p.carrier if is_trained(p) else p for p in parts])
        if not records:
            return whole
        filled = [
            part.record if is_trained(part) else jnp.zeros((len(part), *records[0].shape[1:]))
            for part in parts
        ]
        return Trained(whole, jnp.concatenate(filled))

    return {
        name: jax.tree.map(join, *group, is_leaf=is_trained) if isinstance(group, tuple) else group
        for name, group in blocks.items()
    }


def without_records(gradients: Any) -> tuple[Any, Any]:
    """Gradients as arrays, and the records: a tree with None where there is none."""
    both = [
        jax.tree.map(choose, gradients, is_leaf=is_trained)
        for choose in (
            lambda node: node.carrier if is_trained(node) else node,
            lambda node: node.record if is_trained(node) else None,
        )
    ]
    return both[0], both[1]


def _segments(config: Config, group: BlockGroup) -> list[tuple[int, int, tuple[bool, ...]]]:
    """First and last repeat of each segment, and which places of the pattern are quantised."""
    kept = config.quantize.kept_layers(config.model.num_layers)
    segments: list[tuple[int, int, tuple[bool, ...]]] = []
    for repeat in range(group.repeat):
        layers = [group.layer_index(repeat, place) for place in range(len(group.unit))]
        quantized = tuple(layer not in kept for layer in layers)
        if segments and segments[-1][2] == quantized:
            segments[-1] = (segments[-1][0], repeat + 1, quantized)
        else:
            segments.append((repeat, repeat + 1, quantized))
    return segments


def _rounding(
    config: Config, recipe: Recipe, begin: int, end: int, quantized: bool, recorded: bool
) -> Callable[..., Any]:
    """What makes the layers begin to end of a leaf from the arguments of `quantize_blocks`."""

    def one(box: Boxed, master: Any, computed: Any, stored: Any, used: Any, scales: Any) -> Any:
        whole = (begin, end) == (0, len(computed))
        if not (quantized and is_selected(config, box)):
            return computed if whole else computed[begin:end]
        master = master if whole else _pin(master[begin:end], stored)
        dtype = computed.dtype
        nb = 1 + box.names[1:].count("experts")
        assert box.product is not None
        ins = range(nb, nb + box.product.num_in)
        outs = range(ins.stop, master.ndim)

        def rounded(summed: range) -> Quantized:
            values, *scales = quantize_weight(recipe, master, nb, summed)
            if scales == [None, None]:
                values = values.astype(dtype)
            # Pinned on both sides, so that what moves are the rounded values.
            return jax.tree.map(
                lambda leaf: _pin(_pin(leaf, fitted(leaf, stored)), fitted(leaf, used)),
                Quantized(values, *scales),
            )

        forward = rounded(ins)
        backward = rounded(outs) if recipe.w.sharing == "tile" else None
        carrier = _pin(jnp.zeros(master.shape, dtype), used)
        record = None
        if recorded:
            own = jax.vmap(partial(report, recipe, recipe.w))(master, forward)
            nothing = jnp.zeros_like(own)
            record = jnp.concatenate([nothing, own, nothing], axis=1)
        scales = None if scales is None else scales[begin:end]
        return QuantizedKernel(carrier, forward, backward, recipe, record, scales)

    return one


def fitted(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding of a kernel without the dims in which a leaf that goes with it, such as a scale
    of size 1, does not divide."""
    entries = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
    kept = []
    for entry, size in zip(entries, leaf.shape, strict=True):
        axes = (entry,) if isinstance(entry, str) else (entry or ())
        parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
        kept.append(entry if size % parts == 0 else None)
    return NamedSharding(sharding.mesh, P(*kept))
