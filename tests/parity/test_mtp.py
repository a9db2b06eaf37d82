"""Multi-token prediction on every layout: loss sums, statistics and gradients of one device."""

import dataclasses

import jax
import numpy as np
import pytest

from mtjax.config import MoeConfig, MtpConfig, OptimizerConfig
from mtjax.operation.metrics import METRICS
from tests.parity.layouts import (
    TOLERANCE,
    assert_close,
    by_name,
    changed,
    first_gradients,
    first_state,
    run_steps,
)

EXPERTS = MoeConfig(
    num_experts=8,
    router="sigmoid",
    score_bias=True,
    bias_update_rate=0.01,
    capacity_factor=0.8,
    balance_coefficient=0.1,
    balance_scope="global",
)


def modules(depth=2, attention=(), **settings):
    attention = {"dropout": 0.0, **dict(attention)}
    return changed(attention, **{"dropout": 0.0, "mtp": MtpConfig(depth=depth), **settings})


FEATURES = {
    "dense, packed, windows": modules(attention={"windows": (5, 0)}, packed=True),
    "dropout, remat, tied": modules(
        1, {"dropout": 0.1}, dropout=0.1, train={"remat": "full"}, tied_embeddings=True
    ),
    "experts, packed": modules(packed=True, moe=EXPERTS, num_layers=1),
}
CASES = [("experts, packed", "data=2,expert=2,tensor=2,microbatches=4")]
NIGHTLY = [
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
    without = [
        {name: leaf for name, leaf in by_name(tree).items() if not name.endswith("router.bias")}
        for tree in (gradients, expected)
    ]
    assert_close(*without, TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "optimizer",
    # Adam, which moves norms beside Muon, makes a step of rounding where a gradient is as small as
    # its epsilon; here one is 8e-9, of a norm of 1e-3.
    [OptimizerConfig(name="adafactor"), OptimizerConfig(name="muon", epsilon=1e-6)],
    ids=["adafactor", "muon"],
)
def test_steps_move_modules_and_their_biases_alike(optimizer):
    config = dataclasses.replace(FEATURES["experts, packed"], optimizer=optimizer)
    state, metrics = run_steps(config, "data=2,expert=2,tensor=2,microbatches=4", 2)
    expected, expected_metrics = run_steps(config, "data=1", 2)
    assert "train/mtp_loss" in metrics and set(metrics) <= set(METRICS)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=3e-5, err_msg=name)
    bias = expected.params["mtp"]["block"]["moe"]["router"]["bias"]
    assert bias.shape == (2, 8) and np.any(bias)
    np.testing.assert_array_equal(state.params["mtp"]["block"]["moe"]["router"]["bias"], bias)
    start = first_state(config).params
    moves, others = (jax.tree.map(np.subtract, s.params, start) for s in (state, expected))
    assert_close(moves, others, 5 * TOLERANCE)
