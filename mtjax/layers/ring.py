"""Ring attention: keys and values travel, queries stay (Liu et al. 2023, arXiv 2310.01889).

The sequence is cut in 2C chunks, and shard r of C holds chunks r and 2C-1-r, so that each has the
same share of the causal triangle. At home a shard attends within its own two chunks; at each other
stop of the ring exactly two pairs of chunks lie below the diagonal, which are stacked in the batch:
shapes are static and nothing is computed in vain. `c` in a shape is one chunk, U one pair's batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.layers.attention_backends import AttentionCall
from mtjax.layers.ring_blocks import Block, block_backward, block_forward
from mtjax.layers.sinks import sink_gradient, with_sinks


def zigzag_order(num_tokens: int, num_shards: int) -> np.ndarray:
    """Index [T] of the token at each place, such that even shards hold chunks r and 2C-1-r."""
    chunks = np.arange(num_tokens).reshape(2 * num_shards, -1)
    pairs = [(r, 2 * num_shards - 1 - r) for r in range(num_shards)]
    return np.concatenate([chunks[index] for pair in pairs for index in pair])


def ring_attention(
    backend: str,
    call: AttentionCall,
    axis: str,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    words_BN2: jax.Array | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, T, N, H] of one shard, in zigzag order, where `axis` is manual.

    `words_BN2` and `sinks_N` as `mtjax.layers.attention_backends.attend` takes them.

    Keys and values go round as one array in both passes, blocks are merged in float32 by their
    log-sum-exp, and the backward pass of each block uses the output and log-sum-exp of all.
    """
    return _ring(backend, call, axis, q_BTNH, k_BTKH, v_BTKH, segments_BT, words_BN2, sinks_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ring(backend, call, axis, q, k, v, segments, words, sinks):
    return _forward(backend, call, axis, q, k, v, segments, words, sinks)[0]


def _ring_forward(backend, call, axis, q, k, v, segments, words, sinks):
    out, lse = _forward(backend, call, axis, q, k, v, segments, words, sinks)
    return out, (q, k, v, segments, words, sinks, out, lse)


class _Travelling(NamedTuple):
    """What goes round: keys beside values [B, T, K, 2H], and their documents [B, T] or None."""

    kv: jax.Array
    segments: Any

    def send(self, axis: str) -> "_Travelling":
        return jax.tree.map(lambda leaf: _send(leaf, axis), self)


def _send(x: jax.Array, axis: str) -> jax.Array:
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def _send_with(here: _Travelling, dkv: jax.Array, axis: str) -> tuple[_Travelling, jax.Array]:
    """Send keys and values, and float32 gradients of their shape, as one array of bits.

    Of two permutes at a time XLA overlaps one. Integers, because casts quieten NaNs.
    """
    kv = here.kv
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[kv.dtype.itemsize]
    width = kv.shape[-1]
    bits = jax.lax.bitcast_convert_type(dkv, unsigned).reshape(*kv.shape[:-1], -1)
    both = jnp.concatenate([jax.lax.bitcast_convert_type(kv, unsigned), bits], axis=-1)
    both = _send(both, axis)
    parts = both[..., width:].reshape(*dkv.shape, -1)
    dkv = jax.lax.bitcast_convert_type(parts[..., 0] if parts.shape[-1] == 1 else parts, dkv.dtype)
    kv = jax.lax.bitcast_convert_type(both[..., :width], kv.dtype)
    segments = jax.tree.map(lambda leaf: _send(leaf, axis), here.segments)
    return _Travelling(kv, segments), dkv


def _forward(backend, call, axis, q, k, v, segments, words, sinks):
    """Output [B, T, N, H] and log-sum-exp [B, N, T]."""
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    home = _Travelling(_beside(k, v), segments)
    coming = home.send(axis)
    out, lse = block_forward(backend, call, _home(call, size, rank, q, k, v, segments, words))
    (out_a, out_b), (lse_a, lse_b) = _halves(out, 1), _halves(lse, 2)
    for step in range(1, size):
        # The barrier keeps a permute from running ahead of the block that it overlaps with.
        here, out_b = jax.lax.optimization_barrier((coming, out_b))
        if step + 1 < size:
            coming = here.send(axis)
        earlier = step <= rank
        pairs = _pairs(call, size, rank, step, q, segments, words, here)
        both, both_lse = block_forward(backend, call, pairs)
        (first, second), (first_lse, second_lse) = _halves(both, 0), _halves(both_lse, 0)
        out_b, lse_b = _merge(out_b, lse_b, first, first_lse)
        target, target_lse = _pick(earlier, out_a, out_b), _pick(earlier, lse_a, lse_b)
        new, new_lse = _merge(target, target_lse, second, second_lse)
        out_a, lse_a = _pick(earlier, new, out_a), _pick(earlier, new_lse, lse_a)
        out_b, lse_b = _pick(earlier, out_b, new), _pick(earlier, lse_b, new_lse)
    out = jnp.concatenate([out_a, out_b], axis=1)
    lse = jnp.concatenate([lse_a, lse_b], axis=2)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def _ring_backward(backend, call, axis, residuals, dout):
    q, k, v, segments, words, sinks, out, lse = residuals
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    home = _Travelling(_beside(k, v), segments)
    coming = home.send(axis)
    block = _home(call, size, rank, q, k, v, segments, words)
    dq, dk, dv = block_backward(backend, call, block, out, lse, dout)
    dq_a, dq_b = _halves(dq, 1)
    dkv = _beside(dk, dv)
    for step in range(1, size):
        here, dq_b = jax.lax.optimization_barrier((coming, dq_b))
        # Gradients travel with what they belong to, one block behind.
        if step + 1 < size:
            coming, dkv = _send_with(here, dkv, axis)
        else:
            dkv = _send(dkv, axis)
        earlier = step <= rank
        pairs = _pairs(call, size, rank, step, q, segments, words, here)
        own = _two(earlier, out, 1), _two(earlier, lse, 2), _two(earlier, dout, 1)
        gradients = block_backward(backend, call, pairs, *own)
        (dq_1, dq_2), (dk_1, dk_2), (dv_1, dv_2) = (_halves(g, 0) for g in gradients)
        dq_a += _pick(earlier, dq_2, jnp.zeros_like(dq_2))
        dq_b += dq_1 + _pick(earlier, jnp.zeros_like(dq_2), dq_2)
        first, second = _beside(dk_1, dv_1), _beside(dk_2, dv_2)
        none = jnp.zeros_like(second)
        added = [first + _pick(earlier, second, none), _pick(earlier, none, second)]
        dkv += jnp.concatenate(added, axis=1)
    dk, dv = jnp.split(_send(dkv, axis), (k.shape[-1],), axis=-1)
    dq = jnp.concatenate([dq_a, dq_b], axis=1)
    dsinks = None if sinks is None else sink_gradient(sinks, out, lse, dout)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, dsinks


_ring.defvjp(_ring_forward, _ring_backward)


def _home(call, size, rank, q, k, v, segments, words) -> Block:
    """What the queries of a shard see of its own keys."""
    at = jnp.concatenate([_places(chunk, q) for chunk in (rank, 2 * size - 1 - rank)])[None]
    mask = _within(call, at, at)
    if segments is not None:
        mask = _and(mask, segments[:, :, None] == segments[:, None, :])
    return Block(q, k, v, mask, True, words, at, at)


def _pairs(call, size, rank, step, q, segments, words, here: _Travelling) -> Block:
    """Two pairs of chunks, stacked in the batch: U = 2B. The later own chunk with the visitor's
    first; then, of a visitor from an earlier shard, the first own chunk with its first, else the
    later own chunk with its later one."""
    earlier = step <= rank
    source, last = (rank - step) % size, 2 * size - 1
    k, v = jnp.split(here.kv, (q.shape[-1],), axis=-1)
    (k_1, k_2), (v_1, v_2) = _halves(k, 1), _halves(v, 1)
    keys = jnp.concatenate([k_1, _pick(earlier, k_1, k_2)])
    values = jnp.concatenate([v_1, _pick(earlier, v_1, v_2)])
    chunks = (
        (last - rank, _pick(earlier, rank, last - rank)),
        (source, _pick(earlier, source, last - source)),
    )
    queries_at, keys_at = (
        jnp.repeat(jnp.stack([_places(chunk, q) for chunk in pair]), q.shape[0], axis=0)
        for pair in chunks
    )
    mask = _within(call, queries_at, keys_at)
    if segments is not None:
        own = _two(earlier, segments, 1)
        theirs = _halves(here.segments, 1)
        theirs = jnp.concatenate([theirs[0], _pick(earlier, *theirs)])
        mask = _and(mask, own[:, :, None] == theirs[:, None, :])
    words = None if words is None else jnp.concatenate([words, words])
    return Block(_two(earlier, q, 1), keys, values, mask, False, words, queries_at, keys_at)


def _places(chunk, q: jax.Array) -> jax.Array:
    """[c]: where in the text the tokens of a chunk stand, of which q [B, T, N, H] holds two."""
    length = q.shape[1] // 2
    return chunk * length + jnp.arange(length)


def _within(call: AttentionCall, queries_at: jax.Array, keys_at: jax.Array) -> jax.Array | None:
    """Who is near enough to see whom [B or 1, T, S]; None: everyone."""
    if not call.window:
        return None
    return queries_at[:, :, None] - keys_at[:, None, :] < call.window


def _and(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b


def _merge(out, lse, other, other_lse):
    """Two softmax averages over different keys as one, float32; lse [B, N, c]."""
    total = jnp.logaddexp(lse, other_lse)

    def share(part):
        return jnp.swapaxes(jnp.exp(part - total), 1, 2)[..., None]

    return out * share(lse) + other * share(other_lse), total


def _two(earlier, x, axis):
    """The later half, and the first or the later one, stacked in the batch."""
    first, later = _halves(x, axis)
    return jnp.concatenate([later, _pick(earlier, first, later)])


def _beside(k, v):
    return jnp.concatenate((k, v), axis=-1)


def _halves(x, axis):
    return jnp.split(x, 2, axis=axis)


def _pick(condition, a, b):
    return jnp.where(condition, a, b)
