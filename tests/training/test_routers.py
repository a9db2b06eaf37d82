"""Routers in the step: which tokens count, what the loss adds up to, when biases move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig, MoeConfig
from mtjax.training.routers import batch_size, bias_metrics, counted
from tests.training.one_device import BASE, OPEN, ROWS, SEQ, make_batch, same, start

MOE = MoeConfig(num_experts=4, balance_coefficient=0.5, z_coefficient=0.25)


def with_experts(microbatches=1, **settings):
    model = dataclasses.replace(BASE.model, moe=dataclasses.replace(MOE, **settings), init_std=0.3)
    train = dataclasses.replace(BASE.train, microbatches=microbatches)
    return dataclasses.replace(BASE, model=model, train=train)


def test_positions_behind_the_last_weight_are_padding_and_those_before_are_not():
    """A prompt without weight counts: its experts shape what the answer sees."""
    weights = jnp.array([[0, 0, 1, 0.5, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1.0]])
    expected = [[1, 1, 1, 1, 0, 0], [0] * 6, [1] * 6]
    np.testing.assert_array_equal(counted(weights, None), expected)
    segments = jnp.array([[1, 1, 2, 2, 0, 0], [1] * 6, [1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(counted(weights, segments)[2], [1, 1, 1, 0, 0, 0])


def test_a_batch_is_as_large_as_what_counts_in_its_active_microbatches():
    weights = np.zeros((3, 2, 4), np.float32)
    weights[0], weights[1, 0, 2], weights[2] = 0.5, 2.0, np.nan
    size = batch_size(jnp.asarray(weights), None, jnp.int32(2))
    assert (size.weight, size.tokens, size.sequences) == (4 + 2, 8 + 3, 3)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global"])
def test_the_loss_is_cross_entropy_plus_the_weighted_router_losses(scope):
    state, run = start(with_experts(balance_scope=scope))
    _, metrics = run(state, make_batch())
    aux = 0.5 * metrics["moe/balance_loss"] + 0.25 * metrics["moe/z_loss"]  # one layer
    assert metrics["train/aux_loss"] == pytest.approx(aux, rel=1e-6)
    total = metrics["train/cross_entropy"] + aux
    assert metrics["train/loss"] == pytest.approx(total, rel=1e-6)
    assert metrics["moe/balance_loss"] > 1
    assert 1 <= metrics["moe/load_ratio"] <= 4
    assert 0 < metrics["moe/entropy"] <= np.log(4)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["sequence", "global"])
def test_neither_microbatches_nor_padding_rows_change_router_losses(scope):
    """Two rows alone, or with two rows of padding, in one part or four."""
    results = []
    for microbatches, tokens in ((1, 7), (4, 7), (4, 3)):
        weights = np.ones((ROWS, SEQ), np.float32)
        weights[2:] = 0
        batch = make_batch(microbatches, weights)
        padded = np.array(batch.tokens).reshape(ROWS, SEQ)
        padded[2:] = tokens
        batch = batch._replace(tokens=padded.reshape(batch.tokens.shape))
        config = with_experts(microbatches, balance_scope=scope, capacity_factor=0.6)
        state, run = start(config)
        results.append(run(state, batch))
    for _, metrics in results[1:]:
        for name, value in results[0][1].items():
            assert metrics[name] == pytest.approx(value, rel=1e-5), name
    assert same(results[1][0], results[2][0]), "what padding holds matters to nobody"


BIASED = {"router": "sigmoid", "score_bias": True, "bias_update_rate": 0.01}


def biases(state):
    return state.params["blocks"]["group0"]["block0"]["moe"]["router"]["bias"]


@pytest.mark.slow
def test_biases_move_by_the_rate_once_per_step_whatever_the_microbatches():
    moved = []
    for microbatches in (1, 4):
        state, run = start(with_experts(microbatches, **BIASED))
        after, _ = run(state, make_batch(microbatches))
        moved.append(biases(after))
    assert set(np.round(np.abs(moved[0]) / 0.01, 4).ravel()) <= {0.0, 1.0}
    assert np.any(moved[0] > 0) and np.any(moved[0] < 0)
    np.testing.assert_array_equal(*moved)


def test_a_skipped_step_leaves_the_biases():
    state, run = start(with_experts(**BIASED))
    after, metrics = run(state, make_batch(), OPEN._replace(loss=np.float32(0.1)))
    assert metrics["train/skipped"] == 1
    assert same(after._replace(step=state.step), state)


@pytest.mark.slow
def test_biases_even_out_the_loads():
    """Weights stand still and the first expert starts favoured: only the biases move."""
    frozen = dataclasses.replace(BASE.optimizer, learning_rate=1e-9)
    config = dataclasses.replace(
        with_experts(**(BIASED | {"bias_update_rate": 0.005, "balance_coefficient": 0.0})),
        optimizer=frozen,
    )
    state, run = start(config)
    state = jax.tree.map(np.copy, state)
    biases(state)[:, 0] = 0.2
    ratios = []
    for _ in range(60):
        state, metrics = run(state, make_batch())
        ratios.append(float(metrics["moe/load_ratio"]))
    assert ratios[0] > 1.4
    assert np.mean(ratios[-10:]) < 1.1


def test_metrics_of_biases_are_over_layers_and_modules_of_multi_token_prediction():
    def block(bias_LE):
        return {"moe": {"router": {"bias": jnp.array(bias_LE)}}}

    params = {
        "blocks": {
            "group0": {"block0": {}},
            "group1": {"block0": block([[0.3, -0.4], [0.0, 0.1]])},
        },
        "mtp": {"block": block([[0.6, -0.8]])},
    }
    stats = {"group0": {"block0": None}, "group1": {"block0": 1}, "mtp": {"block": 1}}
    found = bias_metrics(params, stats)
    expected = {"moe/bias_min": -0.8, "moe/bias_max": 0.6, "moe/bias_norm": 1.0}
    assert found == {name: pytest.approx(value) for name, value in expected.items()}


def test_routers_stay_float32_in_a_half_precision_step():
    from mtjax.sharding import compute_dtypes, make_mesh
    from mtjax.training.state import make_setup

    config = with_experts(**BIASED)
    setup = make_setup(config, make_mesh(config.mesh, jax.devices()[:1]))
    dtypes = compute_dtypes(setup.boxes, jnp.bfloat16)
    moe = dtypes["blocks"]["group0"]["block0"]["moe"]
    assert moe["router"] == {"kernel": np.float32, "bias": np.float32}
    assert moe["up"] == jnp.bfloat16


@pytest.mark.slow
def test_every_expert_is_a_matrix_of_its_own_to_muon():
    """Two experts whose gradients differ a thousandfold move by equal norms."""
    from mtjax.sharding import make_mesh, unbox
    from mtjax.training.optimizer import make_optimizer
    from mtjax.training.state import make_setup

    model = ModelConfig(
        embed_dim=8, ffn_dim=8, num_layers=1, attention=AttentionConfig(num_heads=1), moe=MOE
    )
    config = dataclasses.replace(BASE, model=model)
    boxes = make_setup(config, make_mesh(config.mesh, jax.devices()[:1])).boxes
    settings = dataclasses.replace(BASE.optimizer, name="muon", learning_rate=1.0, weight_decay=0.0)
    optimizer = make_optimizer(settings, 10, boxes)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape), unbox(boxes))
    up = (
        jax.random.normal(jax.random.key(0), (1, 4, 8, 8))
        * jnp.array([1, 1e-3, 1, 1])[:, None, None]
    )
    grads = jax.tree.map(lambda p: jnp.ones_like(p), params)
    grads["blocks"]["group0"]["block0"]["moe"]["up"] = up
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    moved = updates["blocks"]["group0"]["block0"]["moe"]["up"]
    norms = jnp.linalg.norm(moved[0], axis=(1, 2))
    assert norms[1] == pytest.approx(float(norms[0]), rel=0.15)
