"""Multi-token prediction on every layout: loss sums, statistics and gradients of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mtjax.config import MlaConfig, MoeConfig, MtpConfig, OptimizerConfig
from mtjax.operation.metrics import METRICS
from mtjax.training.step import dropout_key, evaluation_loss, loss_and_gradients
from tests.parity.layouts import (
    COMPILER_OPTIONS,
    TOLERANCE,
    assert_close,
    changed,
    first_gradients,
    first_state,
    place,
    run_steps,
)
from tests.parity.test_experts import without_biases

EXPERTS = MoeConfig(
    num_experts=8,
    router="sigmoid",
    score_bias=True,
    bias_update_rate=0.01,
    capacity_factor=0.8,
    balance_coefficient=0.1,
    balance_scope="global",
)
MLA = MlaConfig(kv_rank=16, q_rank=24, nope_dim=6, rope_dim=4, value_dim=8)


def modules(depth=2, attention=(), **settings):
    attention = {"dropout": 0.0, **dict(attention)}
    return changed(attention, **{"dropout": 0.0, "mtp": MtpConfig(depth=depth), **settings})


FEATURES = {
    "dense, packed, windows": modules(attention={"windows": (5, 0)}, packed=True),
    "dropout, remat, tied": modules(
        1, {"dropout": 0.1}, dropout=0.1, train={"remat": "full"}, tied_embeddings=True
    ),
    "experts, packed": modules(packed=True, moe=EXPERTS, num_layers=1),
    "4 layers, packed, dropout, tied": modules(
        attention={"dropout": 0.1}, packed=True, dropout=0.1, num_layers=4, tied_embeddings=True
    ),
    "DeepSeek": modules(
        1,
        {"num_heads": 8, "num_kv_heads": None, "head_dim": None, "mla": MLA},
        num_layers=5,
        moe=dataclasses.replace(EXPERTS, first_dense=1, ffn_dim=24),
        train={"remat": "full"},
    ),
}
TIED, DEEPSEEK = "4 layers, packed, dropout, tied", "DeepSeek"
CASES = [
    pytest.param(
        DEEPSEEK, "data=2,pipeline=2,expert=2,chunks=2,microbatches=4", marks=pytest.mark.slow
    ),
]
NIGHTLY = [
    ("experts, packed", "data=2,expert=2,tensor=2,microbatches=4"),
    (TIED, "pipeline=4,microbatches=1"),
    (TIED, "pipeline=2,schedule=gpipe,microbatches=1"),
    (TIED, "pipeline=4,tensor=2,schedule=gpipe,microbatches=4"),
    (TIED, "pipeline=2,chunks=2,tensor=2,microbatches=4"),
    (TIED, "data=2,pipeline=2,fsdp=2,microbatches=8"),
    (DEEPSEEK, "pipeline=2,expert=2,tensor=2,microbatches=1"),
    (DEEPSEEK, "pipeline=2,expert=2,tensor=2,microbatches=4"),
    (DEEPSEEK, "pipeline=2,expert=4,schedule=gpipe,microbatches=4"),
    (DEEPSEEK, "pipeline=2,context=2,expert=2,microbatches=4"),
    (DEEPSEEK, "pipeline=4,expert=2,microbatches=8"),
    (DEEPSEEK, "fsdp=2,pipeline=2,expert=2,microbatches=2"),
    ("dense, packed, windows", "fsdp=2,context=2,tensor=2,microbatches=4,exchange=ring"),
    *(("dense, packed, windows", layout) for layout in ("data=8", "fsdp=8", "tensor=8")),
    *(
        ("dense, packed, windows", f"data=2,context=4,microbatches=4,exchange={exchange}")
        for exchange in ("ring", "allgather", "ulysses")
    ),
    ("dropout, remat, tied", "data=2,fsdp=2,tensor=2,microbatches=4"),
    ("experts, packed", "expert=8"),
    ("experts, packed", "fsdp=2,expert=2,tensor=2,microbatches=2"),
]
CASES += [pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY]


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_loss_statistics_and_gradients_are_those_of_one_device(feature, layout):
    config = FEATURES[feature]
    sums, gradients = first_gradients(config, layout)
    expected_sums, expected = first_gradients(config, "data=1")
    assert expected_sums.mtp > 0
    for ours, theirs in zip(jax.tree.leaves(sums), jax.tree.leaves(expected_sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert_close(without_biases(gradients), without_biases(expected), TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_batch_ramp_leaves_out_the_microbatches_without_data(schedule):
    """Their weights are garbage: neither gradients nor statistics know."""
    layout, active = f"pipeline=2,expert=2,schedule={schedule},microbatches=4", 3
    config, mesh, setup, state, batch = place(FEATURES[DEEPSEEK], layout)
    rest = batch.weights.at[active:]
    poisoned = batch._replace(weights=rest.set(np.nan), active=np.int32(active))
    alone = batch._replace(weights=rest.set(0.0))

    def run(params, batch):
        return loss_and_gradients(config, setup, mesh, params, batch, dropout_key(config, 0), 0.01)

    def computed(batch):
        with jax.set_mesh(mesh):
            lowered = jax.jit(run).lower(state.params, batch)
            compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)
            return jax.device_get(compiled(state.params, batch))

    (sums, gradients), (expected_sums, expected) = computed(poisoned), computed(alone)
    for ours, theirs in zip(jax.tree.leaves(sums), jax.tree.leaves(expected_sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert_close(without_biases(gradients), without_biases(expected), TOLERANCE)


@pytest.mark.nightly
def test_an_evaluation_in_a_pipeline_is_of_the_model_alone():
    losses = []
    for text in ("pipeline=2,expert=2,tensor=2,microbatches=4", "data=1"):
        config, mesh, setup, state, batch = place(FEATURES[DEEPSEEK], text)
        run = functools.partial(evaluation_loss, config, setup, mesh)
        with jax.set_mesh(mesh):
            losses.append(jax.jit(run)(state.params, batch))
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        ("experts, packed", "data=2,expert=2,tensor=2,microbatches=4"),
        (DEEPSEEK, "data=2,pipeline=2,expert=2,microbatches=4"),
    ],
)
@pytest.mark.parametrize(
    "optimizer",
    # An optimizer that divides each entry by its own size makes a step of what is rounding only:
    # here entries of 2e-9, of gradients of 4e-3. So none that does, and beside Muon, where Adam
    # moves the norms, an epsilon above them. The rate lifts moves out of the rounding of weights.
    [OptimizerConfig(name="sgd", learning_rate=0.3), OptimizerConfig(name="muon", epsilon=1e-6)],
    ids=["sgd", "muon"],
)
def test_steps_move_modules_and_their_biases_alike(feature, layout, optimizer):
    config = dataclasses.replace(FEATURES[feature], optimizer=optimizer)
    state, metrics = run_steps(config, layout, 2)
    expected, expected_metrics = run_steps(config, "data=1", 2)
    assert "train/mtp_loss" in metrics and set(metrics) <= set(METRICS)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=3e-5, err_msg=name)
    bias = expected.params["mtp"]["block"]["moe"]["router"]["bias"]
    assert bias.shape == (config.model.mtp.depth, 8) and np.any(bias)
    np.testing.assert_array_equal(state.params["mtp"]["block"]["moe"]["router"]["bias"], bias)
    start = first_state(config).params
    moves, others = (jax.tree.map(np.subtract, s.params, start) for s in (state, expected))
    assert_close(moves, others, 5 * TOLERANCE)
