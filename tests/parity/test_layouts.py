"""One device is the reference: every layout starts from its bits and agrees in loss and gradients.

Float32 throughout.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import validate
from mtjax.config.mesh import parse_layout
from mtjax.training.state import create_state
from mtjax.training.step import dropout_key, loss_and_gradients
from tests.parity.layouts import (
    BASE,
    COMPILER_OPTIONS,
    SEQ,
    TOLERANCE,
    assert_close,
    assert_gradients_are_those_of_one_device,
    by_name,
    changed,
    on_layout,
    place,
)

GPT2 = changed(
    {"qkv_bias": True, "out_bias": True},
    position="learned",
    max_positions=SEQ,
    norm="layernorm",
    activation="gelu",
    mlp_bias=True,
    tied_embeddings=True,
)

FEATURES = {
    "base": BASE,
    "packed documents and windows that don't divide the layers": changed(
        {"windows": (5, 0)}, packed=True, num_layers=3
    ),
    "GPT-2": GPT2,
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

MIXED = "data=2,fsdp=2,tensor=2"
LAYOUTS = ["data=8", "fsdp=8", "tensor=8", "fsdp=2,tensor=4", MIXED]
QUICK = [("base", "fsdp=2,tensor=4,microbatches=1"), ("base", f"{MIXED},microbatches=4")]
SLOW = [
    ("base", "data=8,microbatches=4"),
    ("base", "fsdp=8,microbatches=1"),
    ("base", "tensor=8,microbatches=4"),
    *((feature, f"{MIXED},microbatches=4") for feature in list(FEATURES)[1:4]),
]
NIGHTLY = [(feature, f"{MIXED},microbatches=4") for feature in list(FEATURES)[4:]]
NIGHTLY += [("base", f"{layout},microbatches={m}") for layout in LAYOUTS for m in (1, 4)]
NIGHTLY += [
    ("base", "data=2,fsdp=4"),
    ("Gemma-2", "tensor=2"),
    ("Gemma-2", "fsdp=8"),
    ("GPT-2", "data=4,microbatches=2"),
    ("GPT-2", "tensor=8,microbatches=4"),
    ("packed documents and windows that don't divide the layers", "tensor=8"),
    ("selective remat, unrolled", "data=8,microbatches=4"),
    ("full remat", "fsdp=2,tensor=4"),
]
CASES = [
    *QUICK,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in NIGHTLY
        if case not in QUICK + SLOW
    ),
]


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_loss_and_gradients_are_those_of_one_device(feature, layout):
    assert_gradients_are_those_of_one_device(FEATURES[feature], layout)


@pytest.fixture(scope="module")
def born_on_one_device():
    return jax.device_get(create_state(*on_layout(GPT2, "data=1")))


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[:3]] + LAYOUTS[3:]
)
def test_initial_states_are_bit_equal(layout, born_on_one_device):
    """GPT-2 has every kind of leaf: tables, matrices, biases, norms."""
    state = by_name(jax.device_get(create_state(*on_layout(GPT2, layout))))
    for name, leaf in by_name(born_on_one_device).items():
        assert np.array_equal(state[name], leaf), f"initial {name} differs"


def drawn(seed: int):
    """A random model, training and layout that fit each other."""
    pick = random.Random(seed).choice
    tensor, fsdp = pick([(1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)])
    data = pick([n for n in (1, 2, 4) if n * tensor * fsdp <= 8])
    layout = f"data={data},fsdp={fsdp},tensor={tensor},microbatches={pick([1, 2, 4])}"
    bias = pick([True, False])
    remat = pick(["none", "selective", "full"])
    dropout = pick([0.0, 0.1])
    num_layers = pick([1, 2, 3])
    config = changed(
        {
            "num_kv_heads": pick([8, 16]),
            "windows": pick([(), (3,), (0, 7)])[:num_layers],
            "logit_softcap": pick([None, 1.5]),
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": pick([True, False]),
            "dropout": dropout,
        },
        {
            "z_loss": pick([0.0, 1e-2]),
            "loss_chunk": pick([3, 8, 100]),
            "remat": remat,
            "unroll_layers": pick([True, False]),
        },
        packed=pick([True, False]),
        dropout=dropout,
        norm=pick(["rmsnorm", "layernorm"]),
        activation=pick(["swiglu", "gelu", "relu2", "geglu"]),
        mlp_bias=bias,
        tied_embeddings=pick([True, False]),
        logit_softcap=pick([None, 2.0]),
        num_layers=num_layers,
        **pick([{}, {"position": "learned", "max_positions": SEQ + 3}]),
        **pick([{}, {"post_norm": True}, {"parallel_residual": True}]),
    )
    return config, layout


SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_on_a_random_layout_agrees_with_one_device(seed):
    assert_gradients_are_those_of_one_device(*drawn(seed))


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
    config, mesh, setup, state, batch = place(
        changed({"dropout": 0.0}, dropout=0.0), "data=2,microbatches=4"
    )
    poisoned = batch._replace(weights=batch.weights.at[2:].set(jnp.nan), active=jnp.int32(2))
    alone = batch._replace(weights=batch.weights.at[2:].set(0.0))
    ramp = dataclasses.replace(config.train.batch_ramp, start=8, increment=8, steps=4)
    ramped = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_ramp=ramp))
    key = dropout_key(config, 0)

    def gradients(config, batch):
        def run(params, batch):
            return loss_and_gradients(config, setup, mesh, params, batch, key, 0.01)[1]

        with jax.set_mesh(mesh):
            lowered = jax.jit(run).lower(state.params, batch)
            program = lowered.compile(compiler_options=COMPILER_OPTIONS)
            return jax.device_get(program(state.params, batch))

    assert_close(gradients(ramped, poisoned), gradients(config, alone), TOLERANCE)
