"""Experts on every layout: loss, statistics and gradients are those of one device.

Float32 throughout. Half of the cases drop tokens: which ones depends on the sequence alone.
"""

import dataclasses

import jax
import numpy as np
import pytest

from mtjax.config import MoeConfig, OptimizerConfig
from mtjax.training.state import create_state
from tests.parity.layouts import (
    TOLERANCE,
    assert_close,
    by_name,
    changed,
    first_gradients,
    first_state,
    on_layout,
    run_steps,
)

ALWAYS = {"num_experts": 8, "top_k": 2, "balance_coefficient": 0.1, "z_coefficient": 0.01}


def experts(attention=(), packed=False, train=(), **settings):
    others = {n: settings.pop(n) for n in list(settings) if n in MODEL_FIELDS}
    moe = MoeConfig(**(ALWAYS | settings))
    return changed(attention, train, packed, moe=moe, num_layers=2, **others)


MODEL_FIELDS = ("activation", "activation_clamp", "mlp_bias")

FEATURES = {
    "roomy": experts(capacity_factor=8.0),
    "drops": experts(capacity_factor=0.7),
    "dropless": experts(dispatcher="dropless"),
    "allgather": experts(dispatcher="allgather"),
    "drops by position, packed, shared, per sequence": experts(
        packed=True,
        capacity_factor=0.5,
        drop_policy="position",
        shared_ffn_dim=24,
        shared_gate=True,
        balance_scope="sequence",
        train={"remat": "full"},
    ),
    "whole batch balanced, dense layer first": experts(
        balance_scope="global", first_dense=1, ffn_dim=24, train={"remat": "selective"}
    ),
    "DeepSeek": experts(
        top_k=3,
        router="sigmoid",
        score_bias=True,
        num_groups=4,
        top_groups=2,
        routed_scale=2.5,
        router_noise=0.1,
        device_groups=4,
        device_balance_coefficient=0.05,
        balance_scope="sequence",
        dispatcher="dropless",
    ),
    "GPT-OSS": experts(
        {"sinks": True, "windows": (5, 0), "qkv_bias": True, "out_bias": True},
        capacity_factor=0.7,
        router="softmax_after_topk",
        router_bias=True,
        activation="clamped_swiglu",
        activation_clamp=1.0,
        mlp_bias=True,
    ),
    "sinkhorn": experts(
        router="sinkhorn", capacity_factor=0.7, balance_coefficient=0.0, packed=True
    ),
    "expert choice": experts(
        router="expert_choice", renormalize=False, balance_coefficient=0.0, packed=True
    ),
}
DROPPING = {
    "drops",
    "drops by position, packed, shared, per sequence",
    "whole batch balanced, dense layer first",
    "GPT-OSS",
    "sinkhorn",
}
FEW = ("GPT-OSS", "sinkhorn", "expert choice")
"""Features of the layer or the router alone, which dispatchers don't know."""
PARTS = "expert=2,tensor=2,fsdp=2"
QUICK = [
    ("drops", "data=2,expert=4,microbatches=4"),
    ("dropless", f"{PARTS},microbatches=4"),
    ("GPT-OSS", PARTS),
]
LAYOUTS = [
    "expert=2",
    "expert=4",
    "expert=8",
    "expert=8,microbatches=4",
    "data=2,expert=4",
    "data=2,expert=2,tensor=2",
    "expert=4,tensor=2,microbatches=4",
    "tensor=8",
    "fsdp=4,expert=2,microbatches=4",
    "data=2,fsdp=2,expert=2,microbatches=4",
    "data=4,tensor=2,microbatches=4",
    PARTS,
]
SLOW = [("DeepSeek", "data=2,fsdp=2,expert=2,microbatches=4"), *QUICK[1:]]
CASES = [
    QUICK[0],
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    *(
        pytest.param(feature, layout, marks=pytest.mark.nightly)
        for feature in FEATURES
        for layout in LAYOUTS
        if (feature, layout) not in QUICK + SLOW
        and (feature not in FEW or layout in LAYOUTS[4:10:2])
    ),
    *(
        pytest.param(feature, f"{PARTS},microbatches=4", marks=pytest.mark.nightly)
        for feature in (
            "drops by position, packed, shared, per sequence",
            "sinkhorn",
            "expert choice",
        )
    ),
]


def reference(config, layout):
    """One device; with the same microbatches where the balance loss is defined by them."""
    moe, micro = config.model.moe, layout.partition("microbatches=")[2]
    by_definition = moe.balance_scope == "microbatch" and micro
    return f"data=1,microbatches={micro}" if by_definition else "data=1"


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_loss_statistics_and_gradients_are_those_of_one_device(feature, layout):
    config = FEATURES[feature]
    sums, gradients = first_gradients(config, layout)
    expected_sums, expected = first_gradients(config, reference(config, layout))
    for ours, theirs in zip(jax.tree.leaves(sums), jax.tree.leaves(expected_sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    routed = dropped(expected_sums)
    assert (routed > 0.05) == (feature in DROPPING), routed
    for name, leaf in by_name(gradients).items():
        if name.endswith("router.bias"):
            assert not np.any(leaf)
    assert_close(without_biases(gradients), without_biases(expected), TOLERANCE)


def dropped(sums):
    """Share of the token-expert pairs that found no room."""
    layers = [block for group in sums.router.values() for block in group.values() if block]
    return sum(s.dropped.sum() for s in layers) / sum(s.load.sum() for s in layers)


def without_biases(gradients):
    return {n: leaf for n, leaf in by_name(gradients).items() if not n.endswith("router.bias")}


@pytest.mark.nightly
def test_dispatchers_that_drop_nothing_agree_on_a_mesh():
    found = {
        name: first_gradients(FEATURES[name], layout)
        for name, layout in (
            ("roomy", "expert=8"),
            ("dropless", "data=1"),
            ("allgather", "expert=4,tensor=2"),
        )
    }
    for sums, gradients in found.values():
        np.testing.assert_allclose(sums.total, found["roomy"][0].total, rtol=TOLERANCE)
        assert_close(gradients, found["roomy"][1], TOLERANCE)


@pytest.mark.parametrize("layout", [pytest.param("expert=8", marks=pytest.mark.slow), PARTS])
def test_initial_states_are_bit_equal(layout):
    config = FEATURES["DeepSeek"]
    expected = by_name(first_state(config))
    state = by_name(jax.device_get(create_state(*on_layout(config, layout))))
    for name, leaf in expected.items():
        assert np.array_equal(state[name], leaf), f"initial {name} differs"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data=2,expert=2,tensor=2,microbatches=1", marks=pytest.mark.nightly),
        pytest.param("data=2,expert=2,tensor=2,microbatches=4", marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2,expert=2,microbatches=4", marks=pytest.mark.nightly),
    ],
)
def test_steps_move_weights_biases_and_metrics_alike(layout):
    moe = dataclasses.replace(
        FEATURES["DeepSeek"].model.moe,
        bias_update_rate=0.01,
        dispatcher="capacity",
        balance_scope="global",
    )
    base = FEATURES["DeepSeek"]
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, moe=moe),
        optimizer=OptimizerConfig(name="muon", learning_rate=1e-3),
    )
    state, metrics = run_steps(config, layout, 3)
    expected, expected_metrics = run_steps(config, "data=1", 3)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=3e-5, err_msg=name)
    assert {n for n in metrics if n.startswith("moe/")} == {
        "moe/dropped_ratio",
        "moe/load_ratio",
        "moe/entropy",
        "moe/balance_loss",
        "moe/device_balance_loss",
        "moe/z_loss",
        "moe/bias_min",
        "moe/bias_max",
        "moe/bias_norm",
    }
    states, others = by_name(state.params), by_name(expected.params)
    for name, leaf in others.items():
        if name.endswith("router.bias"):
            assert np.any(leaf != 0)
            bias_LE = leaf  # all layers are alike here, so one stack holds them
            assert metrics["moe/bias_min"] == bias_LE.min() < 0 < bias_LE.max()
            assert metrics["moe/bias_max"] == bias_LE.max()
            norm = np.linalg.norm(bias_LE, axis=1).max()
            np.testing.assert_allclose(metrics["moe/bias_norm"], norm, rtol=1e-6)
            np.testing.assert_array_equal(states[name], leaf)
            # Three moves of +-0.01 or none: multiples of the rate.
            np.testing.assert_allclose(np.round(leaf / 0.01), leaf / 0.01, atol=1e-4)
    start = first_state(config).params
    moves, expected_moves = (jax.tree.map(np.subtract, s.params, start) for s in (state, expected))
    assert_close(moves, expected_moves, 5 * TOLERANCE)
