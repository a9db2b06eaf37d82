"""Quantised train steps compiled for H200: every product that the config names runs in 8 bits,
and so do the gathers of what it multiplies."""

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    TrainConfig,
    on_layout,
    validate,
)
from mtjax.config.mesh import parse_layout
from mtjax.planner.program import build_step
from mtjax.planning.targets import parse_target

LAYERS, EMBED, FFN, SEQ, ROWS, HEADS, KV_HEADS, HEAD_DIM = 4, 1024, 2048, 1024, 16, 16, 8, 64
BYTES_WIDE = 2
KERNELS = EMBED * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * EMBED * FFN
"""Parameters of one layer's products."""
GROUPED = AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


CAPACITY = MoeConfig(num_experts=8, capacity_factor=1.0)
LATENT = {
    "num_layers": 2,
    "attention": AttentionConfig(
        num_heads=HEADS,
        mla=MlaConfig(kv_rank=128, q_rank=192, nope_dim=64, rope_dim=32, value_dim=64),
    ),
    "mtp": MtpConfig(depth=1),
}
LATENT_KERNELS = (
    EMBED * (192 + 128 + 32)  # into the latents, and the key that rotates
    + 192 * HEADS * (64 + 32)
    + 128 * HEADS * (64 + 64)
    + HEADS * 64 * EMBED
    + 3 * EMBED * FFN
)


def compiled(precision, layout, model=(), target="h200:1x8", **train):
    layout = parse_layout(layout)
    moe = CAPACITY if layout.mesh.expert > 1 else MoeConfig()
    config = Config(
        model=ModelConfig(
            vocab_size=1024,
            embed_dim=EMBED,
            ffn_dim=FFN,
            **{"num_layers": LAYERS, "attention": GROUPED, "moe": moe, **dict(model)},
        ),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(seq_len=SEQ, batch_size=ROWS, **train),
        precision=precision,
    )
    config = validate(on_layout(config, layout))
    return build_step(config, parse_target(target)).program.summary


def is_narrow(array):
    return array.dtype.startswith("f8") or array.dtype == "s8"


def narrow_flops(summary):
    """Of products in 8 bits; and nothing else is in a layer but routers, and attention's own
    products where XLA computes them."""
    own = ("router", "BTKGH,BSKH->BKGTS", "BKGTS,BSKH->BTKGH")
    narrow = [g for g in summary.all_gemms if is_narrow(g.lhs) and is_narrow(g.rhs)]
    wide = [g for g in summary.all_gemms if g not in narrow]
    in_layers = [g for g in wide if "DecoderBlock" in g.op_name or "Mtp" in g.op_name]
    assert [g for g in in_layers if not any(name in g.op_name for name in own)] == []
    return sum(g.flops for g in narrow)


def assert_layers_multiply_in_8_bits(summary, kernels_per_token=LAYERS * KERNELS):
    """All of them, forward and both gradients."""
    tokens = ROWS * SEQ // 8
    assert narrow_flops(summary) == 3 * 2 * tokens * kernels_per_token


def assert_every_product_has_8_bits(summary):
    layers = [
        g for g in summary.all_gemms if "DecoderBlock" in g.op_name and "router" not in g.op_name
    ]
    assert layers and all(is_narrow(g.lhs) and is_narrow(g.rhs) for g in layers)


def assert_what_is_gathered_has_8_bits(summary):
    """In the layers; forward and backward."""
    gathers = summary.collectives("all-gather", inside_loop=True)
    in_layers = [gather for gather in gathers if "DecoderBlock" in gather.op_name]
    arrays = [array for gather in in_layers for array in gather.operands]
    wide = [a for a in arrays if not is_narrow(a) and a.num_bytes > 4 * ROWS * SEQ]
    assert arrays and wide == []


@pytest.mark.slow
def test_fp8_multiplies_and_gathers_in_8_bits_over_fsdp_and_tensor(h200_mesh):
    summary = compiled("fp8", "fsdp=2,tensor=4")
    assert_layers_multiply_in_8_bits(summary)
    assert_what_is_gathered_has_8_bits(summary)
    assert len(summary.collectives("all-reduce", inside_loop=True)) > 3
    # Each kernel once forward and once backward, half of what bf16 moves.
    weights = summary.collectives("all-gather", axis="fsdp", inside_loop=True)
    assert sum(c.output_bytes for c in weights) == 2 * KERNELS / 4
    # The input of attention and of the feed-forward part forward, the gradients of their outputs
    # backward: one byte each.
    tokens = summary.collectives("all-gather", axis="tensor", inside_loop=True)
    assert sum(c.output_bytes for c in tokens) == 4 * ROWS // 2 * SEQ * EMBED
    assert {d for c in tokens for d in c.dtypes} == {"f8e4m3fn", "f8e5m2"}
    # Outputs and the gradients of inputs are summed in bf16, once per part and direction.
    sums = summary.collectives("reduce-scatter", axis="tensor", inside_loop=True)
    assert sum(c.operand_bytes for c in sums) == 4 * ROWS // 2 * SEQ * EMBED * BYTES_WIDE
    gradients = summary.collectives("reduce-scatter", axis="fsdp", inside_loop=True)
    assert sum(c.operand_bytes for c in gradients) == KERNELS / 4 * BYTES_WIDE


@pytest.mark.nightly
def test_experts_multiply_and_receive_tokens_in_8_bits(h200_mesh):
    summary = compiled("fp8", "expert=4,tensor=2")
    attention = KERNELS - 3 * EMBED * FFN
    assert_layers_multiply_in_8_bits(summary, LAYERS * (attention + 2 * 3 * EMBED * FFN))
    forward = [c for c in summary.collectives("all-to-all") if c.dtypes == ("f8e4m3fn",)]
    assert len(forward) == 1 and forward[0].axes == ("expert",)


@pytest.mark.slow
def test_weights_are_rounded_before_the_loop_over_microbatches(h200_mesh):
    """Once per step: in the loop nothing reads more of a weight than its 8 bits."""
    summary = compiled("fp8", "data=2,fsdp=4", microbatches=2)
    assert_layers_multiply_in_8_bits(summary)
    assert_what_is_gathered_has_8_bits(summary)
    (step, *_) = summary.collectives("all-gather", axis="data", inside_loop=False)
    assert "f8e4m3fn" in step.dtypes


@pytest.mark.slow
def test_recomputed_layers_share_what_the_backward_pass_gathers(h200_mesh):
    """Kernels travel once forward and once backward, in half of the bytes of bf16."""
    summary = compiled("fp8", "fsdp=8", remat="full")
    assert_every_product_has_8_bits(summary)
    weights = summary.collectives("all-gather", axis="fsdp", inside_loop=True)
    assert sum(c.output_bytes for c in weights) == 2 * KERNELS


@pytest.mark.nightly
def test_delayed_scales_wait_for_no_other_device(h200_mesh):
    """Each layer reports its largest values, once and by the way; with scales from the values at
    hand every input and gradient waits for a maximum over all devices."""
    summary = compiled("fp8_delayed", "fsdp=2,tensor=4")
    assert_layers_multiply_in_8_bits(summary)
    assert_what_is_gathered_has_8_bits(summary)
    assert len(summary.collectives("all-reduce", inside_loop=True)) <= 3


@pytest.mark.nightly
def test_latent_attention_and_predictors_of_further_tokens_multiply_in_8_bits(h200_mesh):
    summary = compiled("fp8", "fsdp=2,tensor=4", LATENT)
    modules = 2 * EMBED * EMBED + LATENT_KERNELS
    assert_layers_multiply_in_8_bits(summary, 2 * LATENT_KERNELS + modules)
    # Latents travel in f8; in bf16 the one key that rotates, forward, and its gradient.
    attention = [
        array
        for gather in summary.collectives("all-gather", axis="tensor", op_name="attention")
        for array in gather.operands
        if not is_narrow(array)
    ]
    assert {array.num_bytes for array in attention} == {ROWS // 2 * SEQ // 4 * 32 * BYTES_WIDE}


@pytest.mark.nightly
def test_inputs_that_are_kept_rounded_are_multiplied_in_8_bits(h200_mesh):
    train = {"remat": "selective", "remat_save": ("quantized",)}
    assert_every_product_has_8_bits(compiled("fp8", "fsdp=2,tensor=4", {"num_layers": 2}, **train))


@pytest.mark.nightly
@pytest.mark.parametrize("dispatcher", ["dropless", "allgather"])
def test_what_other_dispatchers_multiply_and_send_has_8_bits(h200_mesh, dispatcher):
    moe = MoeConfig(num_experts=8, dispatcher=dispatcher, allow_expanded_products=True)
    summary = compiled("fp8", "expert=4,tensor=2", {"moe": moe, "num_layers": 1})
    assert_every_product_has_8_bits(summary)
    kind = "all-to-all" if dispatcher == "dropless" else "all-gather"
    sent = [c for c in summary.collectives(kind, axis="expert") if "f8e4m3fn" in c.dtypes]
    assert sum(c.output_bytes for c in sent) >= ROWS // 4 * SEQ * EMBED


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp8", "fp8_delayed", "fp8_rowwise", "int8"])
@pytest.mark.parametrize(
    "layout",
    ["fsdp=8", "tensor=8", "fsdp=2,tensor=4", "pipeline=2,fsdp=4,microbatches=4",
     "expert=4,tensor=2"],
)  # fmt: skip
def test_no_layout_loses_a_product(h200_mesh, precision, layout):
    assert_every_product_has_8_bits(compiled(precision, layout))
