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


@dataclass(frozen=True)
class Dealt:
    """One run of the model's layers (`ModelConfig.layer_runs`), dealt out in whole units.

    Every chunk of every stage has places for as many units as any has of them; what it lacks is
    the identity.
    """

    unit: BlockGroup
    """The pattern that every unit repeats; its `repeat` counts the units of the whole model."""
    index_VSU: np.ndarray
    """Unit that stands there; some unit, not to be used, where `real` is False throughout."""
    real_VSUP: np.ndarray
    """Whether there is a layer at this place of the pattern (P places)."""
    groups: tuple[str, ...]
    """Names of the model's groups that hold these layers; the first is of whole units."""

    @property
    def padded(self) -> bool:
        """Whether some stage has fewer layers than another."""
        return not self.real_VSUP.all()


@dataclass(frozen=True)
class StageLayout:
    """The layers of a model, dealt out: {"run0": ...} in the order of the model."""

    runs: dict[str, Dealt]

    @property
    def contiguous(self) -> bool:
        """Whether an even cut of [layers, ...] into S pieces already is the stages' view."""
        first = self.runs["run0"]
        return len(self.runs) == 1 and first.index_VSU.shape[0] == 1 and not first.padded


def stage_layout(model: ModelConfig, pipeline: PipelineConfig, num_stages: int) -> StageLayout:
    """Deal the layers of a model out; the config has been checked to fit."""
    # Parts of the model in its order are chunk-major: part = chunk * S + stage.
    stops = np.cumsum(layers_per_stage(model, pipeline, num_stages))
    groups = list(enumerate(block_groups(model)))
    runs = {}
    for number, (first, stop, period) in enumerate(model.layer_runs):
        held = np.diff(np.clip(stops, first, stop), prepend=first)
        here = [(f"group{i}", g) for i, g in groups if first <= g.first_layer < stop]
        unit = here[0][1].unit
        assert all(g.unit == unit[: len(g.unit)] for _, g in here), "a run repeats one pattern"
        units = -(-held // period)
        most = int(units.max())
        place_U = np.arange(most)
        index = np.minimum((np.cumsum(units) - units)[:, None] + place_U, units.sum() - 1)
        real = place_U[:, None] * period + np.arange(period) < held[:, None, None]
        shape = (pipeline.chunks, num_stages, most)
        runs[f"run{number}"] = Dealt(
            BlockGroup(first, unit, int(units.sum())),
            index.reshape(shape),
            real.reshape(*shape, period),
            tuple(name for name, _ in here),
        )
    return StageLayout(runs)


def by_run(layout: StageLayout, blocks: Any) -> dict[str, Any]:
    """What all leaves of a run share, such as shardings, from {"group0": ...}."""
    return {name: blocks[run.groups[0]] for name, run in layout.runs.items()}


def stack_stages(layout: StageLayout, blocks: Any) -> dict[str, Any]:
    """{"run0": {"block0": leaves [V, S, U, ...]}} from groups of leaves [layers, ...]."""

    def view(run: Dealt, *leaves: jax.Array) -> jax.Array:
        leaf = jnp.concatenate(leaves) if len(leaves) > 1 else leaves[0]
        if layout.contiguous:
            return leaf.reshape(*run.index_VSU.shape, *leaf.shape[1:])
        return leaf[np.minimum(run.index_VSU, len(leaf) - 1)]

    stages: dict[str, Any] = {}
    for name, run in layout.runs.items():
        stages[name] = {}
        for block in blocks[run.groups[0]]:
            parts = [blocks[group][block] for group in run.groups if block in blocks[group]]
            stages[name][block] = jax.tree.map(lambda *leaves, run=run: view(run, *leaves), *parts)
    return stages


def unstack_stages(layout: StageLayout, model: ModelConfig, stages: dict[str, Any]) -> Any:
    """The inverse of `stack_stages`: groups of leaves [layers, ...]; identity places are left."""
    sizes = {f"group{i}": group for i, group in enumerate(block_groups(model))}
    blocks: dict[str, Any] = {}
    for name, run in layout.runs.items():
        begin = [0] * len(run.unit.unit)
        for group in run.groups:
            blocks[group] = {}
            for place in range(len(sizes[group].unit)):
                rows = _rows(run, place)[begin[place] : begin[place] + sizes[group].repeat]
                begin[place] += sizes[group].repeat

                def pick(leaf: jax.Array, rows: np.ndarray = rows) -> jax.Array:
                    flat = leaf.reshape(-1, *leaf.shape[3:])
                    return flat if layout.contiguous else flat[rows]

                block = f"block{place}"
                blocks[group][block] = jax.tree.map(pick, stages[name][block])
    return blocks


def _rows(run: Dealt, place: int) -> np.ndarray:
    """Index in the flattened [V, S, U] of each layer at one place of the pattern, in order."""
    real = run.real_VSUP[..., place].reshape(-1)
    assert (np.diff(run.index_VSU.reshape(-1)[real]) > 0).all()
    return np.flatnonzero(real)
