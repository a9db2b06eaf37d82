"""What a step reads and writes, and where each array of it lives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.config import Config
from mtjax.parallel.stack import Params, abstract_params, init_params
from mtjax.parallel.stages import stage_layout
from mtjax.sharding import (
    check_divisible,
    compute_shardings,
    is_boxed,
    storage_shardings,
    unbox,
)
from mtjax.training.delayed import Delayed, start_delayed
from mtjax.training.optimizer import make_optimizer


class LossScale(NamedTuple):
    """Dynamic loss scaling: the factor, and the good steps since it last changed."""

    factor: jax.Array
    good_steps: jax.Array


class TrainState(NamedTuple):
    """Everything that a resumed run needs beside the position in the data."""

    step: jax.Array
    """int32 scalar: optimizer steps done, skipped ones included."""
    params: Params
    """float32 masters."""
    opt_state: Any
    loss_scale: LossScale | None
    """Only with precision fp16."""
    delayed: Delayed | None = None
    """Only with precision fp8_delayed."""


def init_state(config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before step 0, a function of the seed and the config alone."""
    boxes = init_params(config.model, jax.random.key(config.train.seed))
    params = unbox(boxes)
    loss_scale = None
    if config.precision == "fp16":
        loss_scale = LossScale(jnp.float32(config.loss_scale.initial), jnp.int32(0))
    delayed = start_delayed(config, boxes) if config.precision == "fp8_delayed" else None
    return TrainState(jnp.int32(0), params, optimizer.init(params), loss_scale, delayed)


def state_shardings(mesh: Mesh, boxes: Params, abstract: TrainState) -> TrainState:
    """Sharding of every leaf of the state at rest.

    Optimizer moments live where their parameter does; what has another shape (counters, factored
    moments) is replicated.
    """
    stored = storage_shardings(boxes, mesh)
    by_path = {
        jax.tree_util.keystr(path): (sharding, leaf.shape)
        for (path, sharding), leaf in zip(
            jax.tree_util.tree_leaves_with_path(stored),
            jax.tree.leaves(unbox(boxes)),
            strict=True,
        )
    }
    replicated = NamedSharding(mesh, P())

    def one(path: Any, leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            sharding, shape = by_path.get(jax.tree_util.keystr(path[start:]), (None, None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return replicated

    opt_state = jax.tree_util.tree_map_with_path(one, abstract.opt_state)
    everything = jax.tree.map(lambda _: replicated, abstract)
    return everything._replace(params=stored, opt_state=opt_state)


def gathered_shardings(boxes: Params, mesh: Mesh) -> Params:
    """Sharding of every parameter once a step has gathered it.

    Blocks stay in pieces over the pipeline, which mtjax.training.pipelined takes to the stages.
    """
    blocks = storage_shardings(boxes["blocks"], mesh, axes=("pipeline",))
    return compute_shardings(boxes, mesh) | {"blocks": blocks}


class Setup(NamedTuple):
    """What the config and the mesh determine: optimizer, parameter boxes, state layout."""

    optimizer: optax.GradientTransformation
    boxes: Params
    abstract: TrainState
    """Shapes, dtypes and shardings of the state."""


def make_setup(config: Config, mesh: Mesh) -> Setup:
    """Lay out the state of `config` on `mesh` without computing anything.

    Raises:
        ValueError: the mesh does not split a parameter evenly.
    """
    with jax.set_mesh(mesh):
        boxes = abstract_params(config.model)
        optimizer = make_optimizer(config.optimizer, config.train.steps, boxes)
        boxes = _place_stages(config, boxes)
        check_divisible(boxes)
        shapes = jax.eval_shape(lambda: init_state(config, optimizer))
        shardings = state_shardings(mesh, boxes, shapes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return Setup(optimizer, boxes, abstract)


def _place_stages(config: Config, boxes: Params) -> Params:
    """Name the layers "stages" where an even cut of them gives each pipeline stage its own."""
    if config.mesh.pipeline == 1:
        return boxes
    if not stage_layout(config.model, config.pipeline, config.mesh.pipeline).contiguous:
        return boxes
    blocks = jax.tree.map(
        lambda box: box.replace(names=("stages", *box.names[1:])), boxes["blocks"], is_leaf=is_boxed
    )
    return boxes | {"blocks": blocks}


def create_state(config: Config, mesh: Mesh, setup: Setup) -> TrainState:
    """Compute the initial state, each array born in its place."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
    with jax.set_mesh(mesh):
        make = jax.jit(lambda: init_state(config, setup.optimizer), out_shardings=shardings)
        return make()
