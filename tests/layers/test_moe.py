"""Experts against loops over tokens in float64, for each way of sending tokens to them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig, MoeConfig
from mtjax.layers.dispatch import take_rows
from mtjax.layers.moe import Moe
from mtjax.sharding import unbox

B, T, D, F, E, K = 2, 12, 6, 5, 4, 2
ROOMY = MoeConfig(num_experts=E, top_k=K, capacity_factor=float(E))
DISPATCHERS = ("capacity", "dropless", "allgather")


def model(moe=ROOMY, **settings):
    attention = AttentionConfig(num_heads=1)
    return ModelConfig(embed_dim=D, ffn_dim=F, attention=attention, moe=moe, **settings)


def draw(config):
    """Random input, and parameters of the layer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D))
    init = Moe(config.with_dispatcher("capacity")).init
    args = (jnp.zeros((B, T, D)), None, None)
    shapes = unbox(jax.eval_shape(init, jax.random.key(0), *args))["params"]
    return x, jax.tree.map(lambda s: rng.normal(size=s.shape), shapes)


def apply(config, params, x, counts=None):
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    return Moe(config).apply({"params": single}, jnp.asarray(x, jnp.float32), counts, None)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def ffn(params, e, row, clamp=None):
    def project(name, row):
        bias = params[f"{name}_bias"][e] if f"{name}_bias" in params else 0.0
        return row @ params[name][e] + bias

    up = project("up", row)
    if "gate" not in params:
        return project("down", np.maximum(up, 0) ** 2)
    gate = project("gate", row)
    if clamp is None:
        return project("down", gate / (1 + np.exp(-gate)) * up)
    gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    return project("down", (up + 1) * gate / (1 + np.exp(-1.702 * gate)))


def by_loops(params, x, capacity=T, policy="position", clamp=None):
    """Softmax, top-k, renormalise; each expert keeps `capacity` tokens of a sequence."""
    out = np.zeros_like(x)
    p = softmax(x @ params["router"]["kernel"] + params["router"].get("logit_bias", 0.0))
    for b in range(B):
        best = np.argsort(-p[b], axis=-1)[:, :K]
        weights = np.take_along_axis(p[b], best, -1)
        weights /= weights.sum(-1, keepdims=True)
        for e in range(E):
            queue = [(t, weights[t, k]) for t in range(T) for k in range(K) if best[t, k] == e]
            if policy == "probability":
                queue.sort(key=lambda pair: -pair[1])
            for t, weight in queue[:capacity]:
                out[b, t] += weight * ffn(params, e, x[b, t], clamp)
    return out


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_each_dispatcher_computes_the_weighted_sum_of_the_chosen_experts(dispatcher, activation):
    config = model(activation=activation)
    if dispatcher != "capacity":
        config = config.with_dispatcher(dispatcher)
    x, params = draw(config)
    got, stats = apply(config, params, x)
    np.testing.assert_allclose(got, by_loops(params, x), rtol=1e-4, atol=1e-4)
    assert stats.dropped == 0
    assert jnp.sum(stats.load) == B * T * K


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("activation", ["clamped_swiglu", "relu2"])
def test_biases_of_experts_are_weighted_as_their_outputs_and_dropped_with_them(
    dispatcher, activation
):
    """Every token of the second sequence is padding, which gets no bias either."""
    moe = dataclasses.replace(ROOMY, router="softmax_after_topk", router_bias=True)
    clamp = 0.8 if activation == "clamped_swiglu" else None
    clamped = {} if clamp is None else {"activation_clamp": clamp}
    config = model(moe, activation=activation, mlp_bias=True, **clamped)
    config = config.with_dispatcher(dispatcher)
    capacity = T
    if dispatcher == "capacity":
        moe = dataclasses.replace(config.moe, capacity_factor=0.6, drop_policy="position")
        config, capacity = dataclasses.replace(config, moe=moe), 4
    x, params = draw(config)
    assert {"up_bias", "down_bias", "router"} < set(params) and "logit_bias" in params["router"]
    counts = np.tile(np.arange(B)[:, None] == 0, (1, T))
    got, stats = apply(config, params, x, jnp.asarray(counts))
    expected = np.where(counts[..., None], by_loops(params, x, capacity, clamp=clamp), 0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert (stats.dropped > 0) == (dispatcher == "capacity")


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_an_overfull_expert_keeps_the_heaviest_or_the_first_tokens_of_each_sequence(policy):
    config = model(dataclasses.replace(ROOMY, capacity_factor=0.6, drop_policy=policy))
    x, params = draw(config)
    got, stats = apply(config, params, x)
    # ceil(12 * 2 / 4 * 0.6) = 4
    np.testing.assert_allclose(got, by_loops(params, x, 4, policy), rtol=1e-4, atol=1e-4)
    other = "position" if policy == "probability" else "probability"
    assert np.abs(got - by_loops(params, x, 4, other)).max() > 0.1, "the policies differ here"
    assert stats.dropped > 0


@pytest.mark.parametrize("dispatcher", ["dropless", "allgather"])
def test_dispatchers_that_drop_nothing_have_the_same_gradients(dispatcher):
    config = model(dataclasses.replace(ROOMY, shared_ffn_dim=7, shared_gate=True), mlp_bias=True)
    x, params = draw(config)

    def gradients(config):
        def loss(params, x):
            return jnp.sum(jnp.sin(apply(config, params, x)[0]))

        return jax.jit(jax.grad(loss, (0, 1)))(params, jnp.asarray(x, jnp.float32))

    expected, got = gradients(config), gradients(config.with_dispatcher(dispatcher))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_a_shared_expert_is_added_scaled_by_its_gate():
    config = model(dataclasses.replace(ROOMY, shared_ffn_dim=7, shared_gate=True))
    x, params = draw(config)
    shared = {name: params["shared"][name]["kernel"][None] for name in ("gate", "up", "down")}
    scale = 1 / (1 + np.exp(-(x @ params["shared_gate"]["kernel"])))
    expected = by_loops(params, x)
    for b in range(B):
        for t in range(T):
            expected[b, t] += scale[b, t] * ffn(shared, 0, x[b, t])
    np.testing.assert_allclose(apply(config, params, x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dispatcher", ["capacity", "allgather"])
def test_an_expert_that_chooses_serves_its_best_tokens_of_each_sequence(dispatcher):
    """ceil(12 * 2 / 4) = 6 tokens, of the second sequence, which has 7, ceil(3.5) = 4."""
    moe = MoeConfig(num_experts=E, top_k=K, router="expert_choice", renormalize=False)
    config = model(dataclasses.replace(moe, dispatcher=dispatcher))
    x, params = draw(config)
    counts = np.ones((B, T), bool)
    counts[1, 7:] = False
    got, stats = apply(config, params, x, jnp.asarray(counts))
    p = softmax(x @ params["router"]["kernel"])
    expected = np.zeros_like(x)
    for b, (tokens, size) in enumerate([(12, 6), (7, 4)]):
        for e in range(E):
            for t in np.argsort(-p[b, :tokens, e])[:size]:
                expected[b, t] += p[b, t, e] * ffn(params, e, x[b, t])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(stats.load, [10] * E)
    assert stats.dropped == 0


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_nan_in_padding_changes_nothing(dispatcher):
    """Neither output, statistics nor gradients; padding itself gets zero and moves nobody."""
    config = model(dataclasses.replace(ROOMY, capacity_factor=0.6, shared_ffn_dim=7))
    if dispatcher != "capacity":
        config = config.with_dispatcher(dispatcher)
    x, params = draw(config)
    counts = np.ones((B, T), bool)
    counts[0, ::3] = counts[1, 6:] = False
    results = []
    for filler in (0.0, np.nan):
        filled = np.where(counts[..., None], x, filler)

        def loss(params, filled=filled):
            y, stats = apply(config, params, filled, jnp.asarray(counts))
            return jnp.sum(jnp.sin(y)) + stats.balance + stats.z, (y, stats)

        single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
        results.append(jax.jit(jax.grad(loss, has_aux=True))(single))
    for ours, theirs in zip(jax.tree.leaves(results[1]), jax.tree.leaves(results[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    _, (y, stats) = results[1]
    assert not np.any(y[~counts]) and np.all(np.isfinite(y))
    assert jnp.sum(stats.load) == K * counts.sum()


def test_padding_takes_no_room_from_tokens_behind_it():
    """The first half of each sequence is padding: the second half finds all of the capacity."""
    config = model(dataclasses.replace(ROOMY, capacity_factor=1.0, drop_policy="position"))
    x, params = draw(config)
    counts = np.tile(np.arange(T) >= T // 2, (B, 1))
    got, stats = apply(config, params, x, jnp.asarray(counts))
    assert stats.dropped == 0
    expected = np.where(counts[..., None], by_loops(params, x), 0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_rows_are_taken_and_given_back_as_by_indexing():
    """Value and gradient of x[index] with zeros for index N; row 1 is taken twice, row 2 never."""
    x = jnp.arange(8.0).reshape(4, 2)
    index, inverse = jnp.array([1, 3, 4, 1, 0]), jnp.array([[4, 5], [0, 3], [5, 5], [1, 5]])
    taken, vjp = jax.vjp(lambda x: take_rows(x, index, inverse), x)
    np.testing.assert_array_equal(taken, [[2, 3], [6, 7], [0, 0], [2, 3], [0, 1]])
    dy = jnp.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(vjp(dy)[0], [[8, 9], [6, 8], [0, 0], [2, 3]])
