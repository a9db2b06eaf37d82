"""Kernels rounded once per step, on the shards where they are stored.

In the tree of parameters a `QuantizedKernel` takes the place of a kernel that the config selects.
Where only some layers of a group are quantised, a tuple of segments takes the place of the group:
each holds consecutive layers that are treated alike.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.config import Config
from mtjax.models.decoder import BlockGroup, block_groups
from mtjax.precision.product import QuantizedKernel
from mtjax.precision.quantize import Quantized, quantize_weight
from mtjax.precision.recipe import RECIPES, Recipe
from mtjax.sharding import Boxed, is_boxed

_pin = jax.lax.with_sharding_constraint


def quantize_blocks(
    config: Config, boxes: Any, masters: Any, computed: Any, stored: Any, used: Any
) -> Any:
    """Blocks with the selected kernels rounded.

    Trees of the same structure: `masters` float32 at rest, `computed` in the compute dtype where
    layers use them; `stored` and `used` the shardings of the two.
    """
    recipe = RECIPES[config.precision]
    groups = {}
    for i, group in enumerate(block_groups(config.model)):
        name = f"group{i}"
        trees = (boxes[name], masters[name], computed[name], stored[name], used[name])
        segments = []
        for begin, end, quantized in _segments(config, group):
            segments.append(
                {
                    f"block{place}": jax.tree.map(
                        _rounding(config, recipe, begin, end, quantized[place]),
                        *(tree[f"block{place}"] for tree in trees),
                        is_leaf=is_boxed,
                    )
                    for place in range(len(group.unit))
                }
            )
        groups[name] = segments[0] if len(segments) == 1 else tuple(segments)
    return groups


def quantize_modules(
    config: Config, boxes: Any, masters: Any, computed: Any, stored: Any, used: Any
) -> Any:
    """The same of the modules of multi-token prediction, which go with the model's last layer."""
    depth, last = config.model.mtp.depth, config.quantize.last_bf16_layers == 0
    one = _rounding(config, RECIPES[config.precision], 0, depth, last)
    return jax.tree.map(one, boxes, masters, computed, stored, used, is_leaf=is_boxed)


def quantized_share(config: Config, part: str, box: Boxed) -> float:
    """Share of the layers in which a kernel of a part of the model ("blocks") is quantised."""
    quantize, layers = config.quantize, config.model.num_layers
    if not config.quantized or box.product is None or box.product.role not in quantize.roles:
        return 0.0
    if part == "mtp":
        return float(quantize.last_bf16_layers == 0)
    return 1 - (quantize.first_bf16_layers + quantize.last_bf16_layers) / layers


def join_segments(blocks: Any) -> Any:
    """Groups of stacked layers again, from gradients of a tree with segments."""

    def join(group: Any) -> Any:
        if not isinstance(group, tuple):
            return group
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *group)

    return {name: join(group) for name, group in blocks.items()}


def _segments(config: Config, group: BlockGroup) -> list[tuple[int, int, tuple[bool, ...]]]:
    """First and last repeat of each segment, and which places of the pattern are quantised."""
    first = config.quantize.first_bf16_layers
    behind = config.model.num_layers - config.quantize.last_bf16_layers
    segments: list[tuple[int, int, tuple[bool, ...]]] = []
    for repeat in range(group.repeat):
        layers = [group.layer_index(repeat, place) for place in range(len(group.unit))]
        quantized = tuple(first <= layer < behind for layer in layers)
        if segments and segments[-1][2] == quantized:
            segments[-1] = (segments[-1][0], repeat + 1, quantized)
        else:
            segments.append((repeat, repeat + 1, quantized))
    return segments


def _rounding(
    config: Config, recipe: Recipe, begin: int, end: int, quantized: bool
) -> Callable[..., Any]:
    """What makes the layers begin to end of a leaf from the arguments of `quantize_blocks`."""

    def one(box: Boxed, master: Any, computed: Any, stored: Any, used: Any) -> Any:
        whole = (begin, end) == (0, len(computed))
        if not (quantized and box.product and box.product.role in config.quantize.roles):
            return computed if whole else computed[begin:end]
        master = master if whole else _pin(master[begin:end], stored)
        dtype = computed.dtype
        nb = 1 + box.names[1:].count("experts")
        ins = range(nb, nb + box.product.num_in)
        outs = range(ins.stop, master.ndim)

        def rounded(summed: range) -> Quantized:
            values, scale = quantize_weight(recipe, master, nb, summed)
            if scale is None:
                values = values.astype(dtype)
            else:
                scale = _pin(_pin(scale, unsplit(scale, stored)), unsplit(scale, used))
            # Pinned on both sides, so that what moves are the rounded values.
            return Quantized(_pin(_pin(values, stored), used), scale)

        forward = rounded(ins)
        backward = rounded(outs) if recipe.w.sharing == "tile" else None
        carrier = _pin(jnp.zeros(master.shape, dtype), used)
        return QuantizedKernel(carrier, forward, backward, recipe)

    return one


def unsplit(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding of a kernel without the dims in which a leaf, such as its scale, has size 1."""
    entries = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
    kept = (e if size > 1 else None for e, size in zip(entries, leaf.shape, strict=True))
    return NamedSharding(sharding.mesh, P(*kept))
