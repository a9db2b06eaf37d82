"""Loss and gradients of a batch on a mesh with a pipeline axis.

From outside in: parameters seen by stage > region manual over data and pipeline > ticks
(mtjax.parallel.pipeline) > layers of one chunk (mtjax.parallel.stack). As without a pipeline,
gradients leave the region as partial sums and are reduced outside, once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.config import Config
from mtjax.layers.attention import BlockInputs
from mtjax.layers.dropout import row_keys
from mtjax.parallel.pipeline import (
    ChunkOutput,
    Gradients,
    Result,
    StagedModel,
    counted_once,
    pick,
    run_1f1b,
    run_forward,
)
from mtjax.parallel.schedule import Schedule, make_schedule
from mtjax.parallel.stack import (
    Extra,
    Params,
    Scanned,
    embed_tokens,
    output_head,
    rope_angles,
    run_mtp,
    run_units,
)
from mtjax.parallel.stages import (
    StageLayout,
    by_run,
    stack_stages,
    stage_layout,
    unstack_stages,
)
from mtjax.precision.product import (
    QuantizedKernel,
    Trained,
    carriers,
    is_trained,
    with_carriers,
)
from mtjax.sharding import axis_size, is_boxed, storage_shardings, sum_over_manual
from mtjax.training import routers
from mtjax.training.losses import LossSums, linear_cross_entropy, loss_config
from mtjax.training.mtp import MtpSums, with_mtp_loss
from mtjax.training.quantized import fitted, without_records
from mtjax.training.state import Setup

_pin = jax.lax.with_sharding_constraint

Sums = LossSums | routers.RoutedSums | MtpSums


def pipelined_sums(config: Config, setup: Setup, mesh: Mesh, params: Params, batch: Any) -> Sums:
    """Loss sums of a whole batch (`mtjax.training.step.StepInput`), for evaluation.

    `params` come from `mtjax.training.step.gather_params`, here and below.
    """

    def run(model: StagedModel, blocks: Any, shared: Any, batch: Any, scale: Any) -> Any:
        return run_forward(model, _schedule(config), blocks, shared, batch), None

    extra = _StepWide(None, jnp.float32(1), None)
    result, _ = _in_region(config, setup, mesh, params, batch, extra, run, with_gradients=False)
    return _whole_sums(config, result)


def pipelined_loss_and_gradients(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    params: Params,
    batch: Any,
    key: jax.Array | None,
    scale: jax.Array | float,
    router_scales: routers.RouterScales | None,
) -> tuple[Sums, Params, Any]:
    """What `mtjax.training.step.differentiate` returns, by the schedule of the config."""
    schedule = _schedule(config)

    def run(model: StagedModel, blocks: Any, shared: Any, batch: Any, scale: Any) -> Any:
        batch, active = batch._replace(active=None), batch.active
        if config.pipeline.schedule != "gpipe":
            return run_1f1b(model, schedule, blocks, shared, batch, scale, active)

        def scaled(trained: Gradients) -> tuple[jax.Array, Result]:
            params = with_carriers(blocks, trained.blocks)
            result = run_forward(model, schedule, params, trained.shared, batch, active)
            return (result.sums.total + result.loss) * scale, result

        gradients, result = jax.grad(scaled, has_aux=True)(Gradients(carriers(blocks), shared))
        return result, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

    extra = _StepWide(key, jnp.asarray(scale, jnp.float32), router_scales)
    result, gradients = _in_region(config, setup, mesh, params, batch, extra, run)
    stored = storage_shardings(setup.boxes, mesh)
    blocks = _from_stages(config, gradients.blocks, by_run(_layout(config), stored["blocks"]))
    gradients, records = without_records({**gradients.shared, "blocks": blocks})
    return _whole_sums(config, result), jax.tree.map(_pin, gradients, stored), records


def _whole_sums(config: Config, result: Result) -> Sums:
    """Sums of the whole model: with those of its routers, if it has any."""
    sums = result.sums
    if not config.model.moe.num_experts:
        return sums
    stats = unstack_stages(_layout(config), config.model, result.report)
    total = sums.total + result.loss
    if isinstance(sums, MtpSums):
        return sums._replace(total=total, router=stats | sums.router)
    return routers.RoutedSums(total, sums.cross_entropy, stats)


def _schedule(config: Config) -> Schedule:
    pipeline, train = config.pipeline, config.train
    return make_schedule(
        pipeline.schedule, config.mesh.pipeline, train.microbatches, pipeline.chunks
    )


def _layout(config: Config) -> StageLayout:
    return stage_layout(config.model, config.pipeline, config.mesh.pipeline)


class _StepWide(NamedTuple):
    """What is the same for all microbatches and stages; None in evaluation, but for the scale."""

    # Any: the same structure also holds partition specs.
    key: Any
    scale: Any
    router_scales: Any


def _in_region(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    params: Params,
    batch: Any,
    extra: _StepWide,
    run: Callable[..., tuple[Result, Gradients | None]],
    *,
    with_gradients: bool = True,
) -> tuple[Result, Any]:
    """`run` on each stage and data shard; its result and gradients, each added up."""
    shared = ("embed", "head") if batch.ahead is None else ("embed", "head", "mtp")
    boxes = {name: setup.boxes[name] for name in shared}
    names = jax.tree.map(lambda box: box.names, boxes, is_leaf=is_boxed)
    split = jax.tree.map(lambda box: "vocab" in box.names, boxes, is_leaf=is_boxed)
    layout = _layout(config)
    at_rest = storage_shardings(setup.boxes, mesh, axes=("pipeline",))

    def local(blocks: Any, shared: Any, batch: Any, extra: _StepWide) -> Any:
        blocks, batch = jax.tree.map(lambda leaf: leaf[:, 0], blocks), _only_active(batch)
        shared, rounded = carriers(shared), shared
        own_names = jax.tree.map(
            lambda node, leaf: Trained(leaf, (None, None)) if is_trained(node) else leaf,
            shared,
            names,
            is_leaf=is_trained,
        )
        model = _staged_model(config, layout, own_names, extra, rounded)
        if extra.router_scales is not None and _takes_loads_first(config):
            loads = _loads(config, model, blocks, shared, batch)
            model = _staged_model(config, layout, own_names, extra, rounded, loads)
        result, gradients = run(model, blocks, shared, batch, extra.scale)
        by_stage = functools.partial(jax.tree.map, lambda leaf: leaf[:, None])
        result = result._replace(report=by_stage(result.report))
        if gradients is not None:
            gradients = gradients._replace(blocks=by_stage(gradients.blocks))
        return jax.tree.map(lambda leaf: leaf[None], (result, gradients))

    data = "data" if axis_size("data") > 1 else None
    vocab = jax.tree.map(lambda s: P("pipeline") if s else P(), split)
    rows = jax.tree.map(lambda leaf: P(None, data) if leaf.ndim > 1 else P(), batch)
    results = jax.shard_map(
        local,
        in_specs=(P(None, "pipeline"), vocab, rows, P()),
        out_specs=_partial_specs(data, split if with_gradients else None),
        axis_names={"pipeline"} | ({data} if data else set()),
        check_vma=False,
    )(
        _to_stages(layout, params["blocks"], by_run(layout, at_rest["blocks"])),
        {name: params[name] for name in boxes},
        batch,
        extra,
    )
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), results)


def _partial_specs(data: str | None, split: Any) -> tuple[Result, Gradients | None]:
    """How partial sums leave the region, with a leading dim for what is yet to be added up.

    `split`: which shared leaves are split over the stages; None without gradients.
    """
    parts, by_stage = P((data, "pipeline") if data else "pipeline"), P(data, None, "pipeline")
    result = Result(P(data), parts, by_stage)
    if split is None:
        return result, None
    shared = jax.tree.map(lambda s: P(data, "pipeline") if s else parts, split)
    return result, Gradients(by_stage, shared)


def _takes_loads_first(config: Config) -> bool:
    return config.model.moe.balance_scope == "global" and config.train.microbatches > 1


class _Loads(NamedTuple):
    """Loads of routers over the whole batch."""

    layers: Any
    """[V, U, E] of this stage's."""
    modules: Any
    """[depth, E] of those of multi-token prediction, in the structure that `run_mtp` takes."""


def _loads(config: Config, model: StagedModel, blocks: Any, shared: Any, batch: Any) -> _Loads:
    """By a pass without gradients."""

    def of_modules(shared: Any, y_BTD: jax.Array, microbatch: Any) -> Any:
        return routers.loads(model.loss(shared, y_BTD, microbatch).router)

    no_loss = model._replace(loss=of_modules if batch.ahead is not None else lambda *_: {})
    batch = batch._replace(active=None)
    result = run_forward(no_loss, _schedule(config), blocks, shared, batch)
    found = _Loads(routers.loads(result.report), result.sums)
    return jax.tree.map(lambda load: sum_over_manual(load, "batch"), found)


def _to_stages(layout: StageLayout, blocks: Any, at_rest: Any) -> Any:
    """Blocks as [V, S, U, ...], each stage's where it runs.

    Where layers at rest are no even cut into stages, each device holds a piece of all layers: the
    layers are dealt out locally, then one all-to-all exchanges pieces for stages.
    """

    def place(sharding: NamedSharding, kernel: Any) -> Any:
        """Of an array, or of all that makes up a quantised kernel."""

        def one(leaf: jax.Array) -> jax.Array:
            rest, stage = (fitted(leaf, _stacked(sharding, moved)) for moved in (False, True))
            return _pin(_pin(leaf, rest), stage)

        return kernel.map_kernel(one) if isinstance(kernel, QuantizedKernel) else one(kernel)

    return jax.tree.map(place, at_rest, stack_stages(layout, blocks))


def _from_stages(config: Config, stages: Any, stored: Any) -> Any:
    """The way back, for gradients; summed over data where they are."""

    def place(leaf: Any, sharding: NamedSharding) -> Any:
        if is_trained(leaf):
            return Trained(place(leaf.carrier, sharding), leaf.record)
        return _pin(_pin(leaf, _stacked(sharding, True)), _stacked(sharding, False))

    placed = jax.tree.map(place, stages, stored, is_leaf=is_trained)
    return unstack_stages(_layout(config), config.model, placed)


def _stacked(sharding: NamedSharding, at_stage: bool) -> NamedSharding:
    """The sharding of a stored leaf [layers, ...], for [V, S, U, ...]."""
    layers, *others = sharding.spec
    if not at_stage:
        return NamedSharding(sharding.mesh, P(None, layers, None, *others))

    def without(entry: Any) -> Any:
        axes = (entry,) if isinstance(entry, str) else (entry or ())
        return tuple(axis for axis in axes if axis != "pipeline") or None

    return NamedSharding(sharding.mesh, P(None, "pipeline", None, *map(without, others)))


def _staged_model(
    config: Config,
    layout: StageLayout,
    shared_names: Any,
    extra: _StepWide,
    rounded: Any,
    loads: _Loads | None = None,
) -> StagedModel:
    """The parts of the model, for one stage; `rounded` holds the quantised kernels of shared
    parameters, which the parts get as what is differentiated."""
    model, train, key = config.model, config.train, extra.key
    # Tables are one stage's piece of the vocabulary; the loss knows the whole one.
    piece = model.with_vocab_shard(config.mesh.pipeline)
    stage = jax.lax.axis_index("pipeline")

    def keys(microbatch: Any) -> jax.Array | None:
        if key is None or not model.random_in_training:
            return None
        return row_keys(key, microbatch.rows)

    def embed(shared: Any, microbatch: Any) -> jax.Array:
        tokens, positions = microbatch.tokens, microbatch.positions
        return embed_tokens(piece, shared["embed"], tokens, positions, keys(microbatch))

    def inputs(microbatch: Any) -> BlockInputs:
        angles = rope_angles(model, microbatch.positions)
        return BlockInputs(angles, microbatch.segments, keys(microbatch), microbatch.counts)

    def chunk(params: Any, x_BTD: jax.Array, inputs: BlockInputs, index: jax.Array) -> ChunkOutput:
        own_loads = None if loads is None else pick(loads.layers, index)
        stats = {}
        for name, run in layout.runs.items():
            units_U = jnp.asarray(run.index_VSU)[index, stage]
            real_UP = jnp.asarray(run.real_VSUP)[index, stage] if run.padded else None
            run_loads = None if own_loads is None else own_loads[name]
            scanned = Scanned(params[name], units_U, real_UP, loads=run_loads)
            x_BTD, (_, stats[name]) = run_units(run.unit, train, scanned, x_BTD, inputs)
        return ChunkOutput(x_BTD, routers.router_loss(stats, extra.router_scales), stats)

    def embed_everywhere(*args: Any) -> jax.Array:
        """As the loss reads it: what the table gets of one cotangent is added up over stages."""
        return counted_once(embed_tokens(*args))

    def loss(shared: Any, y_BTD: jax.Array, microbatch: Any) -> Sums:
        shared = with_carriers(rounded, shared)
        h_BTD, table_VD = output_head(piece, shared, y_BTD)
        labels, weights = microbatch.labels, microbatch.weights
        sums: Any = linear_cross_entropy(loss_config(config), h_BTD, table_VD, labels, weights)
        if microbatch.ahead is None:
            return sums
        # As the output head, on all stages: they run in lockstep, and would wait for the last.
        tokens = [targets.tokens for targets in microbatch.ahead]
        known = None if loads is None else loads.modules
        more = Extra(microbatch.segments, keys(microbatch), microbatch.counts, known)
        at = microbatch.positions
        further, found = run_mtp(piece, train, shared, h_BTD, tokens, at, more, embed_everywhere)
        if model.moe.num_experts:
            sums = routers.with_router_losses(sums, {"mtp": found}, extra.router_scales)
        return with_mtp_loss(config, sums, further, table_VD, microbatch.ahead)

    return StagedModel(embed, inputs, chunk, loss, shared_names)


def _only_active(batch: Any) -> Any:
    """The batch with nothing that counts in microbatches that hold no data."""
    if batch.active is None:
        return batch
    active = jnp.arange(batch.weights.shape[0])[:, None, None] < batch.active
    counts = None if batch.counts is None else batch.counts & active
    return batch._replace(weights=jnp.where(active, batch.weights, 0.0), counts=counts)
