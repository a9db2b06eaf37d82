"""Sequences split over devices: loss and gradients are those of one device, for each exchange.

The reference is plain attention on one device, which knows no shards.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layers.ring import zigzag_order
from mtjax.training.state import create_state
from mtjax.training.step import dropout_key, evaluation_loss, loss_and_gradients
from tests.parity.layouts import (
    COMPILER_OPTIONS,
    TOLERANCE,
    assert_close,
    assert_gradients_are_those_of_one_device,
    by_name,
    changed,
    on_layout,
    place,
)

EXCHANGES = ("ring", "allgather", "ulysses")
PLAIN = changed({"dropout": 0.0}, dropout=0.0)
FEATURES = {
    "plain": PLAIN,
    "dropout": changed(),
    "dropout, packed, windows, sinks": changed({"windows": (5, 0), "sinks": True}, packed=True),
    "packed, windows, softcap": changed(
        {"dropout": 0.0, "windows": (5, 0), "logit_softcap": 1.5, "scale": 0.6},
        packed=True,
        dropout=0.0,
        num_layers=3,
    ),
    "packed, window": changed({"dropout": 0.0, "windows": (5,)}, packed=True, dropout=0.0),
    "packed, windows, sinks": changed(
        {"dropout": 0.0, "windows": (5, 0), "sinks": True}, packed=True, dropout=0.0
    ),
    "learned positions, remat": changed(
        {"dropout": 0.0, "num_kv_heads": 16}, {"remat": "full"},
        dropout=0.0, position="learned", max_positions=16, norm="layernorm", tied_embeddings=True,
    ),
}  # fmt: skip
MIXED = "fsdp=2,context=2,tensor=2"

PACKED = "packed, windows, softcap"

CASES = [
    (PACKED, "data=2,context=4,microbatches=4", "ring"),
    (PACKED, MIXED, "ring"),
    ("plain", "pipeline=2,context=2,tensor=2,microbatches=4", "ring"),
    ("dropout", "data=2,context=2,tensor=2,microbatches=4", "allgather"),
    ("dropout", "context=4,microbatches=4", "ulysses"),
    (PACKED, MIXED, "ulysses"),
    ("dropout, packed, windows, sinks", MIXED, "ring"),
]
SLOW = [CASES[0], *CASES[2:]]
CASES = CASES[1:2]
NIGHTLY = [("plain", "context=8", exchange) for exchange in EXCHANGES]
NIGHTLY += [("plain", f"context={size}", exchange) for size in (2, 4) for exchange in EXCHANGES]
NIGHTLY += [
    (feature, "data=2,context=4,microbatches=4", exchange)
    for exchange in EXCHANGES
    for feature in ("plain", PACKED)
    if (feature, exchange) != (PACKED, "ring")
]
NIGHTLY += [
    ("packed, windows, sinks", "data=2,context=4,microbatches=4", exchange)
    for exchange in EXCHANGES
]
NIGHTLY += [
    (PACKED, MIXED, "allgather"),
    ("dropout", "context=4,tensor=2,microbatches=4", "ring"),
    ("dropout", "pipeline=2,context=2,tensor=2,microbatches=4", "ring"),
    ("dropout, packed, windows, sinks", "data=2,context=4", "allgather"),
    ("dropout, packed, windows, sinks", MIXED, "ulysses"),
    ("packed, windows, sinks", MIXED, "ring"),
]
NIGHTLY += [
    ("learned positions, remat", "context=4,tensor=2", "ring"),
    ("plain", "context=4,tensor=2", "ulysses"),
    ("packed, window", "data=2,pipeline=2,context=2,microbatches=4", "ulysses"),
    ("packed, window", "data=2,pipeline=2,context=2,microbatches=4", "allgather"),
    ("plain", "pipeline=2,context=4,schedule=gpipe,microbatches=2", "ring"),
    ("packed, window", "fsdp=2,pipeline=2,context=2,microbatches=4", "ring"),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]
CASES += [pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY]


@pytest.mark.parametrize(("feature", "layout", "exchange"), CASES)
def test_loss_and_gradients_are_those_of_one_device(feature, layout, exchange):
    text = f"{layout},exchange={exchange}"
    assert_gradients_are_those_of_one_device(FEATURES[feature], text)


@pytest.fixture(scope="module")
def born_on_one_device():
    return jax.device_get(create_state(*on_layout(PLAIN, "data=1")))


@pytest.mark.parametrize("layout", ["context=8", MIXED])
def test_initial_states_are_bit_equal(layout, born_on_one_device):
    state = by_name(jax.device_get(create_state(*on_layout(PLAIN, layout))))
    for name, leaf in by_name(born_on_one_device).items():
        assert np.array_equal(state[name], leaf), f"initial {name} differs"


def test_zigzag_gives_a_shard_an_early_and_a_late_chunk():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def _run(layout, compute):
    """`compute(config, setup, mesh, params, batch)` on a layout, on the host."""
    config, mesh, setup, state, batch = place(PLAIN, layout)
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda *a: compute(config, setup, mesh, *a)).lower(state.params, batch)
        program = lowered.compile(compiler_options=COMPILER_OPTIONS)
        return jax.device_get(program(state.params, batch))


def test_shards_without_a_weighted_token_add_nothing_and_break_nothing():
    """Only the first two of 16 tokens count: all of them on one of four shards; then none."""

    def compute(config, setup, mesh, params, batch):
        def one(weights):
            key = dropout_key(config, 0)
            masked = batch._replace(weights=weights)
            return loss_and_gradients(config, setup, mesh, params, masked, key, 0.1)

        first = jnp.arange(16) < 2
        return one(jnp.where(first, batch.weights, 0.0)), one(0.0 * batch.weights)

    (sums, gradients), (no_sums, no_gradients) = _run("context=4,exchange=ring", compute)
    (expected_sums, expected), _ = _run("data=1", compute)
    np.testing.assert_allclose(sums, expected_sums, rtol=TOLERANCE)
    assert_close(gradients, expected, TOLERANCE)
    assert no_sums == (0.0, 0.0)
    assert all(np.all(leaf == 0.0) for leaf in jax.tree.leaves(no_gradients))


@pytest.mark.parametrize("exchange", ["ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_evaluation_gives_the_loss_of_one_device(exchange):
    found = _run(f"data=2,context=4,exchange={exchange}", evaluation_loss)
    np.testing.assert_allclose(found, _run("data=1", evaluation_loss), rtol=TOLERANCE)
