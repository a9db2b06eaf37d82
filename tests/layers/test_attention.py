"""Attention backends against a plain softmax in float64, over the grid of features."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig
from mtjax.layers.attention import BlockInputs
from mtjax.layers.attention_backends import AttentionCall, attend, keep_weights, unsupported
from mtjax.layers.block import BlockSpec, DecoderBlock
from mtjax.layers.dropout import head_keys
from mtjax.layers.rope import rope_table
from mtjax.layers.sinks import sink_gradient, with_sinks
from mtjax.planning.compile import cuda_plugin_missing

B, T, H = 2, 12, 8
FAST = {"xla_backend_optimization_level": 0}


def inputs(heads, kv_heads, seed=0, length=T, head_dim=H):
    rng = np.random.default_rng(seed)
    shapes = [(T, heads), (length, kv_heads), (length, kv_heads)]
    return [rng.normal(size=(B, *shape, head_dim)).astype(np.float32) for shape in shapes]


def xla(call, q, k, v, segments=None, keys=None, offset=0, sinks=None):
    def run(q, k, v, segments, keys, offset, sinks):
        return attend("xla", call, q, k, v, segments, keys, offset, sinks)

    return jax.jit(run, compiler_options=FAST)(q, k, v, segments, keys, offset, sinks)


def reference(q, k, v, call, segments=None, offset=0, keep=None, sinks=None):
    """One query at a time, in float64; `keep` is the dropout mask [B, N, T, S]."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for b, t, n in itertools.product(range(B), range(T), range(heads)):
        place = t + offset
        first = max(place - call.window + 1, 0) if call.window else 0
        keys = [
            s
            for s in range(first, place + 1)
            if segments is None or segments[b, s] == segments[b, t]
        ]
        scores = k[b, keys, n // group] @ q[b, t, n] * call.scale
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        if sinks is not None:
            scores = np.append(scores, sinks[n])
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum())[: len(keys)]
        if keep is not None:
            weights *= keep[b, n, t, keys] / (1 - call.dropout)
        out[b, t, n] = weights @ v[b, keys, n // group]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("packed", [False, True])
def test_xla_attention_equals_a_plain_softmax(heads, kv_heads, window, softcap, packed):
    q, k, v = inputs(heads, kv_heads)
    call = AttentionCall(scale=0.3, window=window, softcap=softcap, packed=packed)
    segments = np.array([[1] * 4 + [2] * 8, [1] * 11 + [2]]) if packed else None
    got = xla(call, q, k, v, segments)
    np.testing.assert_allclose(got, reference(q, k, v, call, segments), atol=2e-6)


def test_a_cached_query_sees_the_keys_up_to_its_place_and_no_buffer_behind():
    q, k, v = inputs(4, 2, length=T + 20)
    call = AttentionCall(scale=0.3, window=7, cached=True)
    got = xla(call, q, k, v, offset=9)
    np.testing.assert_allclose(got, reference(q, k, v, call, offset=9), atol=2e-6)


TOLERANCES = {jnp.float32: 1e-5, jnp.float16: 1e-2, jnp.bfloat16: 6e-2}
"""A few roundings (2^-24, 2^-11, 2^-8) of scores and weights, on values of up to about 4."""


def rng_sinks(heads, seed):
    return np.random.default_rng(seed).normal(size=heads).astype(np.float32)


@pytest.mark.parametrize("sink", [-300.0, 0.5, 300.0])
def test_a_sink_takes_its_share_of_a_head_from_nothing_to_all(sink):
    """Per head, at any size: exp(300) is no float32."""
    q, k, v = inputs(4, 2)
    sinks = np.array([0.0, sink, -1.0, 2.0], np.float32)
    call = AttentionCall(scale=0.3, window=5)
    got = xla(call, q, k, v, sinks=sinks)
    np.testing.assert_allclose(got, reference(q, k, v, call, sinks=sinks), atol=2e-6)
    if sink == 300:
        assert not np.any(got[:, :, 1])


def test_sinks_as_a_last_factor_have_the_gradients_of_one_more_logit():
    """What the ring and cuDNN do with a finished softmax, against autodiff through its logits."""
    q, k, v = (jnp.asarray(x) for x in inputs(4, 2))
    sinks = jnp.asarray(rng_sinks(4, 0))
    dout = jnp.asarray(inputs(4, 2, seed=1)[0])
    call = AttentionCall(scale=0.3)
    lse = jax.nn.logsumexp(
        jnp.where(
            jnp.tril(jnp.ones((T, T), bool)),
            jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, 2, axis=2)) * 0.3,
            -jnp.inf,
        ),
        axis=-1,
    )
    plain = attend("xla", call, q, k, v, None, None, 0)
    out, vjp = jax.vjp(lambda s: attend("xla", call, q, k, v, None, None, 0, s), sinks)
    ours, total = with_sinks(plain, lse, sinks)
    np.testing.assert_allclose(ours, out, atol=1e-6)
    got = sink_gradient(sinks, ours, total, dout)
    np.testing.assert_allclose(got, vjp(dout)[0], rtol=1e-5)


@pytest.mark.parametrize("seed", range(15))
def test_xla_attention_equals_a_plain_softmax_on_random_features(seed):
    pick = random.Random(seed).choice
    dropout, head_dim = pick([0.0, 0.3]), pick([4, 12, 20])
    heads, kv_heads = pick([(1, 1), (6, 2), (6, 3), (5, 1)])
    packed, cached = pick([(False, False), (True, False), (False, True)])
    call = AttentionCall(
        scale=pick([0.1, 0.5]),
        window=pick([0, 1, 3, T + 5]),
        softcap=pick([None, 0.5]),
        dropout=dropout,
        packed=packed,
        cached=cached,
    )
    dtype = pick([jnp.float32, jnp.float16, jnp.bfloat16])
    length, offset = (T + 7, pick([0, 2, 7])) if cached else (T, 0)
    qkv = [jnp.asarray(x, dtype) for x in inputs(heads, kv_heads, seed, length, head_dim)]
    segments = np.sort(np.random.default_rng(seed).integers(1, 4, (B, T))) if packed else None
    sinks = pick([None, rng_sinks(heads, seed)])
    keys, keep = None, None
    if dropout:
        keys = head_keys(jax.random.split(jax.random.key(seed), B), heads)
        places = jnp.arange(T)[None] + offset, jnp.arange(length)[None]
        keep = np.asarray(keep_weights(call, keys, heads, *places)).reshape(B, heads, T, length)
    got = xla(call, *qkv, segments, keys, offset, sinks)
    assert got.dtype == dtype
    expected = reference(*map(np.asarray, qkv), call, segments, offset, keep, sinks)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=TOLERANCES[dtype])


def test_no_token_sees_a_later_one_or_another_document():
    q, k, v = map(jnp.asarray, inputs(2, 2))
    segments = np.array([[1] * 6 + [2] * 6] * B)
    call = AttentionCall(scale=0.3, packed=True)

    def outputs(k, v):
        return jnp.sum(attend("xla", call, q, k, v, segments, None, 0), axis=(0, 2, 3))

    of_keys, of_values = jax.jit(jax.jacrev(outputs, (0, 1)), compiler_options=FAST)(k, v)
    allowed = np.array([[s <= t and (s < 6) == (t < 6) for s in range(T)] for t in range(T)])
    np.testing.assert_array_equal(np.abs(of_values).sum(axis=(1, 3, 4)) > 0, allowed)
    assert not np.abs(of_keys).sum(axis=(1, 3, 4))[~allowed].any()


def test_a_block_passes_nothing_back_in_time_or_across_a_window():
    """Through projections, rotation, head norms and the feed-forward part."""
    attention = AttentionConfig(
        num_heads=4, num_kv_heads=2, qk_norm=True, qkv_bias=True, backend="xla"
    )
    model = ModelConfig(embed_dim=16, ffn_dim=16, num_layers=1, attention=attention)
    block = DecoderBlock(BlockSpec(model, window=3))
    x = jax.random.normal(jax.random.key(0), (1, T, 16))
    read = BlockInputs(rope_table(model.rope, 4, jnp.arange(T)[None]), None, None)

    def jacobian(x):
        params = block.init(jax.random.key(1), x, read)

        def outputs(x):
            out, *_ = block.apply(params, x, read)
            return jnp.sum(jnp.square(out), axis=(0, 2))

        return jax.jacrev(outputs)(x)

    touched = np.abs(jax.jit(jacobian, compiler_options=FAST)(x)).sum(axis=(1, 3)) > 0
    expected = [[t - 3 < s <= t for s in range(T)] for t in range(T)]
    np.testing.assert_array_equal(touched, expected)


def test_attention_dropout_keeps_the_mean_and_depends_on_the_row_alone():
    """Means over 400 masks: a weight of 1 deviates by sqrt(1/3 / 400) = 0.03, others by less."""
    q, k, v = inputs(2, 2)
    call = AttentionCall(scale=0.3, dropout=0.25)
    plain = np.asarray(xla(AttentionCall(scale=0.3), q, k, v))

    @jax.jit
    def run(keys):
        one = functools.partial(attend, "xla", call, q, k, v, None)
        return jax.lax.map(lambda keys: one(keys, 0), keys)

    keys = jax.random.split(jax.random.key(0), (400, B))
    keys = jax.vmap(lambda keys_B: head_keys(keys_B, 2))(keys)
    outs = np.asarray(run(keys))
    error = np.abs(outs.mean(axis=0) - plain)
    assert error.max() < 5 * 0.03 * np.abs(v).max()
    assert error.mean() < 0.03
    alone = xla(call, q[1:], k[1:], v[1:], keys=keys[0, 1:])
    np.testing.assert_allclose(outs[0, 1:], alone, atol=1e-6)


GRID = list(
    itertools.product(
        ["xla", "cudnn"],
        [0, 5],
        [None, 1.5],
        [0.0, 0.1],
        [False, True],
        [False, True],
        [jnp.float32, jnp.bfloat16, jnp.float16],
        [8, 12, 128, 256],
    )
)


def test_every_combination_is_computed_or_refused_by_name():
    """What cuDNN supports is traced for shapes here, and compiled below."""
    refused = {"xla": 0, "cudnn": 0}
    for backend, window, softcap, dropout, packed, cached, dtype, head_dim in GRID:
        call = AttentionCall(
            scale=0.1, window=window, softcap=softcap, dropout=dropout, packed=packed, cached=cached
        )
        q = jax.ShapeDtypeStruct((1, 128, 2, head_dim), dtype)
        k = jax.ShapeDtypeStruct((1, 160 if cached else 128, 2, head_dim), dtype)
        segments = jax.ShapeDtypeStruct((1, 128), jnp.int32) if packed else None
        keys = jax.ShapeDtypeStruct((1, 2, 2), jnp.uint32)

        def run(q, k, v, segments, keys, backend=backend, call=call):
            return attend(backend, call, q, k, v, segments, keys, 0)

        reason = unsupported(backend, call, head_dim, dtype)
        if reason is None:
            # Even to trace it, JAX wants the cuDNN library.
            if backend == "cudnn" and cuda_plugin_missing():
                continue
            assert jax.eval_shape(run, q, k, k, segments, keys).shape == q.shape
            continue
        refused[backend] += 1
        with pytest.raises(ValueError, match="does not support") as caught:
            jax.eval_shape(run, q, k, k, segments, keys)
        assert reason in str(caught.value)
    # XLA refuses packed documents with a cache; cuDNN computes 2 windows, 2 packings, 2 dtypes and
    # 2 head dims (8 and 128).
    assert refused == {"xla": len(GRID) // 8, "cudnn": len(GRID) // 2 - 16}


@pytest.mark.parametrize(("window", "packed"), [(0, False), (32, False), (0, True), (32, True)])
@pytest.mark.parametrize(("kv_heads", "sinks"), [(4, False), (2, False), (2, True)])
def test_what_cudnn_supports_compiles_for_h200_with_its_gradient(
    h200_mesh, window, packed, kv_heads, sinks
):
    from mtjax.planning.compile import compile_for

    call = AttentionCall(scale=0.1, window=window, packed=packed)
    q, k = (jax.ShapeDtypeStruct((2, 128, n, 64), jnp.bfloat16) for n in (4, kv_heads))
    segments = jax.ShapeDtypeStruct((2, 128), jnp.int32) if packed else None

    sinks = jax.ShapeDtypeStruct((4,), jnp.float32) if sinks else None

    def loss(qkv, sinks, segments):
        out = attend("cudnn", call, *qkv, segments, None, 0, sinks)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    mesh = h200_mesh(data=1, fsdp=1, tensor=1)
    program = compile_for(mesh, jax.grad(loss, (0, 1)), (q, k, k), sinks, segments)
    targets = [c.target for c in program.summary.custom_calls]
    # One forward and one backward: with sinks too the second takes the output of the first.
    assert sum(t.startswith("__cudnn$fmha") for t in targets) == 2
