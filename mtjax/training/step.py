"""One optimizer step, as a pure function of state and batch.

From outside in: jit > cast to the compute dtype and gather over data, once > region manual over
data > loop over microbatches > layers (mtjax.parallel.stack). Gradients leave the region as one
partial sum per data shard and are reduced once, under the layout of the optimizer state.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtjax.config import Config
from mtjax.layers.context import token_order
from mtjax.layers.dropout import row_keys
from mtjax.parallel.stack import Extra, Params, run_model, run_mtp
from mtjax.precision.product import carriers, with_carriers
from mtjax.sharding import (
    axis_size,
    compute_dtypes,
    shard,
    spec,
    storage_shardings,
    sum_over_manual,
)
from mtjax.training import routers
from mtjax.training.delayed import Delayed, delayed_scales, moved_on, saturated_layers
from mtjax.training.losses import LossSums, linear_cross_entropy, loss_config
from mtjax.training.mtp import MtpSums, targets_ahead, with_mtp_loss
from mtjax.training.optimizer import make_schedule
from mtjax.training.pipelined import pipelined_loss_and_gradients, pipelined_sums
from mtjax.training.precision_metrics import precision_metrics
from mtjax.training.quantized import (
    join_segments,
    quantize_blocks,
    quantize_modules,
    without_records,
)
from mtjax.training.state import LossScale, Setup, TrainState, gathered_shardings

COMPUTE_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

Metrics = dict[str, jax.Array]


class StepInput(NamedTuple):
    """A batch on the devices; fields [M, B, T], `rows` [M, B], as in `mtjax.data.batch.Batch`.

    `segments` is None where documents of a sequence see each other; `active` is the number of
    microbatches that hold data, None for all (a batch ramp makes it vary without recompiling).
    `counts` and `ahead` are for the step itself: bool [M, B, T] of a model with experts, see
    `_with_counts`; `mtjax.training.mtp.Ahead` of each module, None in evaluation.
    """

    # Any: the same structure also holds partition specs and abstract arrays.
    tokens: Any
    labels: Any
    weights: Any
    positions: Any
    segments: Any
    rows: Any
    active: Any
    counts: Any = None
    ahead: Any = None


def batch_specs(config: Config) -> StepInput:
    """Partition specs of a step's input in the current mesh."""
    tokens = spec(None, "batch", "seq")
    segments = tokens if config.data.separate_documents else None
    active = P() if config.train.batch_ramp.start else None
    return StepInput(tokens, tokens, tokens, tokens, segments, spec(None, "batch"), active)


def abstract_batch(config: Config, mesh: Mesh) -> StepInput:
    """Shapes, dtypes and shardings of a step's input."""
    train = config.train
    shape = (train.microbatches, train.batch_size // train.microbatches, train.seq_len)
    with jax.set_mesh(mesh):
        specs = batch_specs(config)

    def one(partition: P | None, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        if partition is None:
            return None
        sharding = jax.sharding.NamedSharding(mesh, partition)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return StepInput(
        tokens=one(specs.tokens, shape),
        labels=one(specs.labels, shape),
        weights=one(specs.weights, shape, jnp.float32),
        positions=one(specs.positions, shape),
        segments=one(specs.segments, shape),
        rows=one(specs.rows, shape[:2]),
        active=one(specs.active, ()),
    )


Sums = Any
"""LossSums, routers.RoutedSums with experts, MtpSums with multi-token prediction: `total` and
`cross_entropy` are common."""


class RouterInput(NamedTuple):
    """What router losses need to know of the whole batch; see `routers.RouterScales` and Extra."""

    scales: routers.RouterScales
    loads: Any = None


def batch_loss(
    config: Config,
    params: Params,
    batch: StepInput,
    key: jax.Array | None,
    router: RouterInput | None = None,
) -> Sums:
    """Sums of one microbatch ([B, T] fields): the oracle of every parallel form of the step.

    `key` is the step's dropout key; None is evaluation. Without `router` no router losses count.
    """
    loads = None if router is None else router.loads
    h_BTD, table_VD, stats, further = _hidden(config, params, batch, key, loads)
    sums: Sums = linear_cross_entropy(
        loss_config(config), h_BTD, table_VD, batch.labels, batch.weights
    )
    if config.model.moe.num_experts:
        scales = None if router is None else router.scales
        sums = routers.with_router_losses(sums, stats, scales)
    if batch.ahead is None:
        return sums
    return with_mtp_loss(config, sums, further, table_VD, batch.ahead)


def _hidden(
    config: Config, params: Params, batch: StepInput, key: jax.Array | None, loads: Any
) -> tuple[jax.Array, jax.Array, Any, list[jax.Array]]:
    """Final hidden states, output table and router statistics of one microbatch; and the hidden
    states of further tokens, where the batch says what these are."""
    model = config.model
    keys_B = row_keys(key, batch.rows) if key is not None and model.random_in_training else None
    extra = Extra(batch.segments, keys_B, batch.counts, loads)
    h_BTD, table_VD, _, stats = run_model(
        model, config.train, params, batch.tokens, batch.positions, extra
    )
    if batch.ahead is None:
        return h_BTD, table_VD, stats, []
    tokens = [targets.tokens for targets in batch.ahead]
    further, found = run_mtp(model, config.train, params, h_BTD, tokens, batch.positions, extra)
    return h_BTD, table_VD, stats | {"mtp": found}, further


def gather_params(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    params: Params,
    delayed: Delayed | None = None,
    *,
    recorded: bool = False,
) -> Params:
    """Cast or round masters to what layers use, then gather over data: one all-gather per leaf.

    `delayed` gives scales; None: all come from the values at hand. `recorded`: with room for the
    records that the config asks for.
    """
    pin = jax.lax.with_sharding_constraint
    stored, used = storage_shardings(setup.boxes, mesh), gathered_shardings(setup.boxes, mesh)
    computed = jax.tree.map(
        lambda p, dtype, stored, used: pin(pin(p.astype(dtype), stored), used),
        params,
        compute_dtypes(setup.boxes, COMPUTE_DTYPES[config.compute_dtype]),
        stored,
        used,
    )
    if config.quantized:
        scales = delayed_scales(config, setup.boxes, delayed)
        trees = (setup.boxes, params, computed, stored, used, scales)
        for part, quantize in (("blocks", quantize_blocks), ("mtp", quantize_modules)):
            if part in params:
                own = (tree[part] for tree in trees)
                computed[part] = quantize(config, *own, recorded=recorded)
    return computed


def _with_counts(config: Config, batch: StepInput) -> StepInput:
    """The batch with what experts take for padding, which depends on the order of the tokens."""
    if not config.model.moe.num_experts:
        return batch
    return batch._replace(counts=routers.counted(batch.weights, batch.segments))


def in_exchange_order(config: Config, batch: StepInput) -> StepInput:
    """The batch with the tokens of each row in the order that attention exchanges them in.

    Decided here, once per step, so that data and checkpoints know nothing of it. Everything that
    belongs to a token moves with it.
    """
    order_T = token_order(config.model, batch.tokens.shape[-1])
    if order_T is None:
        return batch

    def reorder(x_MBT: jax.Array) -> jax.Array:
        # A few bytes per token: gathered whole, where indexing a split dim would be summed up.
        return shard(shard(x_MBT, None, "batch", None)[:, :, order_T], None, "batch", "seq")

    names = ("tokens", "labels", "weights", "positions", "segments", "counts", "ahead")
    moved = {name: jax.tree.map(reorder, getattr(batch, name)) for name in names}
    return batch._replace(**moved)


def loss_and_gradients(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    params: Params,
    batch: StepInput,
    key: jax.Array | None,
    scale: jax.Array | float,
) -> tuple[Sums, Params]:
    """Loss sums of the whole batch, and `scale` times the gradient of their total, in float32.

    `scale` is 1 / global weight, times the loss scale in fp16: applied before the backward pass,
    so that half-precision cotangents stay in range. Gradients have the layout of the state.
    """
    return differentiate(config, setup, mesh, params, batch, key, scale)[:2]


def differentiate(
    config: Config,
    setup: Setup,
    mesh: Mesh,
    params: Params,
    batch: StepInput,
    key: jax.Array | None,
    scale: jax.Array | float,
    delayed: Delayed | None = None,
) -> tuple[Sums, Params, Any]:
    """As `loss_and_gradients`, and the records of what was rounded: a tree like the parameters,
    None where nobody asks for one. `delayed` as in `gather_params`."""
    computed = gather_params(config, setup, mesh, params, delayed, recorded=True)
    if config.model.mtp.depth:
        batch = batch._replace(ahead=targets_ahead(config, batch))
    scales = None
    if config.model.moe.num_experts:
        size = routers.batch_size(batch.weights, batch.segments, batch.active)
        scales = routers.router_scales(config.model.moe, size)
    batch = in_exchange_order(config, _with_counts(config, batch))
    if axis_size("pipeline") > 1:
        return pipelined_loss_and_gradients(
            config, setup, mesh, computed, batch, key, scale, scales
        )
    manual = axis_size("data") > 1

    def local(computed: Params, batch: StepInput, key: Any, scale: Any, scales: Any) -> Any:
        sums, gradients = _accumulate(config, computed, batch, key, scale, scales)
        if not manual:
            return sums, gradients
        return jax.tree.map(lambda x: x[None], (sums, gradients))

    if not manual:
        sums, gradients = local(computed, batch, key, scale, scales)
    else:
        rows = jax.tree.map(lambda leaf: P(None, "data") if leaf.ndim > 1 else P(), batch)
        sums, gradients = jax.shard_map(
            local,
            in_specs=(P(), rows, P(), P(), P()),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )(computed, batch, key, jnp.asarray(scale, jnp.float32), scales)
        sums, gradients = jax.tree.map(lambda x: jnp.sum(x, axis=0), (sums, gradients))
    gradients["blocks"] = join_segments(gradients["blocks"])
    gradients, records = without_records(gradients)
    stored = storage_shardings(setup.boxes, mesh)
    return sums, jax.tree.map(jax.lax.with_sharding_constraint, gradients, stored), records


def evaluation_loss(
    config: Config, setup: Setup, mesh: Mesh, params: Params, batch: StepInput
) -> jax.Array:
    """Sum of the cross entropy over the whole batch, every microbatch of it, without dropout."""
    return evaluation_sums(config, setup, mesh, params, batch).cross_entropy


def evaluation_sums(
    config: Config, setup: Setup, mesh: Mesh, params: Params, batch: StepInput
) -> Sums:
    """As `evaluation_loss`, with what routers did."""
    computed = gather_params(config, setup, mesh, params)
    batch = in_exchange_order(config, _with_counts(config, batch._replace(active=None)))
    if axis_size("pipeline") > 1:
        return pipelined_sums(config, setup, mesh, computed, batch)

    def one(_: None, microbatch: StepInput) -> tuple[None, Sums]:
        return None, batch_loss(config, computed, microbatch, None)

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.scan(one, None, batch)[1])


def _accumulate(
    config: Config, computed: Params, batch: StepInput, key: Any, scale: Any, scales: Any
) -> tuple[Sums, Params]:
    """Loss sums and scaled float32 gradients over the microbatches of this data shard."""
    router = None if scales is None else RouterInput(scales)
    num = batch.tokens.shape[0]
    moe = config.model.moe
    if router is not None and moe.balance_scope == "global" and num > 1:
        router = router._replace(loads=_loads(config, computed, batch, key))

    def one(microbatch: StepInput) -> tuple[Sums, Params]:
        def scaled(trained: Params) -> tuple[jax.Array, Sums]:
            params = with_carriers(computed, trained)
            sums = batch_loss(config, params, microbatch, key, router)
            return sums.total * scale, sums

        gradients, sums = jax.grad(scaled, has_aux=True)(carriers(computed))
        return sums, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

    if num == 1:
        return one(_microbatch(batch, 0))
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), carriers(computed))
    nothing: Sums = LossSums(jnp.float32(0), jnp.float32(0))
    if moe.num_experts:
        nothing = routers.RoutedSums(
            nothing.total, nothing.cross_entropy, routers.zero_stats(config.model)
        )
    if batch.ahead is not None:
        zero, router_stats = jnp.float32(0), getattr(nothing, "router", None)
        nothing = MtpSums(zero, zero, zero, router_stats)
    return _sum_over_microbatches(batch, one, (nothing, zeros))


def _loads(config: Config, computed: Params, batch: StepInput, key: Any) -> Any:
    """Loads of the whole batch, over all data shards, by a forward pass without gradients."""

    def one(microbatch: StepInput) -> Any:
        return routers.loads(_hidden(config, computed, microbatch, key, None)[2])

    found = _sum_over_microbatches(batch, one, routers.loads(routers.zero_stats(config.model)))
    return jax.tree.map(lambda load: sum_over_manual(load, "batch"), found)


def _sum_over_microbatches(batch: StepInput, one: Callable[[StepInput], Any], start: Any) -> Any:
    """Sum of `one` over the microbatches that hold data."""

    def body(index: jax.Array, carry: Any) -> Any:
        return jax.tree.map(jnp.add, carry, one(_microbatch(batch, index)))

    num = batch.tokens.shape[0]
    return jax.lax.fori_loop(0, num if batch.active is None else batch.active, body, start)


def _microbatch(batch: StepInput, index: Any) -> StepInput:
    arrays = batch._replace(active=None)
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), arrays)


class Limits(NamedTuple):
    """Loss and gradient norm above which a step is a spike; infinity where none is known."""

    loss: Any
    grad_norm: Any


TrainStep = Callable[[TrainState, StepInput, Limits], tuple[TrainState, Metrics]]


def make_train_step(config: Config, mesh: Mesh, setup: Setup) -> TrainStep:
    """The step to jit with a donated state; trace it under `jax.set_mesh(mesh)`.

    A step whose loss or gradient norm is not finite, or above its limit, leaves parameters and
    moments untouched; `train/skipped` says so, and the loop decides what follows.
    """
    schedule = make_schedule(config.optimizer, config.train.steps)
    moe = config.model.moe

    def train_step(
        state: TrainState, batch: StepInput, limits: Limits
    ) -> tuple[TrainState, Metrics]:
        key = dropout_key(config, state.step)
        weight = jnp.sum(batch.weights)
        factor = 1.0 if state.loss_scale is None else state.loss_scale.factor
        # A batch without a single weighted token has zero loss and zero gradients.
        per_token = 1.0 / jnp.maximum(weight, 1e-6)
        sums, gradients, records = differentiate(
            config, setup, mesh, state.params, batch, key, per_token * factor, state.delayed
        )
        if state.loss_scale is not None:
            gradients = jax.tree.map(lambda g: g / factor, gradients)
        norm = optax.global_norm(gradients)
        loss = sums.total * per_token
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        good = finite & (loss <= limits.loss) & (norm <= limits.grad_norm)
        new_state = _apply(config, setup, state, gradients, norm)
        if moe.bias_update_rate:
            moved = routers.move_score_biases(moe, new_state.params, sums.router)
            new_state = new_state._replace(params=moved)
        if state.delayed is not None:
            new_state = new_state._replace(delayed=moved_on(config, state.delayed, records))
        new_state = jax.tree.map(functools.partial(jnp.where, good), new_state, state)
        new_state = new_state._replace(
            step=state.step + 1, loss_scale=_next_scale(config, state.loss_scale, finite)
        )
        metrics = {
            "train/loss": loss,
            "train/cross_entropy": sums.cross_entropy * per_token,
            "train/grad_norm": norm,
            "train/learning_rate": schedule(state.step),
            "train/weight": weight,
            "train/skipped": 1.0 - good.astype(jnp.float32),
        }
        if state.loss_scale is not None:
            metrics["train/loss_scale"] = factor
        if config.model.mtp.depth:
            metrics["train/mtp_loss"] = sums.mtp * per_token
        if moe.num_experts:
            size = routers.batch_size(batch.weights, batch.segments, batch.active)
            metrics |= routers.router_metrics(moe, sums.router, size)
        if moe.score_bias:
            metrics |= routers.bias_metrics(new_state.params, sums.router)
        if config.quantize.fallback_ratio:
            metrics["quantize/saturated_layers"] = saturated_layers(config, new_state.delayed)
        if config.quantize.statistics:
            metrics |= precision_metrics(config, setup.boxes, records, state.delayed)
        return new_state, metrics

    return train_step


class JittedStep(NamedTuple):
    """The train step under jax.jit, and the abstract arguments that it is compiled for."""

    fn: Any
    args: tuple[TrainState, StepInput, Limits]


def jit_train_step(config: Config, mesh: Mesh, setup: Setup) -> JittedStep:
    """The step as training runs it, with a donated state; lower it under `jax.set_mesh(mesh)`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return JittedStep(
        jax.jit(
            make_train_step(config, mesh, setup), donate_argnums=0, out_shardings=(shardings, None)
        ),
        (setup.abstract, abstract_batch(config, mesh), Limits(scalar, scalar)),
    )


def dropout_key(config: Config, step: jax.Array | int) -> jax.Array:
    """Key of a step's dropout masks, a function of seed and step alone."""
    key = jax.random.key(config.train.seed, impl="threefry2x32")
    return jax.random.fold_in(key, step)


def _apply(
    config: Config, setup: Setup, state: TrainState, gradients: Params, norm: jax.Array
) -> TrainState:
    """Clip, update moments, move the masters."""
    clip = config.optimizer.clip_norm
    if clip is not None:
        shrink = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * shrink, gradients)
    updates, opt_state = setup.optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state)


def _next_scale(config: Config, scale: LossScale | None, finite: jax.Array) -> LossScale | None:
    """Halve on an overflow; double after enough good steps in a row."""
    if scale is None:
        return None
    settings = config.loss_scale
    good_steps = jnp.where(finite, scale.good_steps + 1, 0)
    grow = good_steps >= settings.growth_interval
    factor = jnp.where(finite, scale.factor, jnp.maximum(scale.factor / 2, settings.minimum))
    return LossScale(jnp.where(grow, factor * 2, factor), jnp.where(grow, 0, good_steps))
