"""Next-token cross entropy without the [B, T, V] float32 logits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtjax.config import Config
from mtjax.sharding import Names, all_mesh_axes, local_map, reshard, shard, sum_and_scatter


class LossConfig(NamedTuple):
    """Static settings of the loss: true vocabulary size, output softcap, z-loss weight, chunk."""

    vocab_size: int
    softcap: float | None
    z_loss: float
    chunk: int


def loss_config(config: Config) -> LossConfig:
    """The settings of a run's loss."""
    model, train = config.model, config.train
    return LossConfig(model.vocab_size, model.logit_softcap, train.z_loss, train.loss_chunk)


class LossSums(NamedTuple):
    """Float32 sums over weighted tokens: what is minimised, and its cross-entropy part."""

    total: jax.Array
    cross_entropy: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_cross_entropy(
    config: LossConfig,
    x_BTD: jax.Array,
    table_VD: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
) -> LossSums:
    """Sums over tokens of weight * cross entropy of softmax(x table^T), plus the z-loss.

    Chunked over the sequence and vocabulary-parallel; each chunk's gradients are
    made in the forward pass, while its logits exist, so none is computed twice. The cotangent
    of `cross_entropy` is ignored: it is a metric.
    """
    return _sums_and_gradients(config, False, x_BTD, table_VD, labels_BT, weights_BT)[0]


def _forward(config, x_BTD, table_VD, labels_BT, weights_BT):
    sums, gradients = _sums_and_gradients(config, True, x_BTD, table_VD, labels_BT, weights_BT)
    return sums, gradients


def _backward(config, gradients, cotangent):
    dx_BTD, dtable_VD = gradients
    scale = cotangent.total
    dx_BTD = (dx_BTD.astype(jnp.float32) * scale).astype(dx_BTD.dtype)
    return dx_BTD, (dtable_VD * scale).astype(dx_BTD.dtype), None, None


linear_cross_entropy.defvjp(_forward, _backward)


def _sums_and_gradients(config, with_gradients, x_BTD, table_VD, labels_BT, weights_BT):
    x_BTD = reshard(x_BTD, ("batch", "seq_sp", None), ("batch", "seq", None))
    table_VD = reshard(table_VD, ("vocab", "embed"), ("vocab", None))
    outs: list[Names] = [("token_shards",), ("token_shards",)]
    if with_gradients:
        # Partial sums leave with a leading device dim; the reduction below, under the
        # parameter's layout, is a reduce-scatter over fsdp.
        outs += [("batch", "seq_sp", None), ("token_shards", "vocab", None)]
    local = partial(_local, config, with_gradients, all_mesh_axes("vocab"))
    names = (("batch", "seq", None), ("vocab", None), ("batch", "seq"), ("batch", "seq"))
    total, ce, *gradients = local_map(local, names, outs)(x_BTD, table_VD, labels_BT, weights_BT)
    sums = LossSums(jnp.sum(total), jnp.sum(ce))
    if not with_gradients:
        return sums, None
    dx_BTD, dtables_XVD = gradients
    return sums, (dx_BTD, shard(jnp.sum(dtables_XVD, axis=0), "vocab", "embed"))


def _local(config, with_gradients, vocab_axes, x_BTD, table_VD, labels_BT, weights_BT):
    """Sums over the tokens held here; gradients of x [B, T, D] and of the table [1, V, D]."""
    B, T, D = x_BTD.shape
    chunk = min(config.chunk, T)
    first = jax.lax.axis_index(vocab_axes) * table_VD.shape[0] if vocab_axes else 0
    ids_V = jnp.arange(table_VD.shape[0]) + first

    def one(carry, chunked):
        x, labels, weights = chunked
        total, ce, dlogits = _chunk_loss(config, vocab_axes, ids_V, x @ table_VD.T, labels, weights)
        sums = (carry[0] + total, carry[1] + ce)
        if not with_gradients:
            return sums, None
        dlogits = dlogits.astype(x.dtype)
        dx = dlogits @ table_VD
        contract = ((0, 1), (0, 1))
        dtable = jax.lax.dot_general(
            dlogits, x, (contract, ((), ())), preferred_element_type=jnp.float32
        )
        return (*sums, carry[2] + dtable), dx

    zero = jnp.zeros((), jnp.float32)
    carry: tuple[jax.Array, ...] = (zero, zero)
    if with_gradients:
        carry += (jnp.zeros(table_VD.shape, jnp.float32),)
    num_chunks, rest = divmod(T, chunk)
    ys = []
    if num_chunks:
        shape = (B, num_chunks, chunk)

        def cut(a: jax.Array) -> jax.Array:
            return jnp.moveaxis(a[:, : num_chunks * chunk].reshape(*shape, *a.shape[2:]), 1, 0)

        parts = (cut(x_BTD), cut(labels_BT), cut(weights_BT))
        carry, dx = jax.lax.scan(one, carry, parts, unroll=num_chunks == 1)
        if with_gradients:
            ys.append(jnp.moveaxis(dx, 0, 1).reshape(B, num_chunks * chunk, D))
    if rest:
        carry, dx = one(carry, (x_BTD[:, -rest:], labels_BT[:, -rest:], weights_BT[:, -rest:]))
        ys.append(dx)
    sums = (carry[0][None], carry[1][None])
    if not with_gradients:
        return sums
    dx_BTD = jnp.concatenate(ys, axis=1) if len(ys) > 1 else ys[0]
    if vocab_axes:
        # Each device holds the part of dx that its vocabulary gives, for every token.
        dx_BTD = sum_and_scatter(dx_BTD, vocab_axes)
    return (*sums, dx_BTD, carry[2][None])


def _chunk_loss(config, vocab_axes, ids_V, logits_BCV, labels_BC, weights_BC):
    """Weighted sums of one chunk, and the gradient of its raw logits, float32 [B, C, V]."""
    raw = logits_BCV.astype(jnp.float32)
    capped = raw
    if config.softcap is not None:
        capped = config.softcap * jnp.tanh(raw / config.softcap)
    logits = jnp.where(ids_V < config.vocab_size, capped, -jnp.inf)

    def reduce(x, collective):
        return collective(x, vocab_axes) if vocab_axes else x

    peak = reduce(jnp.max(logits, axis=-1), jax.lax.pmax)
    exp = jnp.exp(logits - peak[..., None])
    partition = reduce(jnp.sum(exp, axis=-1), jax.lax.psum)
    log_z = peak + jnp.log(partition)
    # Compare and select: a gather over the split vocabulary aborts in a partly manual region.
    is_label = labels_BC[..., None] == ids_V
    label_logit = reduce(jnp.sum(jnp.where(is_label, capped, 0.0), axis=-1), jax.lax.psum)
    ce = jnp.sum(weights_BC * (log_z - label_logit))
    total = ce + config.z_loss * jnp.sum(weights_BC * jnp.square(log_z))
    probability = exp / partition[..., None]
    dlogits = probability * (1.0 + 2.0 * config.z_loss * log_z[..., None]) - is_label
    if config.softcap is not None:
        dlogits *= 1.0 - jnp.square(capped / config.softcap)
    return total, ce, dlogits * weights_BC[..., None]
