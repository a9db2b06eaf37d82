"""Attention backends against a plain softmax in float64, over the grid of features."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layers.attention_backends import AttentionCall, attend, unsupported

B, T, H = 2, 12, 8


def inputs(heads, kv_heads, seed=0, length=T):
    rng = np.random.default_rng(seed)
    shapes = [(B, T, heads, H), (B, length, kv_heads, H), (B, length, kv_heads, H)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def reference(q, k, v, call, segments=None, offset=0):
    """One query at a time, in float64."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    for b, t, n in itertools.product(range(B), range(T), range(heads)):
        place = t + offset
        first = max(place - call.window + 1, 0) if call.window else 0
        keys = [
            s
            for s in range(first, place + 1)
            if segments is None or segments[b, s] == segments[b, t]
        ]
        scores = k[b, keys, n // group].astype(np.float64) @ q[b, t, n] * call.scale
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, keys, n // group]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("packed", [False, True])
def test_xla_attention_equals_a_plain_softmax(heads, kv_heads, window, softcap, packed):
    q, k, v = inputs(heads, kv_heads)
    call = AttentionCall(scale=0.3, window=window, softcap=softcap, packed=packed)
    segments = np.array([[1] * 4 + [2] * 8, [1] * 11 + [2]]) if packed else None
    got = attend("xla", call, q, k, v, segments, None, 0)
    np.testing.assert_allclose(got, reference(q, k, v, call, segments), atol=2e-6)


def test_a_cached_query_sees_the_keys_up_to_its_place_and_no_buffer_behind():
    q, k, v = inputs(4, 2, length=T + 20)
    call = AttentionCall(scale=0.3, window=7, cached=True)
    got = attend("xla", call, q, k, v, None, None, jnp.int32(9))
    np.testing.assert_allclose(got, reference(q, k, v, call, offset=9), atol=2e-6)


def test_no_token_sees_a_later_one_or_another_document():
    q, k, v = inputs(2, 2)
    segments = np.array([[1] * 6 + [2] * 6] * B)
    call = AttentionCall(scale=0.3, packed=True)

    def output_at(v, t):
        return jnp.sum(attend("xla", call, q, k, v, segments, None, 0)[:, t])

    for t in range(T):
        seen = np.abs(jax.grad(output_at)(jnp.asarray(v), t)).sum(axis=(0, 2, 3)) > 0
        assert seen.tolist() == [s <= t and (s < 6) == (t < 6) for s in range(T)]


def test_attention_dropout_keeps_the_mean_and_depends_on_the_row_alone():
    q, k, v = inputs(2, 2)
    call = AttentionCall(scale=0.3, dropout=0.25)
    plain = attend("xla", AttentionCall(scale=0.3), q, k, v, None, None, 0)

    def run(keys, rows=slice(None)):
        return attend("xla", call, q[rows], k[rows], v[rows], None, keys[rows], 0)

    keys = jax.random.split(jax.random.key(0), (400, B))
    mean = jnp.mean(jax.vmap(run)(keys), axis=0)
    np.testing.assert_allclose(mean, plain, atol=0.25)
    assert np.abs(mean - plain).mean() < 0.03
    alone = run(keys[0], slice(1, 2))
    np.testing.assert_array_equal(run(keys[0])[1:2], alone)


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
    """cuDNN can't run here: what it supports is traced for shapes, and compiled below."""
    refused = 0
    for backend, window, softcap, dropout, packed, cached, dtype, head_dim in GRID:
        call = AttentionCall(
            scale=0.1, window=window, softcap=softcap, dropout=dropout, packed=packed, cached=cached
        )
        x = jax.ShapeDtypeStruct((1, 128, 2, head_dim), dtype)
        segments = jax.ShapeDtypeStruct((1, 128), jnp.int32) if packed else None
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))

        def run(q, k, v, segments, keys, backend=backend, call=call):
            return attend(backend, call, q, k, v, segments, keys, 0)

        reason = unsupported(backend, call, head_dim, dtype)
        if reason is None:
            assert jax.eval_shape(run, x, x, x, segments, keys).shape == x.shape
            continue
        refused += 1
        with pytest.raises(ValueError, match="does not support") as caught:
            jax.eval_shape(run, x, x, x, segments, keys)
        assert reason in str(caught.value)
    assert 0 < refused < len(GRID) // 2
    assert not any(unsupported("xla", AttentionCall(scale=1.0), d, f) for *_, f, d in GRID)


@pytest.mark.parametrize(("window", "packed"), [(0, False), (32, False), (0, True), (32, True)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_cudnn_supports_compiles_for_h200_with_its_gradient(
    h200_mesh, window, packed, kv_heads
):
    from mtjax.planning.compile import compile_for

    call = AttentionCall(scale=0.1, window=window, packed=packed)
    q, k = (jax.ShapeDtypeStruct((2, 128, n, 64), jnp.bfloat16) for n in (4, kv_heads))
    segments = jax.ShapeDtypeStruct((2, 128), jnp.int32) if packed else None

    def loss(q, k, v, segments):
        out = attend("cudnn", call, q, k, v, segments, None, 0)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    mesh = h200_mesh(data=1, fsdp=1, tensor=1)
    program = compile_for(mesh, jax.grad(loss, (0, 1, 2)), q, k, k, segments)
    targets = [c.target for c in program.summary.custom_calls]
    assert sum(t.startswith("__cudnn$fmha") for t in targets) == 2
