"""Delayed scaling: the scales of a step come from the largest values of those before it.

This is part of the training state and no parameter: neither the optimizer nor clipping sees it, and
a step that is skipped leaves it alone. Weights are at hand before the step, so that their scales
need no history (Micikevicius et al. 2022, arXiv 2209.05433, section 3.3).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config import Config
from mtjax.config.check import require
from mtjax.models.decoder import block_groups
from mtjax.precision.quantize import scale_of
from mtjax.precision.recipe import RECIPES
from mtjax.precision.statistics import Statistics, read
from mtjax.sharding import Boxed, is_boxed
from mtjax.training.quantized import QUANTIZED_PARTS, is_selected


class Delayed(NamedTuple):
    """What steps leave for the scales of the next ones."""

    histories: Any
    """Largest magnitudes of x and g [layers, 2, steps], the newest first, 0 where there is none: a
    tree like the parameters, None for what is not quantised."""
    saturated: jax.Array
    """Steps in a row, to this one, in which too many values of a layer saturated: int32
    [num_layers]."""


def start_delayed(config: Config, boxes: Any) -> Delayed:
    """Of a run that has seen nothing."""

    def one(box: Boxed) -> Any:
        if not is_selected(config, box):
            return None
        return jnp.zeros((box.value.shape[0], 2, config.quantize.amax_history), jnp.float32)

    parts = {name: boxes[name] for name in QUANTIZED_PARTS if name in boxes}
    histories = jax.tree.map(one, parts, is_leaf=is_boxed)
    return Delayed(histories, jnp.zeros(config.model.num_layers, jnp.int32))


def delayed_scales(config: Config, boxes: Any, delayed: Delayed | None) -> Any:
    """Scales [layers, 2] of x and g, in the structure of the boxes; 1 where the history is empty,
    None where there is none."""
    if delayed is None:
        return jax.tree.map(lambda _: None, boxes, is_leaf=is_boxed)
    recipe = RECIPES[config.precision]

    def one(history: jax.Array) -> jax.Array:
        largest = jnp.max(history, axis=-1)
        specs = enumerate((recipe.x, recipe.g))
        found = jnp.stack([scale_of(largest[:, i], spec.format) for i, spec in specs], axis=-1)
        return jnp.where(largest > 0, found, 1.0)

    return jax.tree.map(one, delayed.histories)


def moved_on(config: Config, delayed: Delayed, records: Any) -> Delayed:
    """With what a step found; where it found nothing the newest values stay.

    `records`: as from `mtjax.training.step.differentiate`.
    """
    found = jax.tree.map(read, {name: records[name] for name in delayed.histories})

    def one(history: Any, statistics: Statistics | None) -> Any:
        if history is None or statistics is None:
            return history
        largest = statistics.amax[:, ::2]
        newest = jnp.where(largest > 0, largest, history[..., 0])
        return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)

    histories = jax.tree.map(one, delayed.histories, found, is_leaf=lambda node: node is None)
    too_many = _saturation(config, found["blocks"]) > config.quantize.fallback_ratio
    return Delayed(histories, jnp.where(too_many, delayed.saturated + 1, 0))


def _saturation(config: Config, found: Any) -> jax.Array:
    """Highest saturation ratio of each layer's products, [num_layers]."""
    ratio = jnp.zeros(config.model.num_layers)
    for i, group in enumerate(block_groups(config.model)):
        for place in range(len(group.unit)):
            layers = np.array([group.layer_index(r, place) for r in range(group.repeat)])
            kernels = jax.tree.leaves(
                found[f"group{i}"][f"block{place}"], is_leaf=lambda n: isinstance(n, Statistics)
            )
            for statistics in kernels:
                ratio = ratio.at[layers].max(jnp.max(statistics.saturation, axis=-1))
    return ratio


def saturated_layers(config: Config, delayed: Delayed) -> jax.Array:
    """How many layers are to fall back."""
    return jnp.sum(_falls_back(config, delayed), dtype=jnp.float32)


def _falls_back(config: Config, delayed: Delayed) -> jax.Array:
    quantize = config.quantize
    return (delayed.saturated >= quantize.fallback_steps) & (quantize.fallback_ratio > 0)


def layers_to_fall_back(config: Config, delayed: Delayed) -> list[int]:
    """Those that saturate too long."""
    return [int(i) for i in np.flatnonzero(np.asarray(_falls_back(config, delayed)))]


def keep_layers(config: Config, layers: list[int]) -> Config:
    """The config with these layers in the compute dtype too."""
    all_layers = tuple(sorted({*config.quantize.bf16_layers, *layers}))
    quantize = dataclasses.replace(config.quantize, bf16_layers=all_layers)
    return dataclasses.replace(config, quantize=quantize)


def scaling_state(config: Config, fallen: list[int]) -> dict[str, Any]:
    """What a checkpoint says of its histories, as JSON: by what recipe, and the layers that have
    fallen back."""
    return {"fingerprint": _fingerprint(config), "fallen": fallen}


def restorable(config: Config, abstract: Any, saved: Any) -> tuple[Any, tuple[str, ...]]:
    """The abstract state without what is to start anew, and the names of arrays that are left in
    the checkpoint, whose scaling state is `saved`. Histories of another recipe are of no use."""
    saved = saved if isinstance(saved, Mapping) else {}
    if saved.get("fingerprint") == _fingerprint(config):
        return abstract, ()
    return abstract._replace(delayed=None), ("delayed/",)


def fallen_layers(config: Config, saved: Any) -> list[int]:
    """Those of a checkpoint with the scaling state `saved`, none where nothing is quantised.

    Raises:
        ValueError: the mesh has a pipeline, whose stages run the same program.
    """
    layers = saved.get("fallen", []) if isinstance(saved, Mapping) else []
    in_range = [i for i in layers if i in range(config.model.num_layers)]
    if not config.quantized or not in_range:
        return []
    require(
        config.mesh.pipeline == 1,
        "mesh.pipeline",
        config.mesh.pipeline,
        f"1 with layers that have fallen back ({_list(in_range)})",
        "leave it at 1, or go on in precision bf16, which quantises nothing",
    )
    return in_range


def described(config: Config, layers: list[int]) -> str:
    """A line that says which layers have fallen back."""
    text = f"fell back to {config.quantize.compute} and stay there: layers {_list(layers)}"
    if len(config.quantize.kept_layers(config.model.num_layers)) == config.model.num_layers:
        text += "; nothing is quantised any more"
    return text


def _list(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


def _fingerprint(config: Config) -> list[Any] | None:
    if config.precision != "fp8_delayed":
        return None
    quantize = config.quantize
    return [repr(RECIPES[config.precision]), list(quantize.roles), quantize.amax_history]
