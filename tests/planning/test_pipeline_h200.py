"""What XLA makes of a pipelined train step on 8 H200, read from the program, without a GPU."""

import dataclasses
import functools

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
    on_layout,
    resolve_backends,
    validate,
)
from mtjax.config.mesh import parse_layout
from mtjax.planning.compile import compile_for
from mtjax.training.state import make_setup
from mtjax.training.step import jit_train_step

LAYERS, EMBED, FFN, HEADS, HEAD_DIM, VOCAB, SEQ, ROWS = 8, 512, 2048, 8, 64, 6144, 1024, 8
BF16, F32 = 2, 4
STREAM_BYTES = ROWS * SEQ * EMBED * BF16  # the residual stream of a microbatch

BASE = Config(
    model=ModelConfig(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        num_layers=LAYERS,
        ffn_dim=FFN,
        attention=AttentionConfig(num_heads=HEADS, head_dim=HEAD_DIM),
    ),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(seq_len=SEQ, batch_size=ROWS, remat="full"),
)


@pytest.fixture(scope="module")
def compiled(h200_mesh):
    """compiled(layout, layers=8): the train step with ROWS rows in each microbatch."""

    @functools.cache
    def build(text, layers=LAYERS):
        layout = parse_layout(text)
        train = dataclasses.replace(BASE.train, batch_size=ROWS * layout.microbatches)
        model = dataclasses.replace(BASE.model, num_layers=layers)
        config = on_layout(dataclasses.replace(BASE, train=train, model=model), layout)
        config = resolve_backends(validate(config), "gpu")
        mesh = h200_mesh(**config.mesh.sizes)
        step = jit_train_step(config, mesh, make_setup(config, mesh))
        return compile_for(mesh, step.fn, *step.args)

    return build


def trips(program):
    """Trip counts of the loops over ticks."""
    return [
        loop.trips for loop in program.summary.loops if loop.op_name.endswith("shard_map/while")
    ]


def test_ticks_are_three_loops_as_long_as_the_ideal_schedule(compiled):
    """Forward, both, backward: 7 + 8 + 7 ticks for 8 microbatches, so a bubble of 7 / 15."""
    assert trips(compiled("pipeline=8,microbatches=8")) == [7, 8, 7]


def test_stages_talk_by_asynchronous_permutes_of_the_residual_stream(compiled):
    summary = compiled("pipeline=8,microbatches=8").summary
    permutes = summary.collectives("collective-permute", axis="pipeline")
    assert all(c.is_async and c.overlapped_ops > 0 for c in permutes)
    # Each pass sends one residual stream in bf16: 7 + 8 forward ticks and 8 + 7 backward.
    assert sum(c.executions * c.operand_bytes for c in permutes) == 30 * STREAM_BYTES
    assert {dtype for c in permutes for dtype in c.dtypes} == {"bf16"}


def test_embedding_and_loss_are_shared_by_vocabulary_and_weights_stay_where_they_are(compiled):
    summary = compiled("pipeline=8,microbatches=8").summary
    over_stages = [c for c in summary.all_collectives if c.kind != "collective-permute"]
    # Nothing as large as a layer's matrices or the table moves; activations and statistics do.
    assert max(c.output_bytes for c in over_stages) <= STREAM_BYTES
    tables = [g for g in summary.all_gemms if VOCAB in (*g.lhs.dims, *g.rhs.dims, *g.output.dims)]
    assert not tables, "no stage computes the logits of the whole vocabulary"


def test_memory_of_1f1b_grows_with_stages_and_not_with_microbatches(compiled):
    """Under full remat a stage keeps one residual stream per layer, microbatch and stage ahead."""
    few, many, gpipe = (
        compiled(f"pipeline=8,{layout}").memory.temp_bytes
        for layout in ("microbatches=8", "microbatches=32", "schedule=gpipe,microbatches=32")
    )
    # 2 x 8 - 1 slots instead of 8 and one for what idle stages compute.
    assert few < many < few + 7 * STREAM_BYTES
    # GPipe keeps all 32.
    assert gpipe - many > 0.9 * (32 - 15) * STREAM_BYTES
    assert many < 0.5 * gpipe


@pytest.mark.nightly
def test_memory_of_1f1b_is_the_same_for_32_and_128_microbatches(compiled):
    """Temporaries; the batch itself, in the arguments, is larger."""
    some, many = (compiled(f"pipeline=8,microbatches={m}").memory.temp_bytes for m in (32, 128))
    assert many == pytest.approx(some, rel=0.01)
    two_stages = compiled("pipeline=2,microbatches=32", 2).memory.temp_bytes
    assert two_stages < some, "fewer stages ahead, fewer microbatches to keep"


@pytest.mark.nightly
def test_two_chunks_per_stage_keep_less_than_one(compiled):
    """23 halves of a stage instead of 15 whole ones."""
    whole, halves = (
        compiled(f"pipeline=8,{more}microbatches=32", 16).memory.temp_bytes
        for more in ("", "chunks=2,")
    )
    saved = (2 * 15 - 23) * STREAM_BYTES
    assert whole - halves > 0.8 * saved


@pytest.mark.nightly
def test_a_pipeline_inside_data_moves_weights_once_per_step_outside_all_loops(compiled):
    """Interleaved chunks are dealt out by one all-to-all each way; see mtjax.training.pipelined."""
    summary = compiled("data=2,pipeline=2,tensor=2,chunks=2,microbatches=4").summary
    over_data = [c for c in summary.all_collectives if "data" in c.axes]
    assert over_data and not any(c.inside_loop for c in over_data)
    gathers = [c for c in over_data if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype in c.dtypes} == {"bf16"}
    scatters = [c for c in over_data if c.kind == "reduce-scatter"]
    assert {dtype for c in scatters for dtype in c.dtypes} == {"f32"}
    large = LAYERS * EMBED * F32
    reduces = [c for c in over_data if c.kind == "all-reduce"]
    assert sum(c.output_bytes for c in reduces) < large
    dealt = summary.collectives("all-to-all", axis="pipeline", inside_loop=False)
    assert {dtype for c in dealt for dtype in c.dtypes} == {"bf16", "f32"}
