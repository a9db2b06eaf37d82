"""All axes together: experts inside pipelines and split sequences, each schedule and dispatcher.

Loss, what routers did, every gradient and its norm are those of one device, in float32.
"""

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtjax.checkpoint.manager import Checkpointer
from mtjax.checkpoint.manifest import build_manifest
from mtjax.config import CheckpointConfig, MoeConfig
from mtjax.training.state import create_state
from mtjax.training.step import dropout_key, evaluation_loss, loss_and_gradients
from tests.parity.layouts import (
    COMPILER_OPTIONS,
    TOLERANCE,
    assert_close,
    by_name,
    changed,
    first_gradients,
    first_state,
    on_layout,
    place,
)
from tests.parity.test_experts import ALWAYS, dropped, reference, without_biases


def experts(num_layers, model=(), packed=False, train=(), **settings):
    return changed(
        {"dropout": 0.0}, train, packed,
        dropout=0.0, num_layers=num_layers, moe=MoeConfig(**(ALWAYS | settings)), **dict(model),
    )  # fmt: skip


FEATURES = {
    "drops, whole batch balanced": experts(4, balance_scope="global", capacity_factor=0.7),
    "drops by position, packed, 3 layers": experts(
        3,
        packed=True,
        capacity_factor=0.5,
        drop_policy="position",
        balance_scope="sequence",
        shared_ffn_dim=24,
        shared_gate=True,
    ),
    "dropless, every second of 7 layers": experts(
        7, every=2, ffn_dim=24, dispatcher="dropless", balance_scope="sequence"
    ),
    "all-gather, DeepSeek's router": experts(
        4,
        top_k=3,
        router="sigmoid",
        score_bias=True,
        num_groups=4,
        top_groups=2,
        routed_scale=2.5,
        device_groups=4,
        device_balance_coefficient=0.05,
        balance_scope="sequence",
        dispatcher="allgather",
        train={"remat": "full"},
    ),
    "drops, each microbatch balanced": experts(
        4, capacity_factor=0.7, train={"remat": "selective"}
    ),
    "drops, dense layers first": experts(
        5, first_dense=2, ffn_dim=24, capacity_factor=0.7, balance_scope="sequence"
    ),
    "noise": experts(4, router_noise=0.1, balance_scope="sequence", capacity_factor=0.7),
}
DROPS, PACKED, DROPLESS, DEEPSEEK, MICROBATCH, DENSE_FIRST, NOISE = FEATURES

# With what test_experts.py, test_pipeline.py and test_context.py run, each pair of axes is met.
CASES = [
    (PACKED, "data=2,pipeline=2,expert=2,microbatches=4"),
]
NIGHTLY = [
    (PACKED, "context=2,expert=2,tensor=2"),
    (PACKED, "fsdp=2,pipeline=2,context=2,schedule=gpipe,microbatches=4"),
    (DROPS, "data=2,pipeline=2,expert=2,microbatches=4"),
    (DROPLESS, "fsdp=2,pipeline=2,context=2,chunks=2,microbatches=4"),
    (DEEPSEEK, "pipeline=2,tensor=2,schedule=gpipe,microbatches=4"),
    (DROPS, "data=2,context=2,microbatches=4"),
    (PACKED, "pipeline=2,expert=4,microbatches=1"),
    (DROPS, "pipeline=2,context=2,tensor=2,microbatches=4"),
    (DROPS, "pipeline=4,context=2,exchange=ulysses,microbatches=8"),
    (DROPLESS, "pipeline=2,expert=4,schedule=gpipe,microbatches=1"),
    (DROPLESS, "data=2,context=2,expert=2,exchange=allgather"),
    (DEEPSEEK, "pipeline=2,expert=2,tensor=2,chunks=2,microbatches=4"),
    (DEEPSEEK, "fsdp=2,context=2,expert=2,microbatches=4"),
    (MICROBATCH, "data=2,pipeline=2,expert=2,chunks=2,microbatches=4"),
    (MICROBATCH, "pipeline=2,context=4,microbatches=4"),
    (MICROBATCH, "data=2,pipeline=2,tensor=2,schedule=gpipe,microbatches=8"),
    (DENSE_FIRST, "data=2,pipeline=2,expert=2,microbatches=4"),
    (DENSE_FIRST, "pipeline=2,tensor=2,chunks=2,microbatches=4"),
    (NOISE, "data=2,pipeline=2,expert=2,microbatches=4"),
    (NOISE, "fsdp=2,pipeline=2,context=2,schedule=gpipe,exchange=ulysses,microbatches=4"),
    (NOISE, "pipeline=2,context=2,expert=2,microbatches=4"),
]
SIXTEEN_DEVICES = [
    (DROPS, "data=2,pipeline=2,context=2,expert=2,microbatches=4"),
    (PACKED, "fsdp=2,pipeline=2,context=2,tensor=2,schedule=gpipe,microbatches=4"),
    (DEEPSEEK, "pipeline=2,context=2,expert=2,tensor=2,chunks=2,microbatches=4"),
    (DROPLESS, "data=2,fsdp=2,pipeline=2,expert=2,microbatches=1"),
    (MICROBATCH, "data=2,context=2,expert=2,tensor=2,microbatches=4"),
]


def check(feature, layout):
    """Raise AssertionError unless the first step on this layout is that of one device."""
    config = FEATURES[feature]
    sums, gradients = first_gradients(config, layout)
    expected_sums, expected = first_gradients(config, reference(config, layout))
    share = dropped(expected_sums)
    assert (share > 0.05) == ("drops" in feature or feature == NOISE), share
    ours, theirs = by_name(sums), by_name(expected_sums)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=TOLERANCE, err_msg=name)
    assert_close(without_biases(gradients), without_biases(expected), TOLERANCE)
    norms = optax.global_norm(gradients), optax.global_norm(expected)
    np.testing.assert_allclose(*norms, rtol=TOLERANCE)


def check_initial_weights(feature, layout):
    """Raise AssertionError unless they are bit-equal to those of one device."""
    config = FEATURES[feature]
    state = by_name(jax.device_get(create_state(*on_layout(config, layout))))
    for name, leaf in by_name(first_state(config)).items():
        assert np.array_equal(state[name], leaf), f"initial {name} differs"


ALL = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES] + [
    pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY
]


@pytest.mark.parametrize(("feature", "layout"), ALL)
def test_loss_statistics_and_gradients_are_those_of_one_device(feature, layout):
    check(feature, layout)


@pytest.mark.parametrize(
    ("feature", "layout"),
    [(PACKED, "pipeline=2,context=2,expert=2,microbatches=4")]
    + [pytest.param(*case, marks=pytest.mark.nightly) for case in CASES + NIGHTLY],
)
def test_initial_weights_are_bit_equal(feature, layout):
    check_initial_weights(feature, layout)


@pytest.mark.nightly
@pytest.mark.parametrize(("feature", "layout"), SIXTEEN_DEVICES)
def test_four_axes_together_are_one_device(feature, layout):
    """In a process of their own: this one has eight devices."""
    code = f"from tests.parity import test_combinations as t; t.check({feature!r}, {layout!r}); "
    code += f"t.check_initial_weights({feature!r}, {layout!r})"
    flags = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        (PACKED, "pipeline=2,expert=2,schedule=gpipe"),
        (DROPS, "pipeline=2,context=2,microbatches=4"),
        (DEEPSEEK, "expert=4"),
    ],
)
def test_gradients_of_two_processes_are_those_of_one_device(feature, layout, tmp_path):
    """Each process has two of the four devices: stages, or the first axis, lie across them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    file = str(tmp_path / "gradients.npz")
    child = str(Path(__file__).parent / "children" / "two_processes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, child, port, number, feature, layout, file],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        errors = [process.communicate(timeout=1200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-3000:]
    expected = first_gradients(FEATURES[feature], reference(FEATURES[feature], layout))[1]
    with np.load(file) as found:
        assert_close(without_biases(dict(found)), without_biases(expected), TOLERANCE)


def computed(function, config, mesh, *args):
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*args)
        return jax.device_get(lowered.compile(compiler_options=COMPILER_OPTIONS)(*args))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pipeline=2,context=2,expert=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2,expert=2,microbatches=4", marks=pytest.mark.nightly),
    ],
)
def test_evaluation_has_the_loss_of_one_device(layout):
    losses = []
    for text in (layout, "data=1"):
        config, mesh, setup, state, batch = place(FEATURES[PACKED], text)

        def run(params, batch, config=config, mesh=mesh, setup=setup):
            return evaluation_loss(config, setup, mesh, params, batch)

        losses.append(computed(run, config, mesh, state.params, batch))
    np.testing.assert_allclose(losses[0], losses[1], rtol=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_batch_ramp_leaves_out_the_microbatches_without_data(schedule):
    """Their weights are garbage: neither gradients nor statistics know."""
    layout, active = f"pipeline=2,expert=2,schedule={schedule},microbatches=8", 5
    config, mesh, setup, state, batch = place(FEATURES[DROPS], layout)
    rest = batch.weights.at[active:]
    poisoned = batch._replace(weights=rest.set(jnp.nan), active=jnp.int32(active))
    alone = batch._replace(weights=rest.set(0.0))

    def run(params, batch):
        key = dropout_key(config, 0)
        return loss_and_gradients(config, setup, mesh, params, batch, key, 0.01)

    got, expected = (computed(run, config, mesh, state.params, b) for b in (poisoned, alone))
    assert_close(got, expected, TOLERANCE)


def test_a_checkpoint_restores_bit_by_bit_on_any_other_layout(tmp_path):
    """Of 3 layers in 2 stages, stored in pieces over the pipeline."""
    model = FEATURES[PACKED]
    config, _, _, state, _ = place(model, "pipeline=2,context=2,expert=2,microbatches=4")
    manifest = build_manifest(dataclasses.asdict(config), config.mesh.sizes)
    with Checkpointer(tmp_path, CheckpointConfig(), manifest) as checkpointer:
        checkpointer.save(1, state, {}, wait=True)
        for layout in ("fsdp=2,tensor=4", "data=2,context=2,expert=2"):
            other = on_layout(model, layout)[2]
            restored, _ = checkpointer.restore(other.abstract, 1)
            assert jax.tree.all(jax.tree.map(np.array_equal, restored, state))
            for leaf, abstract in zip(
                jax.tree.leaves(restored), jax.tree.leaves(other.abstract), strict=True
            ):
                assert leaf.sharding == abstract.sharding
