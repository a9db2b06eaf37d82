"""Runs a model's stages over the mesh axis `pipeline`, forward and backward, in one program.

Everything here runs inside a region that is manual over `pipeline`: arrays are what one stage
holds, and `shard` and `local_map` still split them over the axes that are automatic. All stages
run in lockstep, by the table of mtjax.parallel.schedule. `shared` parameters are those of
embedding and loss, whose vocabulary is split over the stages: all stages look the tokens up that
the first one needs, and share the loss of what leaves the last one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.parallel.schedule import IDLE, Pass, Phase, Schedule
from mtjax.precision.product import carriers, recorded_where, with_carriers
from mtjax.sharding import axis_size, local_map, shard

AXIS = "pipeline"
_STREAM = ("batch", "seq_sp", None)


class StagedModel(NamedTuple):
    """A model in the parts that are run apart. A microbatch is one slice of the batch's fields."""

    embed: Callable[[Any, Any], jax.Array]
    """(shared, microbatch) -> x [B, T, D]."""
    inputs: Callable[[Any], Any]
    """(microbatch) -> what every block reads beside x."""
    chunk: Callable[[Any, jax.Array, Any, jax.Array], "ChunkOutput"]
    """(parameters of a chunk, x, inputs, index of the chunk) -> what leaves it."""
    loss: Callable[[Any, jax.Array, Any], Any]
    """(shared, y, microbatch) -> tree of sums; the first leaf is what is minimised."""
    shared_names: Any
    """Tree like shared: logical dims of each leaf. Those with "vocab" are split over the stages."""


class ChunkOutput(NamedTuple):
    """What a chunk makes of one microbatch."""

    y_BTD: jax.Array
    loss: jax.Array
    """Float32: what its layers add to what is minimised."""
    report: Any
    """Float32 sums that tell what its layers did; without gradients."""


class Result(NamedTuple):
    """Sums over all microbatches."""

    # Any: the same structure also holds partition specs.
    sums: Any
    """Of StagedModel.loss; the same on all stages."""
    loss: Any
    """Of ChunkOutput.loss, over the chunks of this stage."""
    report: Any
    """Of ChunkOutput.report, [V, ...]."""


def pick(tree: Any, index: jax.Array) -> Any:
    """Slice `index` of every leaf's first dim; an idle stage's index picks the first."""
    index = jnp.maximum(index, 0)
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


@jax.custom_vjp
def from_last_stage(x_BTD: jax.Array) -> jax.Array:
    """What the last stage holds, on all stages. Its cotangent is the whole one, on each."""
    held_BTD = _keep_on_last(x_BTD)
    # Fully manual: a half-precision sum in a partly manual region aborts the compiler on CPU.
    return local_map(lambda x: jax.lax.psum(x, AXIS), [_STREAM], _STREAM)(held_BTD)


@jax.custom_vjp
def counted_once(leaf: jax.Array) -> jax.Array:
    """A replicated parameter whose gradient, the same on all stages, is kept by the last alone."""
    return leaf


def _keep_on_last(x: jax.Array) -> jax.Array:
    last = jax.lax.axis_index(AXIS) == axis_size(AXIS) - 1
    return jnp.where(last, x, jnp.zeros((), x.dtype))


from_last_stage.defvjp(lambda x: (from_last_stage(x), None), lambda _, d: (_keep_on_last(d),))
counted_once.defvjp(lambda leaf: (leaf, None), lambda _, d: (_keep_on_last(d),))


def _loss(model: StagedModel, shared: Any, y_BTD: jax.Array, microbatch: Any) -> Any:
    """Loss sums, on all stages, of what the last stage holds.

    The gradients of `shared` are parts, to be summed over the stages where leaves are replicated.
    """
    shared = jax.tree.map(
        lambda leaf, names: leaf if "vocab" in names else counted_once(leaf),
        shared,
        model.shared_names,
    )
    return model.loss(shared, from_last_stage(y_BTD), microbatch)


def _next_stage(x: jax.Array, step: int) -> jax.Array:
    """Send to the next stage (step 1) or the one before (-1), in a ring."""
    S = axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(s, (s + step) % S) for s in range(S)])


def run_forward(
    model: StagedModel,
    schedule: Schedule,
    blocks: Any,
    shared: Any,
    batch: Any,
    num_active: jax.Array | None = None,
) -> Result:
    """All microbatches forward, of which `num_active` hold data; differentiated, this is GPipe.

    `blocks` leaves are [V, U, ...], `batch` leaves [M, ...]. What a stage is to minimise is the
    loss of the whole model and its own chunks' (`sums` first leaf + `loss`). Made to be
    differentiated with one chunk per stage: of several, each tick would keep its weights.
    """
    ticks = _Ticks(model, schedule, blocks, shared, batch)
    ticks.num_active = num_active
    # Its residuals are gradients of the whole table: made again in the backward pass instead.
    loss = jax.checkpoint(lambda *args: _loss(model, *args), prevent_cse=False)

    def tick(carry: Any, t: jax.Array) -> Any:
        incoming_BTD, (sums, chunk_loss, report) = carry
        chunk, microbatch, _ = ticks.own(schedule.forward, t)
        params, inputs = ticks.known(chunk, microbatch)
        params = recorded_where(chunk >= 0, params)
        x_BTD = ticks.enter(t, incoming_BTD)
        y_BTD, new_loss, new = model.chunk(params, x_BTD, inputs, jnp.maximum(chunk, 0))
        chunk_loss += jnp.where(chunk >= 0, new_loss, 0.0)
        report = ticks.add_chunk(report, jax.lax.stop_gradient(new), chunk)
        chunk, microbatch, _ = ticks.of_stage(schedule.num_stages - 1, schedule.forward, t)
        leaves = chunk == schedule.num_chunks - 1
        data = pick(batch, microbatch)
        own = recorded_where(leaves, shared)
        new = ticks.where_needed(leaves, lambda: loss(own, y_BTD, data), _pin_scalars)
        sums = jax.tree.map(lambda a, b: a + jnp.where(leaves, b, 0), sums, new)
        return (_next_stage(y_BTD, 1), Result(sums, chunk_loss, report)), None

    num_ticks = int(np.max(np.nonzero(schedule.forward.microbatch != IDLE)[0])) + 1
    return jax.lax.scan(tick, ticks.zeros(), jnp.arange(num_ticks))[0][1]


class _Ticks:
    """What a tick looks up, in arrays that are the same in all ticks."""

    num_active: jax.Array | None = None
    """Microbatches from this one on are left out."""

    def __init__(
        self, model: StagedModel, schedule: Schedule, blocks: Any, shared: Any, batch: Any
    ) -> None:
        self.model, self.schedule = model, schedule
        self.blocks, self.shared, self.batch = blocks, shared, batch
        self.stage = jax.lax.axis_index(AXIS)

    def zeros(self) -> tuple[jax.Array, Result]:
        """A residual stream [B, T, D] and a result, all zero."""
        index = jnp.int32(0)
        first = pick(self.batch, index)
        x_BTD = jnp.zeros_like(self.model.embed(self.shared, first))
        params, inputs = self.known(index, index)
        report = jax.eval_shape(self.model.chunk, params, x_BTD, inputs, index).report
        chunks = self.schedule.num_chunks
        return x_BTD, Result(
            _zeros(jax.eval_shape(self.model.loss, self.shared, x_BTD, first)),
            jnp.float32(0),
            jax.tree.map(lambda a: jnp.zeros((chunks, *a.shape), a.dtype), report),
        )

    def own(self, direction: Pass, t: jax.Array) -> tuple[jax.Array, ...]:
        """Chunk, microbatch and slot of this stage at a tick."""
        return self.of_stage(self.stage, direction, t)

    def of_stage(self, stage: Any, direction: Pass, t: jax.Array) -> tuple[jax.Array, ...]:
        """Those of any stage; of a fixed one they are known to all."""
        chunk, microbatch, slot = (jnp.asarray(table)[t, stage] for table in direction)
        if self.num_active is not None:
            idle = microbatch >= self.num_active
            chunk, microbatch = (jnp.where(idle, IDLE, item) for item in (chunk, microbatch))
        return chunk, microbatch, slot

    def known(self, chunk: jax.Array, microbatch: jax.Array) -> tuple[Any, Any]:
        """Parameters of a chunk and inputs of a microbatch."""
        if self.schedule.num_chunks == 1:
            params = jax.tree.map(lambda leaf: leaf[0], self.blocks)
        else:
            params = pick(self.blocks, chunk)
        return params, self.model.inputs(pick(self.batch, microbatch))

    def enter(self, t: jax.Array, incoming_BTD: jax.Array) -> jax.Array:
        """Input of this stage's chunk: embedded tokens where the model begins, or what came in."""
        first_chunk, microbatch, _ = self.of_stage(0, self.schedule.forward, t)
        embedded_BTD = self.where_needed(
            first_chunk == 0,
            lambda: self.model.embed(self.shared, pick(self.batch, microbatch)),
            _pin_stream,
        )
        begins = (self.stage == 0) & (first_chunk == 0)
        return jnp.where(begins, embedded_BTD, incoming_BTD)

    def add_chunk(self, total: Any, new: Any, chunk: jax.Array) -> Any:
        """Add the new [...] of one chunk to totals [V, ...]; what an idle stage has is garbage."""
        index = jnp.maximum(chunk, 0)

        def one(total: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(chunk >= 0, new.astype(jnp.float32), 0.0)
            if self.schedule.num_chunks == 1:
                return total + new[None]
            old = jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(total, old + new, index, 0)

        return jax.tree.map(one, total, new)

    def where_needed(
        self, needed: jax.Array, compute: Callable[[], Any], pin: Callable[[Any], Any]
    ) -> Any:
        """The result, or zeros where all stages know that nobody needs it.

        With one chunk it is needed at nearly every tick, and a condition would only cost. `pin`
        lays the result out, or XLA refuses branches that it has laid out differently.
        """
        if self.schedule.num_chunks == 1:
            return compute()
        shapes = jax.eval_shape(compute)
        return jax.lax.cond(needed, lambda: pin(compute()), lambda: pin(_zeros(shapes)))


def _pin_scalars(sums: Any) -> Any:
    return jax.tree.map(shard, sums)


def _pin_stream(x_BTD: jax.Array) -> jax.Array:
    return shard(x_BTD, *_STREAM)


class Gradients(NamedTuple):
    """Float32 sums over the microbatches; of replicated shared leaves, the part of one stage."""

    blocks: Any
    shared: Any


class _Carry(NamedTuple):
    """What goes from tick to tick."""

    x_BTD: jax.Array
    """From the stage before."""
    dy_BTD: jax.Array
    """From the stage behind."""
    saved: list[jax.Array]
    """Activations for the backward pass, [slots, ...] each."""
    result: Result
    gradients: Gradients


def run_1f1b(
    model: StagedModel,
    schedule: Schedule,
    blocks: Any,
    shared: Any,
    batch: Any,
    scale: jax.Array | float,
    num_active: jax.Array | None = None,
) -> tuple[Result, Gradients]:
    """`run_forward` and `scale` times the gradients of all losses, by 1F1B or interleaved 1F1B.

    `blocks` leaves are [V, U, ...], `batch` leaves [M, ...]. With `num_active`, microbatches from
    that one on hold no data (zero weights) and the ticks for them are left out.
    """
    executor = _Executor(model, schedule, blocks, shared, batch)
    carry = executor.start(scale, num_active)
    for phase in schedule.phases:
        begin, end = _bounds(schedule, phase, num_active)

        def tick(t: jax.Array, carry: _Carry, phase: Phase = phase) -> _Carry:
            return executor.tick(phase, t, carry)

        carry = jax.lax.fori_loop(begin, end, tick, carry)
    return carry.result, carry.gradients


def _bounds(schedule: Schedule, phase: Phase, num_active: jax.Array | None) -> tuple[Any, Any]:
    """First and last tick of a phase, without those of microbatches that hold no data.

    A stage's passes are in order and without a gap, so fewer microbatches are a beginning of each.
    """
    if num_active is None:
        return phase.begin, phase.end
    group = schedule.num_stages if schedule.num_chunks > 1 else 1
    active = jnp.minimum(-(-num_active // group) * group, schedule.num_microbatches)
    left_out = (schedule.num_microbatches - active) * schedule.num_chunks
    return phase.begin - (0 if phase.forward else left_out), phase.end - (
        left_out if phase.backward else 0
    )


class _Executor(_Ticks):
    """The two directions of a tick.

    A chunk's backward pass is a tree of arrays (`jax.vjp`). Its structure, and which of its arrays
    are known anyway, are the same in all ticks; `start` finds them out.
    """

    def start(self, scale: jax.Array | float, num_active: jax.Array | None) -> _Carry:
        """Nothing sent, nothing saved, all sums zero."""
        self.scale, self.num_active = scale, num_active
        x_BTD, result = self.zeros()
        saved = jax.eval_shape(lambda x: self._chunk_vjp(x, jnp.int32(0), jnp.int32(0))[1], x_BTD)
        slots = self.schedule.num_slots
        return _Carry(
            x_BTD,
            x_BTD,
            [jnp.zeros((slots, *a.shape), a.dtype) for a in saved],
            result,
            Gradients(_zeros(carriers(self.blocks), jnp.float32), _zeros(self.shared, jnp.float32)),
        )

    def tick(self, phase: Phase, t: jax.Array, carry: _Carry) -> _Carry:
        """One forward and one backward pass, as far as the phase has them.

        The last stage goes backward for what it has just brought forward, so only phases with both
        have a loss.
        """
        y_BTD = last_dy_BTD = carry.x_BTD
        if phase.forward:
            y_BTD, carry = self._forward(t, carry)
        if phase.forward and phase.backward:
            last_dy_BTD, carry = self._loss(t, y_BTD, carry)
        if phase.backward:
            dx_BTD, carry = self._backward(t, last_dy_BTD, carry)
            carry = carry._replace(dy_BTD=_next_stage(dx_BTD, -1))
        if phase.forward:
            carry = carry._replace(x_BTD=_next_stage(y_BTD, 1))
        return carry

    def _forward(self, t: jax.Array, carry: _Carry) -> tuple[jax.Array, _Carry]:
        chunk, microbatch, slot = self.own(self.schedule.forward, t)
        x_BTD = self.enter(t, carry.x_BTD)
        out, saved = self._chunk_vjp(x_BTD, chunk, microbatch)
        result = carry.result
        result = result._replace(
            loss=result.loss + jnp.where(chunk >= 0, out.loss, 0.0),
            report=self.add_chunk(result.report, out.report, chunk),
        )
        buffers = [
            jax.lax.dynamic_update_index_in_dim(buffer, new, slot, 0)
            for buffer, new in zip(carry.saved, saved, strict=True)
        ]
        return out.y_BTD, carry._replace(saved=buffers, result=result)

    def _loss(self, t: jax.Array, y_BTD: jax.Array, carry: _Carry) -> tuple[jax.Array, _Carry]:
        """Add what leaves the last stage to sums and gradients; its own cotangent [B, T, D]."""
        last = self.schedule.num_stages - 1
        chunk, microbatch, _ = self.of_stage(last, self.schedule.forward, t)
        data = pick(self.batch, microbatch)

        def compute() -> Any:
            sums, vjp = jax.vjp(lambda s, y: _loss(self.model, s, y, data), self.shared, y_BTD)
            leaves, tree = jax.tree.flatten(jax.tree.map(jnp.zeros_like, sums))
            leaves[0] = jnp.asarray(self.scale, leaves[0].dtype)
            return sums, vjp(jax.tree.unflatten(tree, leaves))

        needed = chunk == self.schedule.num_chunks - 1
        sums, (shared, dy_BTD) = self.where_needed(
            needed,
            compute,
            lambda r: (_pin_scalars(r[0]), (self._pin_shared(r[1][0]), _pin_stream(r[1][1]))),
        )
        gradients = carry.gradients._replace(shared=_add(carry.gradients.shared, shared))
        sums = jax.tree.map(jnp.add, carry.result.sums, sums)
        return dy_BTD, carry._replace(result=carry.result._replace(sums=sums), gradients=gradients)

    def _backward(
        self, t: jax.Array, last_dy_BTD: jax.Array, carry: _Carry
    ) -> tuple[jax.Array, _Carry]:
        chunk, microbatch, slot = self.own(self.schedule.backward, t)
        from_loss = (self.stage == self.schedule.num_stages - 1) & (
            chunk == self.schedule.num_chunks - 1
        )
        dy_BTD = jnp.where(from_loss, last_dy_BTD, carry.dy_BTD)
        saved = pick(carry.saved, slot)
        cotangents = dy_BTD, jnp.asarray(self.scale, jnp.float32)
        dchunk, dx_BTD = self._saved_vjp(saved, chunk, microbatch)(cotangents)
        blocks = self.add_chunk(carry.gradients.blocks, dchunk, chunk)

        first_chunk, first_microbatch, _ = self.of_stage(0, self.schedule.backward, t)
        data = pick(self.batch, first_microbatch)
        first_dx_BTD = jnp.where((self.stage == 0) & (chunk == 0), dx_BTD, jnp.zeros_like(dx_BTD))
        shared = self.where_needed(
            first_chunk == 0,
            lambda: jax.vjp(lambda s: self.model.embed(s, data), self.shared)[1](first_dx_BTD)[0],
            self._pin_shared,
        )
        shared = _add(carry.gradients.shared, shared)
        return dx_BTD, carry._replace(gradients=Gradients(blocks, shared))

    def _pin_shared(self, shared: Any) -> Any:
        return jax.tree.map(
            lambda leaf, names: shard(leaf, *names), shared, self.model.shared_names
        )

    def _chunk_vjp(
        self, x_BTD: jax.Array, chunk: jax.Array, microbatch: jax.Array
    ) -> tuple[ChunkOutput, list[jax.Array]]:
        """Output of a chunk, and what its backward pass needs beside what is known."""
        params, inputs = self.known(chunk, microbatch)

        def run(trained: Any, x_BTD: jax.Array) -> Any:
            own = with_carriers(params, trained)
            out = self.model.chunk(own, x_BTD, inputs, jnp.maximum(chunk, 0))
            return (out.y_BTD, out.loss), out.report

        (y_BTD, loss), vjp, report = jax.vjp(run, carriers(params), x_BTD, has_aux=True)
        leaves, self._tree = jax.tree.flatten(vjp)
        known = jax.tree.leaves((params, inputs))
        self._sources = [
            next((i for i, candidate in enumerate(known) if candidate is leaf), None)
            for leaf in leaves
        ]
        return ChunkOutput(y_BTD, loss, report), [
            leaf for leaf, source in zip(leaves, self._sources, strict=True) if source is None
        ]

    def _saved_vjp(
        self, saved: list[jax.Array], chunk: jax.Array, microbatch: jax.Array
    ) -> Callable[[tuple[jax.Array, jax.Array]], tuple[Any, jax.Array]]:
        """The backward pass of a chunk from what `_chunk_vjp` saved."""
        known = jax.tree.leaves(self.known(chunk, microbatch))
        remaining = iter(saved)
        leaves = [next(remaining) if s is None else known[s] for s in self._sources]
        return jax.tree.unflatten(self._tree, leaves)


def _zeros(tree: Any, dtype: Any = None) -> Any:
    """Zeros like the (abstract) arrays of a tree, in another dtype if one is given."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), tree)


def _add(total: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, new)
