"""Routers by hand: small numbers, formulas in numpy, published examples."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig, MoeConfig
from mtjax.layers.router import Router, balanced_plan, next_score_bias, route, router_stats


def chosen(moe, logits, bias=None):
    """{expert: weight} of one token."""
    logits = jnp.asarray(logits, jnp.float32)[None, None]
    bias = jnp.zeros(moe.num_experts) if bias is None else jnp.asarray(bias, jnp.float32)
    experts, weights, _ = route(moe, logits, bias)
    pairs = zip(experts[0, 0].tolist(), weights[0, 0].tolist(), strict=True)
    return {expert: pytest.approx(weight, rel=1e-5) for expert, weight in pairs}


HALF_THIRD_FIFTH = np.log([0.2, 0.5, 0.3])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"renormalize": False}, {1: 0.5, 2: 0.3}),
        ({}, {1: 0.625, 2: 0.375}),
        ({"router": "softmax_after_topk"}, {1: 0.625, 2: 0.375}),
        ({"routed_scale": 2.0}, {1: 1.25, 2: 0.75}),
        ({"router": "softmax_after_topk", "routed_scale": 2.0}, {1: 1.25, 2: 0.75}),
        # sigmoid(log p) = p / (1 + p)
        ({"router": "sigmoid", "renormalize": False}, {1: 1 / 3, 2: 3 / 13}),
        ({"router": "sigmoid"}, {1: (1 / 3) / (22 / 39), 2: (3 / 13) / (22 / 39)}),
    ],
)
def test_weights_follow_the_kind_of_router(settings, expected):
    moe = MoeConfig(num_experts=3, **settings)
    assert chosen(moe, HALF_THIRD_FIFTH) == expected


def logit(p):
    return np.log(p) - np.log1p(-np.asarray(p))


def test_a_score_bias_chooses_and_does_not_weight():
    """The last expert wins by its bias; weights are the bare scores 0.9 and 0.2 by their sum."""
    moe = MoeConfig(num_experts=4, router="sigmoid", score_bias=True)
    got = chosen(moe, logit([0.9, 0.8, 0.1, 0.2]), [0.0, 0.0, 0.0, 0.7])
    assert got == {0: 0.9 / 1.1, 3: 0.2 / 1.1}


def test_sigmoid_groups_score_the_sum_of_their_best_two():
    """Groups (.9 .1 .1) (.6 .5 .1) (.4 .4 .4): sums 1.0, 1.1, .8; the best expert loses."""
    scores = [0.9, 0.1, 0.1, 0.6, 0.5, 0.1, 0.4, 0.4, 0.4]
    moe = MoeConfig(num_experts=9, num_groups=3, router="sigmoid", renormalize=False)
    assert chosen(moe, logit(scores)) == {3: 0.6, 4: 0.5}


def test_softmax_groups_score_their_best_expert():
    p = np.array([0.30, 0.01, 0.02, 0.25, 0.22, 0.20])
    moe = MoeConfig(num_experts=6, num_groups=2, renormalize=False)
    assert chosen(moe, np.log(p)) == {0: 0.30, 2: 0.02}


def test_experts_outside_the_best_groups_are_never_chosen_even_below_zero():
    """Biases of -2 make every preference negative: a mask of 0 would let the others win."""
    moe = MoeConfig(num_experts=4, num_groups=2, router="sigmoid", score_bias=True)
    got = chosen(moe, logit([0.1, 0.2, 0.8, 0.9]), [-2.0] * 4)
    assert set(got) == {2, 3}


def test_sinkhorn_chooses_by_the_plan_in_training_and_weights_by_the_bare_probabilities():
    """The published iteration on exp(logits), in float64; evaluation chooses by the logits."""
    moe = MoeConfig(num_experts=5, top_k=2, router="sinkhorn", renormalize=False)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 40, 5)) + np.array([2.0, 0.0, 0.0, 0.0, -2.0])
    counts = np.ones((3, 40), bool)
    counts[1, 25:] = counts[2] = False
    args = (moe, jnp.asarray(logits, jnp.float32), jnp.zeros(5), jnp.asarray(counts))
    experts, weights, p = route(*args, training=True)
    plain = route(*args)
    np.testing.assert_array_equal(plain[0], np.argsort(-logits, axis=-1)[..., :2])
    for row in (0, 1):
        cost = np.exp(logits[row][counts[row]])
        left, right = np.ones(len(cost)), np.ones(5)
        for _ in range(16):
            left = 1 / (cost @ right)
            right = 1 / (left @ cost)
        plan = left[:, None] * cost * right
        got = balanced_plan(moe, *(a[row : row + 1] for a in (args[1], args[3])))
        np.testing.assert_allclose(np.exp(got)[0][counts[row]], plan, rtol=1e-4)
        # Even to the eye: the columns' sums are equal, the rows' nearly so.
        np.testing.assert_allclose(plan.sum(1), 5 / len(cost), rtol=1e-3)
        expected = np.argsort(-plan, axis=-1)[:, :2]
        np.testing.assert_array_equal(experts[row][counts[row]], expected)
        loads, before = (
            np.bincount(np.asarray(e)[row][counts[row]].ravel(), minlength=5)
            for e in (experts, plain[0])
        )
        assert loads.max() < 0.7 * before.max()
    np.testing.assert_array_equal(weights, np.take_along_axis(p, experts, axis=-1))
    assert np.all(np.isfinite(weights))


def test_a_layer_balances_by_sinkhorn_where_it_has_keys_which_training_gives_it():
    moe = MoeConfig(num_experts=4, top_k=1, router="sinkhorn", renormalize=False)
    model = ModelConfig(embed_dim=4, attention=AttentionConfig(num_heads=1), moe=moe)
    assert model.random_in_training
    assert not dataclasses.replace(model, moe=MoeConfig()).random_in_training
    x_BTD = jax.random.normal(jax.random.key(0), (2, 64, 4)).at[..., 0].set(1.0)
    params = {"params": {"kernel": jnp.eye(4).at[0].set(jnp.array([2.0, 0.0, 0.0, 0.0]))}}
    counts, keys = jnp.ones((2, 64), bool), jax.random.split(jax.random.key(1), 2)
    in_use, in_training = (
        Router(model).apply(params, x_BTD, counts, None, k)[1].load for k in (None, keys)
    )
    assert jnp.max(in_use) > 100
    # Rounding to one expert each leaves a little.
    assert jnp.max(in_training) < 1.5 * 128 / 4


def test_sinkhorn_with_one_expert_weights_it_by_its_sigmoid():
    moe = MoeConfig(num_experts=3, top_k=1, router="sinkhorn", renormalize=False)
    assert chosen(moe, logit([0.2, 0.9, 0.5])) == {1: 0.9}


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_experts_choose_the_tokens_of_a_sequence_that_score_them_highest(scale):
    """ceil(T k / E) of the tokens that count: of 7 and 5, with k = 2 and E = 4, 4 and 3."""
    moe = MoeConfig(
        num_experts=4, top_k=2, router="expert_choice", renormalize=False, routed_scale=scale
    )
    logits = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
    counts = np.ones((3, 7), bool)
    counts[1, [0, 4]] = counts[2] = False
    experts, weights, p = route(moe, jnp.asarray(logits), jnp.zeros(4), jnp.asarray(counts))
    expected = np.full((3, 7, 4), 4)
    for b, size in ((0, 4), (1, 3)):
        for e in range(4):
            order = [t for t in np.argsort(-p[b, :, e], kind="stable") if counts[b, t]]
            expected[b, order[:size], e] = e
    np.testing.assert_array_equal(experts, expected)
    np.testing.assert_allclose(weights, scale * np.asarray(p), rtol=1e-6)
    assert len({(row < 4).sum() for row in expected[0]}) > 1, "tokens have unequal shares"


@pytest.mark.parametrize(("E", "k", "T"), [(4, 1, 8), (4, 2, 6), (8, 3, 16), (64, 8, 64)])
@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_the_balance_loss_is_one_at_even_loads(E, k, T, scope):
    """Equal probabilities, and tokens dealt to experts in turn."""
    moe = MoeConfig(num_experts=E, top_k=k, balance_coefficient=1.0, balance_scope=scope)
    deal = (np.arange(2 * T * k) % E).reshape(2, T, k)
    uniform = jnp.full((2, T, E), 1 / E)
    stats = stats_of(moe, jnp.zeros((2, T, E)), uniform, deal)
    weight = 2 if scope == "sequence" else 2 * T
    assert stats.balance / weight == pytest.approx(1.0, rel=1e-6)
    assert stats.entropy / (2 * T) == pytest.approx(np.log(E), rel=1e-5)
    assert stats.z / (2 * T) == pytest.approx(np.log(E) ** 2, rel=1e-5)


def stats_of(moe, logits, probabilities, experts, counts=None, load=None):
    counts = jnp.ones(logits.shape[:2], bool) if counts is None else counts
    experts = jnp.where(counts[..., None], experts, moe.num_experts)
    return router_stats(moe, logits, probabilities, experts, counts, load)


def balance_by_loops(p_TE, experts_TK, E):
    """E / (k T^2) sum_i (sum_t p_ti) n_i, as it is written."""
    T, k = experts_TK.shape
    total = 0.0
    for i in range(E):
        total += sum(p_TE[t, i] for t in range(T)) * sum(i in experts_TK[t] for t in range(T))
    return E / (k * T**2) * total


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 7, 5)).astype(np.float32)
    counts = np.ones((3, 7), bool)
    counts[0, 4:] = False
    counts[2] = False
    moe = MoeConfig(num_experts=5, top_k=2, balance_coefficient=1.0)
    experts, _, probabilities = route(moe, jnp.asarray(logits), jnp.zeros(5))
    return logits, counts, np.asarray(experts), np.asarray(probabilities)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global"])
def test_the_balance_loss_is_its_formula_over_the_tokens_that_count(scope, drawn):
    logits, counts, experts, p = drawn
    moe = MoeConfig(num_experts=5, top_k=2, balance_coefficient=1.0, balance_scope=scope)
    stats = stats_of(moe, jnp.asarray(logits), jnp.asarray(p), experts, jnp.asarray(counts))
    if scope == "sequence":
        rows = [balance_by_loops(p[r][counts[r]], experts[r][counts[r]], 5) for r in (0, 1)]
        assert stats.balance == pytest.approx(sum(rows), rel=1e-5)
    else:
        expected = balance_by_loops(p[counts], experts[counts], 5)
        assert stats.balance / counts.sum() == pytest.approx(expected, rel=1e-5)
    log_z = np.log(np.exp(logits.astype(float)).sum(-1))
    assert stats.z == pytest.approx((log_z**2)[counts].sum(), rel=1e-5)
    np.testing.assert_array_equal(stats.load, np.bincount(experts[counts].ravel(), minlength=5))


def test_the_device_balance_loss_multiplies_mean_loads_and_summed_probabilities(drawn):
    """sum over groups of (mean f_j) (sum P_j), f_j = E n_j / (k T), P_j = mean p_j: as published.

    It is 1 where groups are even although their experts are not.
    """
    logits, counts, _, _ = drawn
    settings = {"num_experts": 6, "device_groups": 3, "device_balance_coefficient": 1.0}
    moe = MoeConfig(**settings)
    logits = np.concatenate([logits, logits[..., :1] + 0.3], axis=-1)
    experts, _, p = (np.asarray(a) for a in route(moe, jnp.asarray(logits), jnp.zeros(6)))
    stats = stats_of(moe, jnp.asarray(logits), jnp.asarray(p), experts, jnp.asarray(counts))
    T = counts.sum()
    f = 6 / (2 * T) * np.bincount(experts[counts].ravel(), minlength=6)
    P = p[counts].mean(0)
    expected = sum(f[g : g + 2].mean() * P[g : g + 2].sum() for g in (0, 2, 4))
    assert stats.device_balance / T == pytest.approx(expected, rel=1e-5)
    uneven = np.tile([[0, 2], [0, 4], [2, 4]], (1, 1, 1))
    even = stats_of(moe, jnp.zeros((1, 3, 6)), jnp.full((1, 3, 6), 1 / 6), uneven)
    assert even.device_balance / 3 == pytest.approx(1.0, rel=1e-6)


def test_noise_is_drawn_by_sequence_and_has_the_given_deviation():
    model = ModelConfig(
        embed_dim=4,
        attention=AttentionConfig(num_heads=1),
        moe=MoeConfig(num_experts=50, top_k=1, router_noise=2.0),
    )
    x_BTD, counts = jnp.zeros((3, 40, 4)), jnp.ones((3, 40), bool)
    params = {"params": {"kernel": jnp.zeros((4, 50))}}
    keys = jax.random.split(jax.random.key(0), 3)

    def log_z(keys):
        return Router(model).apply(params, x_BTD, counts, None, keys)[1].z / 120

    # E exp(2 n) = exp(2): the log of the mean of 50 such terms is ln 50 + 2 less a spread.
    assert log_z(None) == pytest.approx(np.log(50) ** 2, rel=1e-5)
    assert np.log(50) + 1 < np.sqrt(log_z(keys)) < np.log(50) + 2
    chosen = [Router(model).apply(params, x_BTD, counts, None, k)[0].experts for k in
              (keys, keys[::-1])]  # fmt: skip
    np.testing.assert_array_equal(chosen[0], chosen[1][::-1])
    assert np.any(chosen[0][0] != chosen[0][1])


def test_with_the_load_of_the_whole_batch_parts_add_up_to_the_whole(drawn):
    logits, _, experts, p = drawn
    moe = MoeConfig(num_experts=5, balance_coefficient=1.0, balance_scope="global")
    whole = stats_of(moe, jnp.asarray(logits), jnp.asarray(p), experts)
    parts = [
        stats_of(moe, jnp.asarray(logits[r]), jnp.asarray(p[r]), experts[r], load=whole.load)
        for r in (slice(0, 1), slice(1, 3))
    ]
    assert parts[0].balance + parts[1].balance == pytest.approx(float(whole.balance), rel=1e-6)
    alone = [
        stats_of(moe, jnp.asarray(logits[r]), jnp.asarray(p[r]), experts[r])
        for r in (slice(0, 1), slice(1, 3))
    ]
    assert alone[0].balance + alone[1].balance != pytest.approx(float(whole.balance), rel=1e-3)


def test_overfull_experts_drop_what_exceeds_the_capacity_of_each_sequence():
    """Capacity ceil(4 * 1 / 2 * 1) = 2: loads (4, 0) and (1, 3) drop 2 and 1."""
    moe = MoeConfig(num_experts=2, top_k=1, capacity_factor=1.0)
    experts = np.array([[0, 0, 0, 0], [1, 0, 1, 1]])[..., None]
    stats = stats_of(moe, jnp.zeros((2, 4, 2)), jnp.full((2, 4, 2), 0.5), experts)
    assert stats.dropped == 3


def test_biases_move_against_the_load_by_the_rate():
    """Loads 5 4 3 4 at rate 0.01 give -0.01 0 0.01 0."""
    moe = MoeConfig(num_experts=4, router="sigmoid", score_bias=True, bias_update_rate=0.01)
    moved = next_score_bias(moe, jnp.zeros(4), jnp.array([5.0, 4.0, 3.0, 4.0]))
    np.testing.assert_allclose(moved, [-0.01, 0.0, 0.01, 0.0], atol=1e-9)


def test_a_router_computes_in_float32_on_half_precision_activations():
    """A difference of one part in 1024 between two logits is lost in bfloat16, which has 8 bits."""
    model = ModelConfig(
        embed_dim=2, attention=AttentionConfig(num_heads=1), moe=MoeConfig(num_experts=2, top_k=1)
    )
    x_BTD = jnp.ones((1, 1, 2), jnp.bfloat16)
    kernel = jnp.array([[1.0, 1.0], [1.0, 1.0 + 2**-10]], jnp.float32)
    counts = jnp.ones((1, 1), bool)
    routing, _ = Router(model).apply({"params": {"kernel": kernel}}, x_BTD, counts, None)
    assert routing.experts.item() == 1
    assert routing.weights.dtype == jnp.float32
