"""Quantised products on every layout: loss and gradients are those of one device.

Activations are float32 here, as in all tests of parity, so that sums over devices differ in their
last places only. Scales that are powers of two are the same then, and of several batches one must
agree to the tolerance of float32 (`assert_without_a_tie`). Integers have scales that are no powers
of two: a scale that differs in its last place moves every value by as much, and some over a tie.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mtjax.config import MlaConfig, MoeConfig, MtpConfig, QuantizeConfig
from mtjax.precision.product import QuantizedKernel
from mtjax.training.step import gather_params
from tests.parity.layouts import (
    TOLERANCE,
    assert_close,
    assert_same,
    assert_without_a_tie,
    by_name,
    changed,
    first_gradients,
    gradients_by_draw,
    place,
    run_steps,
)

on_one_device = functools.cache(lambda config: gradients_by_draw(config, "data=1"))

FLOAT32 = QuantizeConfig(compute="fp32")
ENDS = QuantizeConfig(compute="fp32", first_bf16_layers=1, last_bf16_layers=1)
EXPERTS = MoeConfig(
    num_experts=8,
    balance_coefficient=0.1,
    balance_scope="sequence",
    capacity_factor=0.7,
    shared_ffn_dim=24,
)
MLA = MlaConfig(kv_rank=16, q_rank=24, nope_dim=6, rope_dim=4, value_dim=8)


def latent(mla, **settings):
    heads = {"num_heads": 8, "num_kv_heads": None, "head_dim": None, "dropout": 0.0, "mla": mla}
    return {"attention": heads, "dropout": 0.0} | settings


def model(precision, quantize=FLOAT32, **settings):
    plain = changed(**({"num_layers": 4} | settings))
    return dataclasses.replace(plain, precision=precision, quantize=quantize)


MODELS = {
    "dense": {},
    "small": {"num_layers": 2},
    "one layer": {"num_layers": 1},
    "experts": {"moe": EXPERTS, "num_layers": 2},
    "experts, one layer": {"moe": EXPERTS, "num_layers": 1},
    "dropless": {
        "moe": dataclasses.replace(EXPERTS, capacity_factor=1.25, dispatcher="dropless"),
        "num_layers": 1,
    },
    "allgather": {
        "moe": dataclasses.replace(EXPERTS, capacity_factor=1.25, dispatcher="allgather"),
        "num_layers": 1,
    },
    "ends in bf16": {"quantize": ENDS, "train": {"remat": "full"}},
    "f8 saved": {"train": {"remat": "selective", "remat_save": ("quantized",)}},
    "biases, packed": {
        "attention": {"qkv_bias": True, "out_bias": True},
        "mlp_bias": True,
        "packed": True,
    },
    "latent, two tokens": latent(MLA, num_layers=1, mtp=MtpConfig(depth=1), packed=True),
    "latent, pipelined": latent(MLA, num_layers=2, mtp=MtpConfig(depth=1)),
    "latent of keys": latent(dataclasses.replace(MLA, q_rank=0), num_layers=2),
    "long": {"attention": {"dropout": 0.0}, "dropout": 0.0, "num_layers": 2},
}
CI = [
    ("fp8", "dense", "data=2,pipeline=2,tensor=2,microbatches=4"),
]
STEPS_CI = [("small", "data=2,pipeline=2,microbatches=2")]
STEPS_NIGHTLY = [
    ("experts", "data=2,pipeline=2,expert=2,microbatches=4"),
    ("dense", "fsdp=2,tensor=4"),
    ("dense", "pipeline=4,schedule=gpipe,microbatches=4"),
    ("dense", "data=2,pipeline=2,tensor=2,chunks=2,microbatches=4"),
    ("experts", "expert=4,tensor=2"),
    ("dropless", "expert=4,tensor=2"),
    ("allgather", "expert=4,tensor=2"),
    ("latent, two tokens", "data=2,fsdp=2,tensor=2,microbatches=4"),
    ("latent, pipelined", "pipeline=2,tensor=2,microbatches=4"),
    ("latent, pipelined", "pipeline=2,schedule=gpipe,microbatches=4"),
    ("ends in bf16", "data=2,fsdp=2,tensor=2,microbatches=4"),
    ("f8 saved", "data=1,microbatches=4"),
]
NIGHTLY = [
    ("fp8", "experts", "fsdp=2,expert=2,tensor=2"),
    ("fp8", "latent, two tokens", "data=2,fsdp=2,tensor=2,microbatches=4"),
    ("fp8_rowwise", "ends in bf16", "fsdp=2,tensor=4,microbatches=4"),
    ("fp8", "dense", "fsdp=8"),
    ("fp8", "dense", "tensor=8"),
    ("fp8", "dense", "data=8"),
    ("fp8", "dense", "data=1,microbatches=4"),
    ("fp8", "dense", "pipeline=4,tensor=2,schedule=gpipe,microbatches=4"),
    ("fp8", "dense", "pipeline=2,fsdp=2,chunks=2,microbatches=4"),
    ("fp8", "long", "context=4,tensor=2"),
    ("fp8", "experts", "data=2,expert=4,microbatches=4"),
    ("fp8", "experts", "pipeline=2,expert=2,tensor=2,microbatches=4"),
    ("fp8", "ends in bf16", "fsdp=8"),
    ("fp8", "f8 saved", "fsdp=2,tensor=4"),
    ("fp8", "biases, packed", "data=2,tensor=4"),
    ("fp8", "latent, two tokens", "fsdp=2,context=2,tensor=2"),
    ("fp8", "latent of keys", "fsdp=2,tensor=4"),
    ("fp8", "latent of keys", "data=2,pipeline=2,tensor=2,microbatches=4"),
    ("fp8_rowwise", "latent, two tokens", "fsdp=2,tensor=4"),
    ("fp8_block", "latent, two tokens", "data=2,tensor=4"),
    ("fp8_rowwise", "dense", "tensor=8"),
    ("fp8_rowwise", "experts, one layer", "expert=4,tensor=2"),
    ("fp8_rowwise", "dense", "data=2,pipeline=4,microbatches=4"),
    ("fp8_block", "dense", "fsdp=4,tensor=2"),
    ("fp8_block", "experts", "expert=4,tensor=2"),
    ("mxfp8", "one layer", "data=2,tensor=4"),
    ("nvfp4", "dense", "data=2,fsdp=4"),
    ("int8", "dense", "data=2,fsdp=2,tensor=2"),
    ("int8", "experts", "expert=4,tensor=2"),
]


@pytest.mark.parametrize(
    ("precision", "features", "layout"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in CI]
    + [pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY],
)
def test_loss_and_gradients_are_those_of_one_device(precision, features, layout):
    tolerance = 1e-3 if precision == "int8" else TOLERANCE
    config = model(precision, **MODELS[features])
    got, expected = gradients_by_draw(config, layout), on_one_device(config)
    assert_without_a_tie(lambda draw: assert_same(got(draw), expected(draw), tolerance))


# Tiles are whole on the devices.
TILES = {
    "attention": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "dropout": 0.0},
    "dropout": 0.0,
    "num_layers": 1,
    "embed_dim": 64,
    "ffn_dim": 64,
    "train": {"seq_len": 64, "batch_size": 8},
}
TILED = {
    "dense": TILES,
    "two layers": TILES | {"num_layers": 2},
    "wide": TILES | {"embed_dim": 256, "train": {"seq_len": 32, "batch_size": 8}},
    "long": TILES
    | {
        "attention": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "dropout": 0.0},
        "ffn_dim": 256,
        "train": {"seq_len": 256, "batch_size": 1},
    },
    "experts": TILES
    | {
        "moe": dataclasses.replace(EXPERTS, shared_ffn_dim=64),
        "quantize": dataclasses.replace(FLOAT32, roles=("ffn_in", "ffn_out")),
        "train": {"seq_len": 64, "batch_size": 4},
    },
    "latent, two tokens": TILES
    | {
        "attention": {
            "num_heads": 4,
            "num_kv_heads": None,
            "head_dim": None,
            "dropout": 0.0,
            "mla": MlaConfig(kv_rank=64, q_rank=64, nope_dim=32, rope_dim=32, value_dim=32),
        },
        "mtp": MtpConfig(depth=1),
        "train": {"seq_len": 64, "batch_size": 2},
    },
}
TILED_NIGHTLY = [
    ("wide", "fsdp=8"),
    ("long", "tensor=8"),
    ("dense", "data=2,tensor=2"),
    ("two layers", "pipeline=2,tensor=2,microbatches=4"),
    ("two layers", "data=2,pipeline=2,fsdp=2,microbatches=2"),
    ("experts", "expert=2,tensor=2"),
    ("experts", "data=2,expert=2"),
    ("latent, two tokens", "fsdp=2,tensor=2"),
]


@pytest.mark.parametrize(
    ("features", "layout"),
    [
        pytest.param("dense", "data=2,fsdp=2,tensor=2,microbatches=2", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in TILED_NIGHTLY),
    ],
)
def test_tiles_with_scales_on_a_layout_are_the_rounded_numbers_on_one_device(features, layout):
    emulated = model("mxfp8", **TILED[features])
    scaled = dataclasses.replace(emulated.quantize, backend="scaled_matmul")
    config = dataclasses.replace(emulated, quantize=scaled)
    got, expected = gradients_by_draw(config, layout), on_one_device(emulated)
    assert_without_a_tie(lambda draw: assert_same(got(draw), expected(draw)))


@pytest.mark.parametrize(
    ("features", "layout"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in STEPS_CI]
    + [pytest.param(*case, marks=pytest.mark.nightly) for case in STEPS_NIGHTLY],
)
def test_delayed_scales_of_later_steps_are_those_of_one_device(features, layout):
    changes = {"quantize": FLOAT32} | MODELS[features]
    quantize = dataclasses.replace(changes["quantize"], amax_history=2, statistics=True)
    config = model("fp8_delayed", **changes | {"quantize": quantize})

    def compare(draw):
        (state, metrics), (expected, expected_metrics) = (
            run_steps(config, where, 3, draw=draw) for where in (layout, "data=1")
        )
        histories, scales = by_name(expected.delayed), 0
        for name, leaf in by_name(state.delayed).items():
            np.testing.assert_array_equal(leaf, histories[name], name)
            scales += leaf.size
        assert scales > 0
        for name, value in expected_metrics.items():
            if name.startswith("quantize/"):
                assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        assert_close(state.params, expected.params, 1e-3)  # Adam's first steps amplify rounding

    assert_without_a_tie(compare)


@pytest.mark.parametrize(
    ("precision", "dispatcher", "layout"),
    [
        pytest.param("fp8", "dropless", "expert=2,tensor=2", marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("fp8", "allgather", "expert=2,tensor=2"),
                ("fp8_rowwise", "dropless", "fsdp=2,expert=2,tensor=2"),
                ("fp8_rowwise", "allgather", "data=2,expert=2,tensor=2,microbatches=4"),
                ("int8", "dropless", "data=1"),
                ("int8", "allgather", "data=1"),
                ("fp8", "dropless", "pipeline=2,expert=2,tensor=2,microbatches=4"),
            )
        ),
    ],
)
def test_dispatchers_agree_where_no_token_is_dropped(precision, dispatcher, layout):
    """On any layout with the capacity dispatcher on one device."""
    moe = dataclasses.replace(EXPERTS, capacity_factor=8.0)
    layers = 2 if "pipeline" in layout else 1
    other = dataclasses.replace(moe, capacity_factor=1.25, dispatcher=dispatcher)
    got = gradients_by_draw(model(precision, moe=other, num_layers=layers), layout)
    expected = on_one_device(model(precision, moe=moe, num_layers=layers))

    def compare(draw):
        sums, gradients = expected(draw)
        assert np.sum(sums.router["group0"]["block0"].dropped) == 0
        assert_close(got(draw)[1], gradients, TOLERANCE)

    assert_without_a_tie(compare)


def rounded(params):
    """Names of the kernels that are."""
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: isinstance(node, QuantizedKernel)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves
        if isinstance(leaf, QuantizedKernel)
    }


@pytest.mark.slow
def test_latents_and_predictors_of_further_tokens_have_the_roles_of_others():
    def chosen(**settings):
        quantize = dataclasses.replace(FLOAT32, **settings)
        config = model("fp8", quantize, **MODELS["latent, two tokens"] | {"num_layers": 2})
        config, mesh, setup, state, _ = place(config, "fsdp=2")
        with jax.set_mesh(mesh):
            shapes = jax.eval_shape(lambda p: gather_params(config, setup, mesh, p), state.params)
        return rounded(shapes["blocks"]["group0"]), rounded(shapes["mtp"])

    names = ("query_down.kernel", "query.kernel", "kv_down.kernel", "key_rope.kernel", "key",
             "value")  # fmt: skip
    into = {f"attention.{name}" for name in names}
    found = chosen(roles=("qkv",))
    assert found == tuple({f"{block}.{n}" for n in into} for block in ("block0", "block"))
    assert chosen(roles=("ffn_in",))[1] == {
        "embedding.kernel", "hidden.kernel", "block.mlp.gate.kernel", "block.mlp.up.kernel",
    }  # fmt: skip
    # Modules go with the last layer.
    assert chosen(first_bf16_layers=1)[1] and not chosen(last_bf16_layers=1)[1]


def test_the_chosen_kernels_of_the_chosen_layers_are_rounded():
    quantize = dataclasses.replace(ENDS, roles=("qkv", "ffn_out"))
    config, mesh, setup, state, _ = place(model("fp8", quantize), "fsdp=2")
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda p: gather_params(config, setup, mesh, p), state.params)
    ends_and_middle = shapes["blocks"]["group0"]
    assert len(ends_and_middle) == 3
    attention = {f"block0.attention.{name}.kernel" for name in ("query", "key", "value")}
    assert [rounded(segment) for segment in ends_and_middle] == [
        set(),
        attention | {"block0.mlp.down.kernel"},
        set(),
    ]


@pytest.mark.slow
def test_what_is_rounded_differs_and_little():
    """Parity would also hold if nothing were rounded."""
    exact = by_name(first_gradients(model("fp32", QuantizeConfig()), "data=1")[1])
    norms = {}
    for precision in ("fp8", "int8"):
        got = by_name(first_gradients(model(precision), "data=1")[1])
        norms[precision] = max(
            np.linalg.norm(got[name] - leaf) / np.linalg.norm(leaf) for name, leaf in exact.items()
        )
    # e5m2 rounds by up to 1/8, int8 in steps of 1/127 of the largest.
    assert 0.01 < norms["int8"] < norms["fp8"] < 0.3
