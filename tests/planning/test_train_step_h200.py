"""What XLA makes of the train step on one host of 8 H200, read from the program, without a GPU."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    resolve_backends,
    validate,
)
from mtjax.planning.compile import compile_for
from mtjax.sharding import unbox
from mtjax.training.state import make_setup
from mtjax.training.step import jit_train_step

LAYERS, EMBED, FFN, HEADS, HEAD_DIM, VOCAB, SEQ, BATCH = 4, 512, 2048, 8, 64, 4096, 1024, 8
LAYER_MATRICES = 4 * EMBED * HEADS * HEAD_DIM + 3 * EMBED * FFN
TABLE = VOCAB * EMBED
NORMS = (2 * LAYERS + 1) * EMBED
PARAMS = LAYERS * LAYER_MATRICES + 2 * TABLE + NORMS
BF16, F32 = 2, 4

BASE = Config(
    model=ModelConfig(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        num_layers=LAYERS,
        ffn_dim=FFN,
        attention=AttentionConfig(num_heads=HEADS, head_dim=HEAD_DIM),
    ),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(seq_len=SEQ, batch_size=BATCH, remat="full"),
)


@pytest.fixture(scope="module")
def compile_step(h200_mesh):
    """compile(axis sizes, **changes of TrainConfig) -> the compiled train step."""

    @functools.cache
    def build(axes, model, train):
        sizes = dict(axes)
        config = dataclasses.replace(
            BASE,
            mesh=MeshConfig(**sizes),
            model=model or BASE.model,
            train=dataclasses.replace(BASE.train, **dict(train)),
        )
        config = resolve_backends(validate(config), "gpu")
        mesh = h200_mesh(**config.mesh.sizes)
        setup = make_setup(config, mesh)
        with jax.set_mesh(mesh):
            step = jit_train_step(config, mesh, setup)
        return compile_for(mesh, step.fn, *step.args)

    def call(axes, model=None, **train):
        return build(tuple(axes.items()), model, tuple(train.items()))

    return call


def total(collectives, field):
    return sum(getattr(c, field) * c.executions for c in collectives)


def test_the_test_counts_all_parameters():
    from mtjax.parallel.stack import abstract_params

    leaves = jax.tree.leaves(unbox(abstract_params(BASE.model)))
    assert sum(np.prod(leaf.shape) for leaf in leaves) == PARAMS


def test_fsdp_gathers_bf16_weights_layer_by_layer_and_scatters_their_gradients(compile_step):
    summary = compile_step({"fsdp": 8}).summary
    gathers = summary.collectives("all-gather", axis="fsdp", inside_loop=True)
    assert {dtype for c in gathers for dtype in c.dtypes} == {"bf16"}
    # Once in the forward and once in the backward loop; norms are not split.
    assert total(gathers, "output_bytes") == 2 * LAYERS * LAYER_MATRICES * BF16
    assert all(c.is_async for c in gathers)
    scatters = summary.collectives("reduce-scatter", axis="fsdp", inside_loop=True)
    assert total(scatters, "operand_bytes") == LAYERS * LAYER_MATRICES * BF16
    # Nothing as large as a matrix is all-reduced: norm gradients, and a few scalars.
    reduces = summary.collectives("all-reduce")
    assert total(reduces, "output_bytes") < 2 * NORMS * F32


def test_sequence_parallelism_gathers_and_scatters_and_never_all_reduces(compile_step):
    summary = compile_step({"tensor": 8}).summary
    activation = BATCH * SEQ * EMBED * BF16
    gathers = summary.collectives("all-gather", axis="tensor", inside_loop=True)
    scatters = summary.collectives("reduce-scatter", axis="tensor", inside_loop=True)
    assert {dtype for c in gathers + scatters for dtype in c.dtypes} == {"bf16"}
    # Per layer as in Korthikanti et al. 2022: forward 2 and 2; backward, with recomputation of
    # the layer, 2 + 2 gathers (inputs again, output gradients) and 1 + 2 scatters.
    forward, backward = (
        [
            total([c for c in found if ("transpose" in c.op_name) == late], field)
            for found, field in ((gathers, "output_bytes"), (scatters, "operand_bytes"))
        ]
        for late in (False, True)
    )
    assert forward == [LAYERS * 2 * activation] * 2
    assert backward == [LAYERS * 4 * activation, LAYERS * 3 * activation]
    reduces = summary.collectives("all-reduce", axis="tensor")
    assert max(c.output_bytes for c in reduces) <= max(NORMS * 4 * F32, BATCH * SEQ * F32)


@pytest.mark.parametrize(
    ("axes", "shards"),
    [
        pytest.param({"data": 8}, 1, marks=pytest.mark.nightly),
        ({"data": 4, "fsdp": 2}, 2),
        pytest.param({"data": 2, "tensor": 4}, 4, marks=pytest.mark.nightly),
    ],
)
def test_data_gathers_bf16_once_and_scatters_fp32_once_outside_all_loops(
    compile_step, axes, shards
):
    summary = compile_step(axes, microbatches=4, batch_size=4 * BATCH).summary
    over_data = [c for c in summary.all_collectives if "data" in c.axes]
    assert over_data, "the step reduces over data somewhere"
    assert not any(c.inside_loop for c in over_data)
    local = (PARAMS - NORMS) // shards + NORMS
    gathers = [c for c in over_data if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype in c.dtypes} == {"bf16"}
    assert total(gathers, "output_bytes") == local * BF16
    scatters = [c for c in over_data if c.kind == "reduce-scatter"]
    assert {dtype for c in scatters for dtype in c.dtypes} == {"f32"}
    assert total(scatters, "operand_bytes") == local * F32
    # What is left are scalars: loss, weight and gradient norm.
    reduces = [c for c in over_data if c.kind == "all-reduce"]
    assert total(reduces, "output_bytes") < 256
    assert {c.kind for c in over_data} <= {"all-gather", "reduce-scatter", "all-reduce"}


def test_cudnn_attention_is_used_and_selective_remat_runs_it_once(compile_step):
    def forward_calls(program):
        calls = program.summary.custom_calls
        return sum(c.target == "__cudnn$fmhaSoftmax" for c in calls)

    assert forward_calls(compile_step({"fsdp": 8})) == 2, "full remat runs it again in backward"
    selective = compile_step({"fsdp": 8}, remat="selective", remat_save=("attention_out",))
    assert forward_calls(selective) == 1


@pytest.mark.nightly
def test_remat_trades_memory_for_recomputation(compile_step):
    temp = [
        compile_step({"fsdp": 8}, remat=remat).memory.temp_bytes
        for remat in ("none", "selective", "full")
    ]
    assert temp[0] > temp[1] > temp[2]


def test_offloaded_tensors_live_in_host_memory(compile_step):
    program = compile_step(
        {"fsdp": 8}, remat="selective", remat_save=("qkv",), remat_offload=("attention_out",)
    )
    # XLA's memory space 5 is host memory; the stack of one tensor per layer is kept there.
    local = f"bf16[{LAYERS},1,{SEQ},{HEADS},{HEAD_DIM}]"
    held = [line for line in program.hlo.splitlines() if local in line and "S(5)" in line]
    assert held
    assert "S(5)" not in compile_step({"fsdp": 8}, remat="selective").hlo


@pytest.mark.nightly
def test_float32_logits_exist_for_one_chunk_only(compile_step):
    model = dataclasses.replace(BASE.model, vocab_size=64 * 1024)
    whole, chunked = (
        compile_step({"fsdp": 8}, model=model, loss_chunk=chunk) for chunk in (SEQ, SEQ // 8)
    )
    all_logits = f"{SEQ},65536]"
    assert all_logits in whole.hlo
    assert all_logits not in chunked.hlo
    saved = whole.memory.temp_bytes - chunked.memory.temp_bytes
    assert saved > 0.9 * (7 / 8) * SEQ * 64 * 1024 * BF16
