"""MXFP8 train steps compiled for B200: every product that the config names is one call of cuDNN on
tiles and their scales."""

import pytest

from mtjax.config import AttentionConfig
from tests.planning.test_precision_h200 import (
    BYTES_WIDE,
    EMBED,
    FFN,
    KERNELS,
    LATENT,
    LATENT_KERNELS,
    LAYERS,
    ROWS,
    SEQ,
    assert_every_product_has_8_bits,
    assert_layers_multiply_in_8_bits,
    assert_what_is_gathered_has_8_bits,
    compiled,
    is_narrow,
    narrow_flops,
)

B200 = "b200:1x8"


def mxfp8(layout, model=(), **train):
    return compiled("mxfp8", layout, model, target=B200, **train)


def assert_by_cudnn(summary):
    narrow = [g for g in summary.all_gemms if is_narrow(g.lhs) or is_narrow(g.rhs)]
    assert narrow and {g.backend for g in narrow} == {"cudnn"}
    assert {a.dtype for g in narrow for a in (g.lhs, g.rhs)} == {"f8e4m3fn"}


def assert_kernel_gradients_are_scattered(summary, axis, kernels):
    """Of one layer, on one device; in bf16, and none of them is summed whole."""
    scattered = summary.collectives("reduce-scatter", axis=axis, op_name="shard_map/reduce_scatter")
    of_layers = [c for c in scattered if "DecoderBlock" in c.op_name]
    assert sum(c.operand_bytes * c.executions for c in of_layers) == LAYERS * kernels * BYTES_WIDE
    summed = summary.collectives("all-reduce", op_name="DecoderBlock")
    assert all(c.operand_bytes < EMBED * FFN for c in summed)


@pytest.mark.slow
def test_mxfp8_multiplies_tiles_over_fsdp_and_tensor(h200_mesh):
    summary = mxfp8("fsdp=2,tensor=4")
    assert_by_cudnn(summary)
    assert_layers_multiply_in_8_bits(summary)
    assert_what_is_gathered_has_8_bits(summary)
    assert_kernel_gradients_are_scattered(summary, "fsdp", KERNELS / 4)
    # What one layer's outputs and gradients of inputs sum up to, scattered over the sequence.
    sums = summary.collectives("reduce-scatter", axis="tensor", op_name="DecoderBlock")
    assert sum(c.operand_bytes * c.executions for c in sums) == (
        LAYERS * 4 * ROWS // 2 * SEQ * EMBED * BYTES_WIDE
    )


@pytest.mark.nightly
def test_mxfp8_multiplies_tiles_over_fsdp(h200_mesh):
    summary = mxfp8("fsdp=8")
    assert_by_cudnn(summary)
    assert_layers_multiply_in_8_bits(summary)
    assert_what_is_gathered_has_8_bits(summary)
    assert_kernel_gradients_are_scattered(summary, "fsdp", KERNELS)


@pytest.mark.nightly
def test_mxfp8_multiplies_tiles_over_tensor(h200_mesh):
    """A device's share of each product is no narrower than what cuDNN fills up to, 128."""
    wide = AttentionConfig(num_heads=8, head_dim=128)
    summary = mxfp8("tensor=8", {"attention": wide})
    assert_by_cudnn(summary)
    kernels = 4 * EMBED * 8 * 128 + 3 * EMBED * FFN
    assert_layers_multiply_in_8_bits(summary, LAYERS * kernels)
    assert_what_is_gathered_has_8_bits(summary)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", ["data=2,fsdp=4,microbatches=2", "context=2,fsdp=4", "fsdp=2,context=2,tensor=2"]
)
def test_mxfp8_multiplies_tiles_on_other_layouts(h200_mesh, layout):
    summary = mxfp8(layout)
    assert_by_cudnn(summary)
    assert_layers_multiply_in_8_bits(summary)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    ["pipeline=2,fsdp=4,microbatches=4", "data=2,pipeline=2,tensor=2,chunks=2,microbatches=4"],
)
def test_mxfp8_multiplies_tiles_in_a_pipeline(h200_mesh, layout):
    summary = mxfp8(layout)
    assert_by_cudnn(summary)
    assert_every_product_has_8_bits(summary)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["expert=4,tensor=2", "pipeline=2,expert=4,microbatches=4"])
def test_mxfp8_multiplies_tiles_of_experts(h200_mesh, layout):
    summary = mxfp8(layout)
    assert_by_cudnn(summary)
    if "pipeline" in layout:
        assert_every_product_has_8_bits(summary)
        return
    attention = KERNELS - 3 * EMBED * FFN
    assert_layers_multiply_in_8_bits(summary, LAYERS * (attention + 2 * 3 * EMBED * FFN))


@pytest.mark.nightly
def test_mxfp8_multiplies_tiles_of_latents_and_predictors(h200_mesh):
    summary = mxfp8("fsdp=2,tensor=4", LATENT | {"num_layers": 1})
    assert_by_cudnn(summary)
    # Those narrower than 128 are filled up.
    tokens = ROWS * SEQ // 8
    assert narrow_flops(summary) >= 3 * 2 * tokens * (2 * LATENT_KERNELS + 2 * EMBED * EMBED)


@pytest.mark.nightly
def test_inputs_that_are_kept_rounded_are_multiplied_with_their_scales(h200_mesh):
    train = {"remat": "selective", "remat_save": ("quantized",)}
    summary = mxfp8("fsdp=2,tensor=4", {"num_layers": 2}, **train)
    assert_by_cudnn(summary)
    assert_every_product_has_8_bits(summary)
