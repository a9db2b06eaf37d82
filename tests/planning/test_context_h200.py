"""What XLA makes of a train step with split sequences on 8 H200, read from the program."""

import dataclasses
import functools

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    on_layout,
    resolve_backends,
    validate,
)
from mtjax.config.mesh import parse_layout
from mtjax.planner.memory import estimate_memory
from mtjax.planner.program import build_step
from mtjax.planner.report import make_plan
from mtjax.planning.compile import compile_for
from mtjax.planning.targets import parse_target
from mtjax.recipes import load_recipe
from mtjax.training.state import make_setup
from mtjax.training.step import jit_train_step

LAYERS, EMBED, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 512, 2048, 8, 2, 64, 4096
SEQ, ROWS, SHARDS = 8192, 2, 8
BF16, F32 = 2, 4
LAYER_MATRICES = 2 * EMBED * (HEADS + KV_HEADS) * HEAD_DIM + 3 * EMBED * FFN
KV_BYTES = 2 * ROWS * SEQ * KV_HEADS * HEAD_DIM * BF16  # keys and values of all tokens
FORWARD_KERNEL, BACKWARD_KERNEL = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"

BASE = Config(
    model=ModelConfig(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        num_layers=LAYERS,
        ffn_dim=FFN,
        attention=AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM),
    ),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(seq_len=SEQ, batch_size=ROWS, remat="full"),
)


@pytest.fixture(scope="module")
def compiled(h200_mesh):
    """compiled(layout, packed=False, dropout=0): the train step."""

    @functools.cache
    def build(text, packed=False, dropout=0.0):
        layout = parse_layout(text)
        model = dataclasses.replace(BASE.model, dropout=dropout)
        config = dataclasses.replace(BASE, model=model, data=DataConfig(separate_documents=packed))
        config = resolve_backends(validate(on_layout(config, layout)), "gpu")
        mesh = h200_mesh(**config.mesh.sizes)
        step = jit_train_step(config, mesh, make_setup(config, mesh))
        return compile_for(mesh, step.fn, *step.args)

    return build


def calls(program, target):
    return sum(c.target == target for c in program.summary.custom_calls)


def test_ring_passes_keys_and_values_on_while_it_computes(compiled):
    """Each of 8 shards sends its 1/8 seven times per pass: forward, recomputed, and backward.

    The last two share their first transfer: it is the same one.
    """
    program = compiled("context=8")
    permutes = program.summary.collectives("collective-permute", axis="context")
    assert all(c.is_async and c.overlapped_ops > 0 and c.inside_loop for c in permutes)
    sent = sum(c.operand_bytes * c.executions for c in permutes)
    # The gradients, in float32, go all the way round: eight times.
    once = KV_BYTES / SHARDS * LAYERS
    assert sent == (3 * (SHARDS - 1) - 1) * once + SHARDS * once * F32 / BF16


def test_ring_gathers_weights_only_and_no_keys(compiled):
    summary = compiled("context=8").summary
    gathers = summary.collectives("all-gather", inside_loop=True)
    assert {dtype for c in gathers for dtype in c.dtypes} == {"bf16"}
    moved = sum(c.output_bytes * c.executions for c in gathers)
    # As with fsdp: a layer's matrices, forward and backward. Keys would come on top.
    assert moved == 2 * LAYERS * LAYER_MATRICES * BF16


def test_ring_computes_each_block_by_one_cudnn_kernel(compiled):
    """A block at home and seven on the way; full remat runs forward twice."""
    program = compiled("context=8")
    assert calls(program, FORWARD_KERNEL) == 2 * SHARDS
    assert calls(program, BACKWARD_KERNEL) == SHARDS
    # No logits in float32: a shard's queries by a chunk's keys.
    assert f"{SEQ // SHARDS},{SEQ // SHARDS}]" not in program.hlo


@pytest.mark.nightly
def test_packed_documents_are_masked_inside_the_cudnn_blocks(compiled):
    program = compiled("context=8", packed=True)
    assert calls(program, "__cudnn$fmhaScaleBiasSoftmax") == 2 * SHARDS
    assert calls(program, "__cudnn$fmhaScaleBiasSoftmaxBackward") == SHARDS


@pytest.mark.nightly
def test_dropout_masks_are_drawn_where_they_are_used(compiled):
    """Nothing moves for them."""

    def moved(program):
        found = program.summary.all_collectives
        return sorted((c.kind, c.axes, c.output_bytes, c.executions) for c in found)

    assert moved(compiled("context=8", dropout=0.1)) == moved(compiled("context=8"))


@pytest.mark.nightly
def test_ulysses_trades_tokens_for_heads_by_all_to_all(compiled):
    """context=2 x tensor=2, fsdp=2: query, key, value and output once per pass."""
    program = compiled("fsdp=2,context=2,tensor=2,exchange=ulysses")
    swaps = [c for c in program.summary.collectives("all-to-all") if c.axes == ("context",)]
    assert calls(program, FORWARD_KERNEL) == 2 and calls(program, BACKWARD_KERNEL) == 1
    sent = sum(c.operand_bytes * c.executions for c in swaps)
    shards = 2 * 2 * 2
    # Two query heads per device and one key head, which two devices share.
    queries = ROWS * SEQ * HEADS * HEAD_DIM * BF16 / shards
    assert sent == 3 * LAYERS * (2 * queries + 2 * KV_BYTES / shards)


@pytest.mark.slow
def test_llama3_8b_trains_on_131072_tokens_on_one_host(h200_mesh):
    """4 M tokens per step, one sequence per microbatch, each over the eight devices."""
    layers, embed, kv_heads, head_dim, params = 32, 4096, 8, 128, 8_030_261_248
    seq, microbatches = 131_072, 32
    recipe = load_recipe("llama3_8b")[0]
    train = dataclasses.replace(
        recipe.train, seq_len=seq, batch_size=microbatches, microbatches=microbatches
    )
    mesh, target = MeshConfig(context=SHARDS), parse_target("h200:1x8")
    config = validate(dataclasses.replace(recipe, mesh=mesh, train=train))
    step = build_step(config, target)
    plan = make_plan(step, target)
    assert plan.memory.fits
    assert plan.memory.largest[0].num_bytes == layers * seq * embed * BF16 / SHARDS
    assert sum(estimate_memory(config).values()) == pytest.approx(plan.memory.total_bytes, rel=0.1)
    kv = 2 * layers * kv_heads * head_dim * seq / SHARDS * BF16
    ring = (3 * (SHARDS - 1) - 1) * kv + SHARDS * kv * F32 / BF16
    weights = 3 * params * BF16 * (SHARDS - 1) / SHARDS
    wire = step.program.summary.wire_bytes("context")
    assert wire == pytest.approx(microbatches * (ring + weights), rel=0.05)
