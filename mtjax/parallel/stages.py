"""Where each layer stands in a pipeline, and the parameters of a model seen stage by stage.

Parameters are stored as [layers, ...], so that a checkpoint knows nothing of stages. Once per step
they are seen as [V, S, U, ...]: chunk, stage, and the units (repeats of the layer pattern) of one
chunk of one stage; gradients go back the same way.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config.model import ModelConfig
from mtjax.config.pipeline import PipelineConfig, layers_per_stage
from mtjax.models.decoder import BlockGroup, block_groups
from mtjax.sharding import Names


@dataclass(frozen=True)
class StageLayout:
    """The units of a model, dealt out; units that a stage lacks are the identity."""

    unit: BlockGroup
    """The pattern that every unit repeats; its `repeat` counts the units of the whole model."""
    index_VSU: np.ndarray
    """Unit that stands there; some unit, not to be used, where `real` is False throughout."""
    real_VSUP: np.ndarray
    """Whether there is a layer at this place of the pattern (P places)."""
    counts: tuple[int, ...]
    """Layers at each place of the pattern, in the whole model."""

    @property
    def padded(self) -> bool:
        """Whether some stage has fewer layers than another."""
        return not self.real_VSUP.all()

    @property
    def contiguous(self) -> bool:
        """Whether an even cut of [layers, ...] into S pieces already is the stages' view."""
        return self.index_VSU.shape[0] == 1 and not self.padded


def stage_layout(model: ModelConfig, pipeline: PipelineConfig, num_stages: int) -> StageLayout:
    """Deal the layers of a model out; the config has been checked to fit."""
    groups = block_groups(model)
    unit, period = groups[0].unit, len(groups[0].unit)
    assert all(g.unit == unit[: len(g.unit)] for g in groups), "a stage is one repeated pattern"
    layers = np.array(layers_per_stage(model, pipeline, num_stages))
    units = -(-layers // period)
    first = np.cumsum(units) - units
    place_U = np.arange(units.max())
    # Parts of the model in its order are chunk-major: part = chunk * S + stage.
    index = np.minimum((first[:, None] + place_U), units.sum() - 1)
    layer = place_U[:, None] * period + np.arange(period)
    real = layer < layers[:, None, None]
    shape = (pipeline.chunks, num_stages, units.max())
    return StageLayout(
        BlockGroup(0, unit, int(units.sum())),
        index.reshape(shape),
        real.reshape(*shape, period),
        tuple(-(-(model.num_layers - place) // period) for place in range(period)),
    )


def stack_stages(layout: StageLayout, blocks: Any) -> dict[str, Any]:
    """{"block0": leaves [V, S, U, ...], ...} from groups of leaves [layers, ...]."""
    places: dict[str, list[Any]] = {}
    for group in sorted(blocks):
        for name, leaves in blocks[group].items():
            places.setdefault(name, []).append(leaves)

    def view(leaf: jax.Array) -> jax.Array:
        if layout.contiguous:
            return leaf.reshape(*layout.index_VSU.shape, *leaf.shape[1:])
        return leaf[np.minimum(layout.index_VSU, len(leaf) - 1)]

    def join(*leaves: jax.Array) -> jax.Array:
        return view(jnp.concatenate(leaves) if len(leaves) > 1 else leaves[0])

    return {name: jax.tree.map(join, *leaves) for name, leaves in places.items()}


def unstack_stages(layout: StageLayout, model: ModelConfig, stages: dict[str, Any]) -> Any:
    """The inverse of `stack_stages`: groups of leaves [layers, ...]; identity places are left."""
    blocks: dict[str, Any] = {}
    begin = dict.fromkeys(stages, 0)
    for i, group in enumerate(block_groups(model)):
        blocks[f"group{i}"] = {}
        for place in range(len(group.unit)):
            name = f"block{place}"
            rows = _rows(layout, place)[begin[name] : begin[name] + group.repeat]
            begin[name] += group.repeat

            def pick(leaf: jax.Array, rows: np.ndarray = rows) -> jax.Array:
                flat = leaf.reshape(-1, *leaf.shape[3:])
                return flat if layout.contiguous else flat[rows]

            blocks[f"group{i}"][name] = jax.tree.map(pick, stages[name])
    return blocks


def _rows(layout: StageLayout, place: int) -> np.ndarray:
    """Index in the flattened [V, S, U] of each layer at one place of the pattern, in order."""
    real = layout.real_VSUP[..., place].reshape(-1)
    order = layout.index_VSU.reshape(-1)[real]
    assert (np.diff(order) > 0).all() and len(order) == layout.counts[place]
    return np.flatnonzero(real)


def stage_names(names: Names) -> Names:
    """Logical dims of a leaf in the stages' view, from those of the stored one."""
    return (None, "stages", None, *names[1:])
