"""One device is the reference: every layout starts from its bits and agrees in loss and gradients.

Float32 throughout. Reductions in another order differ by a few units in the last place (6e-8), and
the longest chains here add some thousand terms; 1e-5 relative leaves that room and no more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    resolve_backends,
    validate,
)
from mtjax.config.mesh import parse_layout
from mtjax.sharding import make_mesh
from mtjax.training.state import create_state, make_setup
from mtjax.training.step import (
    Limits,
    StepInput,
    abstract_batch,
    dropout_key,
    loss_and_gradients,
    make_train_step,
)

TOLERANCE = 1e-5
ROWS, SEQ = 32, 16

# Heads divide by 8, two query heads share a key head; 50257 ids are padded to 50304.
BASE = Config(
    model=ModelConfig(
        vocab_size=50257,
        embed_dim=32,
        num_layers=2,
        ffn_dim=64,
        attention=AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=4, dropout=0.1),
        dropout=0.1,
        init_std=0.1,
    ),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(seq_len=SEQ, batch_size=ROWS, loss_chunk=6, z_loss=1e-3),
    precision="fp32",
)
SMALL = dataclasses.replace(BASE.model, vocab_size=250)


def changed(attention=(), train=(), **model):
    """BASE with a small vocabulary and other settings."""
    attention = dataclasses.replace(SMALL.attention, **dict(attention))
    return dataclasses.replace(
        BASE,
        model=dataclasses.replace(SMALL, attention=attention, **model),
        train=dataclasses.replace(BASE.train, **dict(train)),
    )


FEATURES = {
    "base": BASE,
    "packed documents and windows that don't divide the layers": dataclasses.replace(
        changed({"windows": (5, 0)}, num_layers=3), data=DataConfig()
    ),
    "GPT-2": changed(
        {"qkv_bias": True, "out_bias": True},
        position="learned",
        max_positions=SEQ,
        norm="layernorm",
        activation="gelu",
        mlp_bias=True,
        tied_embeddings=True,
    ),
    "Gemma-2": changed(
        {"logit_softcap": 2.0, "windows": (4, 0), "scale": 0.3},
        activation="geglu",
        norm_unit_offset=True,
        post_norm=True,
        embed_scale=True,
        tied_embeddings=True,
        logit_softcap=3.0,
    ),
    "parallel residual, qk norm, squared ReLU": changed(
        {"qk_norm": True}, parallel_residual=True, activation="relu2"
    ),
    "full remat": changed(train={"remat": "full"}),
    "selective remat, unrolled": changed(train={"remat": "selective", "unroll_layers": True}),
}

LAYOUTS = ["data=8", "fsdp=8", "tensor=8", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"]
CASES = [("base", f"{layout},microbatches={m}") for layout in LAYOUTS for m in (1, 4)]
CASES += [
    (feature, "data=2,fsdp=2,tensor=2,microbatches=4") for feature in FEATURES if feature != "base"
]
CASES += [("base", "data=2,fsdp=4"), ("Gemma-2", "tensor=2"), ("GPT-2", "data=4,microbatches=2")]


def make_batch(config: Config) -> StepInput:
    """Random tokens; a third of the rows without any weight, the others unevenly weighted."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.model.vocab_size, (ROWS, SEQ + 1)).astype(np.int32)
    weights = (rng.random((ROWS, SEQ)) < 0.7) * rng.random((ROWS, 1))
    weights[:11] = 0
    segments = np.sort(rng.integers(1, 4, (ROWS, SEQ)), axis=1).astype(np.int32)
    micro = config.train.microbatches

    def cut(x):
        return x.reshape(micro, ROWS // micro, *x.shape[1:])

    return StepInput(
        tokens=cut(ids[:, :-1]),
        labels=cut(ids[:, 1:]),
        weights=cut(weights.astype(np.float32)),
        positions=cut(np.tile(np.arange(SEQ, dtype=np.int32), (ROWS, 1))),
        segments=cut(segments) if config.data.separate_documents else None,
        rows=cut(np.arange(ROWS, dtype=np.int32)),
        active=None,
    )


def place(config: Config, text: str):
    """The config on that layout, its mesh, setup, initial state and batch."""
    layout = parse_layout(text)
    train = dataclasses.replace(config.train, microbatches=layout.microbatches or 1)
    config = validate(dataclasses.replace(config, mesh=layout.mesh, train=train))
    config = resolve_backends(config, "cpu")
    mesh = make_mesh(config.mesh, jax.devices()[: layout.num_devices])
    setup = make_setup(config, mesh)
    batch = jax.tree.map(
        lambda x, a: jax.device_put(x, a.sharding), make_batch(config), abstract_batch(config, mesh)
    )
    return config, mesh, setup, create_state(config, mesh, setup), batch


@functools.cache
def first_gradients(feature: str, text: str):
    """Initial parameters, loss sums and gradients on the host."""
    config, mesh, setup, state, batch = place(FEATURES[feature], text)

    def run(params, batch):
        per_token = 1.0 / jnp.sum(batch.weights)
        key = dropout_key(config, 0)
        return loss_and_gradients(config, setup, mesh, params, batch, key, per_token)

    with jax.set_mesh(mesh):
        sums, gradients = jax.jit(run)(state.params, batch)
    return jax.device_get((state.params, sums, gradients))


def by_name(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_close(got, expected, tolerance):
    """Each leaf, relative to its norm; a leaf that is zero but for rounding, to the largest."""
    got, expected = by_name(got), by_name(expected)
    largest = max(float(np.linalg.norm(leaf)) for leaf in expected.values())
    for name, leaf in expected.items():
        # The gradient of a key bias is zero by the shift invariance of softmax.
        scale = largest if name.endswith("key.bias") else float(np.linalg.norm(leaf))
        assert scale > 0, f"{name} tests nothing"
        error = float(np.linalg.norm(got[name] - leaf)) / scale
        assert error <= tolerance, f"{name}: relative difference {error:.2e}"


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_weights_loss_and_gradients_are_those_of_one_device(feature, layout):
    params, sums, gradients = first_gradients(feature, layout)
    expected_params, expected_sums, expected_gradients = first_gradients(feature, "data=1")
    for name, leaf in by_name(expected_params).items():
        assert np.array_equal(by_name(params)[name], leaf), f"initial {name} differs"
    np.testing.assert_allclose(sums, expected_sums, rtol=TOLERANCE)
    assert_close(gradients, expected_gradients, TOLERANCE)


def run_steps(config: Config, layout: str, steps: int):
    """State and metrics after some whole steps on the same batch."""
    config, mesh, setup, state, batch = place(config, layout)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
    with jax.set_mesh(mesh):
        step = jax.jit(make_train_step(config, mesh, setup), out_shardings=(shardings, None))
        for _ in range(steps):
            state, metrics = step(state, batch, Limits(np.float32(np.inf), np.float32(np.inf)))
    assert step._cache_size() == 1, "the step compiles exactly once"
    return jax.device_get((state, metrics))


MIXED = "data=2,fsdp=2,tensor=2,microbatches=4"


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_an_optimizer_moves_the_weights_alike_on_a_mixed_mesh(name):
    """Clipping, weight decay and schedule included.

    Lion takes the sign of its momentum and Adam nearly does on the first step: a gradient that is
    zero but for rounding may flip and move its weight by a whole step (1e-3), so a share of 1e-3
    of the entries may be off by that; all others agree to rounding.
    """
    optimizer = OptimizerConfig(name=name, learning_rate=1e-3, clip_norm=0.1)
    config = dataclasses.replace(changed(), optimizer=optimizer)
    state, metrics = run_steps(config, MIXED, 2)
    expected, expected_metrics = run_steps(config, "data=1", 2)
    for key in ("train/loss", "train/grad_norm"):
        np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=TOLERANCE)
    start = jax.device_get(place(config, "data=1")[3].params)
    for leaf, same, origin in zip(
        *(jax.tree.leaves(tree) for tree in (state.params, expected.params, start)), strict=True
    ):
        moved = np.abs(same - origin).max()
        off = np.abs(leaf - same) > max(1e-3 * moved, 1e-7)
        assert off.mean() <= 1e-3
        assert np.abs(leaf - same).max() <= 4.1e-3


def test_fp16_with_loss_scaling_steps_alike_on_a_mixed_mesh():
    """Half precision rounds to 1e-3; the loss is a mean over many tokens."""
    config = dataclasses.replace(
        changed(), precision="fp16", loss_scale=LossScaleConfig(initial=2.0**10)
    )
    _, metrics = run_steps(config, MIXED, 3)
    _, expected_metrics = run_steps(config, "data=1", 3)
    assert metrics["train/skipped"] == expected_metrics["train/skipped"] == 0
    np.testing.assert_allclose(metrics["train/loss"], expected_metrics["train/loss"], rtol=1e-3)
    np.testing.assert_allclose(
        metrics["train/grad_norm"], expected_metrics["train/grad_norm"], rtol=1e-2
    )


@pytest.mark.parametrize("layout", ["fsdp=2,tensor=2", "data=2,tensor=2"])
def test_bf16_steps_alike_on_mixed_meshes(layout):
    """bfloat16 rounds to 4e-3; the loss is a mean over many tokens."""
    config = dataclasses.replace(changed(), precision="bf16")
    _, metrics = run_steps(config, layout, 2)
    _, expected = run_steps(config, "data=1", 2)
    np.testing.assert_allclose(metrics["train/loss"], expected["train/loss"], rtol=2e-3)
    np.testing.assert_allclose(metrics["train/grad_norm"], expected["train/grad_norm"], rtol=2e-2)


@pytest.mark.parametrize(
    ("layout", "changes", "field"),
    [
        ("tensor=8", {"num_heads": 12, "num_kv_heads": 4}, "num_heads"),
        ("tensor=8", {"num_heads": 16, "num_kv_heads": 4}, "num_kv_heads"),
        ("tensor=3", {}, "num_heads"),
        ("data=8,microbatches=8", {}, "train.batch_size"),
    ],
)
def test_what_does_not_divide_is_refused_before_any_device(layout, changes, field):
    parsed = parse_layout(layout)
    base = changed(changes)
    train = dataclasses.replace(base.train, microbatches=parsed.microbatches or 1)
    with pytest.raises(ValueError, match=field):
        validate(dataclasses.replace(base, mesh=parsed.mesh, train=train))


def test_a_batch_ramp_computes_only_the_rows_that_hold_data():
    """Half of the microbatches active, the rest garbage: the gradients of the first half."""
    config, mesh, setup, state, batch = place(changed(), "data=2,microbatches=4")
    poisoned = batch._replace(weights=batch.weights.at[2:].set(jnp.nan), active=jnp.int32(2))
    alone = batch._replace(weights=batch.weights.at[2:].set(0.0))
    ramp = dataclasses.replace(
        config.train, batch_ramp=dataclasses.replace(config.train.batch_ramp, start=8, increment=8,
                                                     steps=4)
    )  # fmt: skip
    ramped = dataclasses.replace(config, train=ramp)
    key = dropout_key(config, 0)
    with jax.set_mesh(mesh):
        got = jax.jit(
            lambda p, b: loss_and_gradients(ramped, setup, mesh, p, b, key, 0.01)[1]
        )(state.params, poisoned)  # fmt: skip
        expected = jax.jit(
            lambda p, b: loss_and_gradients(config, setup, mesh, p, b, key, 0.01)[1]
        )(state.params, alone)  # fmt: skip
    assert_close(jax.device_get(got), jax.device_get(expected), 1e-6)
