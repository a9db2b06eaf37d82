"""What XLA makes of a step with experts on one host of 8 H200, read from the program."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    TrainConfig,
    resolve_backends,
    validate,
)
from mtjax.planning.compile import compile_for
from mtjax.training.state import make_setup
from mtjax.training.step import Limits, abstract_batch, make_train_step

LAYERS, EMBED, FFN, HEADS, HEAD_DIM, VOCAB, SEQ, BATCH = 4, 512, 2048, 8, 64, 4096, 1024, 8
EXPERTS, TOP_K, FACTOR = 8, 2, 1.25
CAPACITY = SEQ * TOP_K * FACTOR / EXPERTS
TOKENS = BATCH * SEQ // 8
BF16 = 2


@pytest.fixture(scope="module")
def compile_step(h200_mesh):
    """compile(axis sizes, microbatches, **settings of the experts) -> the compiled train step."""

    @functools.cache
    def build(axes, microbatches, settings):
        config = Config(
            model=ModelConfig(
                vocab_size=VOCAB,
                embed_dim=EMBED,
                num_layers=LAYERS,
                ffn_dim=FFN,
                moe=MoeConfig(num_experts=EXPERTS, top_k=TOP_K, **dict(settings)),
                attention=AttentionConfig(num_heads=HEADS, head_dim=HEAD_DIM),
            ),
            mesh=MeshConfig(**dict(axes)),
            data=DataConfig(separate_documents=False),
            train=TrainConfig(
                seq_len=SEQ,
                batch_size=BATCH * microbatches,
                microbatches=microbatches,
                remat="full",
            ),
        )
        config = resolve_backends(validate(config), "gpu")
        mesh = h200_mesh(**config.mesh.sizes)
        setup = make_setup(config, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return compile_for(
            mesh,
            make_train_step(config, mesh, setup),
            setup.abstract,
            abstract_batch(config, mesh),
            Limits(scalar, scalar),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )

    return lambda axes, microbatches=1, **settings: build(
        tuple(axes.items()), microbatches, tuple(settings.items())
    )


def total(collectives, field):
    return sum(getattr(c, field) * c.executions for c in collectives)


LAYOUTS = [
    {"expert": 8},
    pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.nightly),
    pytest.param({"fsdp": 2, "expert": 4}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_tokens_go_to_experts_and_back_in_bf16_and_in_no_other_way(compile_step, axes):
    summary = compile_step(axes, capacity_factor=FACTOR).summary
    exchanges = summary.collectives("all-to-all")
    assert {c.axes for c in exchanges} == {("expert",)}
    assert {dtype for c in exchanges for dtype in c.dtypes} == {"bf16"}
    # There and back: forward, recomputed, and backward. Buffers of all experts, by device.
    buffers = EXPERTS * CAPACITY * BATCH / 8 * EMBED * BF16
    assert total(exchanges, "operand_bytes") == LAYERS * 3 * 2 * buffers
    forward = [c for c in exchanges if "transpose" not in c.op_name]
    assert total(forward, "operand_bytes") == LAYERS * 2 * buffers
    # Weights of experts move over fsdp only: whole ones are two thirds of EMBED x FFN x E bytes.
    gathers = [c for c in summary.collectives("all-gather", inside_loop=True) if "expert" in c.axes]
    attention = 4 * EMBED * HEADS * HEAD_DIM * BF16
    assert max(c.output_bytes for c in gathers) <= attention + EMBED * EXPERTS * 4


@pytest.mark.parametrize("axes", LAYOUTS)
def test_products_are_those_the_model_asks_for_at_the_capacity_factor(compile_step, axes):
    """Forward, recomputed, and twice in backward; the head makes its gradients in one pass."""
    summary = compile_step(axes, capacity_factor=FACTOR).summary
    expert = TOP_K * FACTOR * 3 * EMBED * FFN
    attention, router = 4 * EMBED * HEADS * HEAD_DIM, EMBED * EXPERTS
    layers = LAYERS * 4 * 2 * TOKENS * (expert + attention + router)
    assert summary.gemm_flops == layers + 3 * 2 * TOKENS * VOCAB * EMBED
    by_dtype = summary.gemm_flops_by_dtype()
    assert by_dtype[("f32", "f32")] == LAYERS * 4 * 2 * TOKENS * router
    assert set(by_dtype) == {("bf16", "bf16"), ("f32", "f32")}


@pytest.mark.nightly
def test_in_a_pipeline_tokens_go_to_experts_of_their_stage_and_on_to_the_next(compile_step):
    """Two stages of two layers, four microbatches: 5 ticks each way, and all stages compute."""
    program = compile_step({"pipeline": 2, "expert": 4}, 4, capacity_factor=FACTOR)
    exchanges = program.summary.collectives("all-to-all")
    assert {c.axes for c in exchanges} == {("expert",)}
    assert {dtype for c in exchanges for dtype in c.dtypes} == {"bf16"}
    buffers = EXPERTS * CAPACITY * BATCH / 4 * EMBED * BF16
    assert total(exchanges, "operand_bytes") == LAYERS / 2 * 5 * 3 * 2 * buffers
    permutes = program.summary.collectives("collective-permute", axis="pipeline")
    assert all(c.is_async and c.overlapped_ops > 0 for c in permutes)
    stream = BATCH / 4 * SEQ * EMBED * BF16
    # Nobody needs what the last tick would send.
    assert total(permutes, "operand_bytes") == (5 + 4) * stream
    assert {dtype for c in permutes for dtype in c.dtypes} == {"bf16"}


@pytest.mark.nightly
def test_parts_of_a_sequence_meet_at_experts_whose_weights_stay(compile_step):
    program = compile_step({"context": 2, "expert": 4}, capacity_factor=FACTOR)
    exchanges = program.summary.collectives("all-to-all")
    assert {c.axes for c in exchanges} == {("expert",)}
    gathers = program.summary.collectives("all-gather", inside_loop=True)
    # The sequences of a device, forward, recomputed and for the gradient of the scatter.
    met = [c for c in gathers if c.axes == ("context",) and "bf16" in c.dtypes]
    sequences = LAYERS * 3 * BATCH / 4 * SEQ * EMBED * BF16
    assert total(met, "output_bytes") == pytest.approx(sequences, rel=0.02), "beside routing"
    expert = EMBED * FFN * BF16
    assert max(c.output_bytes for c in gathers) < EXPERTS * expert, "no kernel of all experts"


@pytest.mark.nightly
def test_products_by_group_are_expanded_which_is_why_they_are_refused(compile_step):
    """At worst R E times the rows: every expert held here on all rows that could arrive."""
    dropless = compile_step({"expert": 8}, dispatcher="dropless", allow_expanded_products=True)
    roomy = compile_step({"expert": 8}, capacity_factor=FACTOR)
    needed = LAYERS * 4 * 2 * TOKENS * TOP_K * 3 * EMBED * FFN
    extra = dropless.summary.gemm_flops - (roomy.summary.gemm_flops - FACTOR * needed)
    assert extra / needed == pytest.approx(EXPERTS / TOP_K, rel=1e-3)
