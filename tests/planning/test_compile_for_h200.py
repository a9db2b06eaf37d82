"""Programs compiled for H200 without one: structure and numbers against arithmetic."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.planning.compile import (
    compile_for,
    make_target_mesh,
    supported_options,
    topology_devices,
)

LAYERS, EMBED, FFN, BATCH, SEQ = 4, 1024, 4096, 8, 512
# Without Triton every product is a cuBLAS call: a census that autotuning cannot blur.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def _abstract(mesh, shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def _constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, P(*spec))


def _fsdp_loss(params, x_BTD):
    """MLP stack, weights sharded over fsdp, cast to bf16 on the shards, gathered per layer."""
    params = jax.tree.map(lambda w: _constrain(w.astype(jnp.bfloat16), None, "fsdp"), params)

    @jax.checkpoint
    def layer(x_BTD, weights):
        gathered = jax.tree.map(lambda w: _constrain(_constrain(w, "fsdp"), None), weights)
        hidden_BTF = jax.nn.relu(x_BTD @ gathered["up"])
        return _constrain(x_BTD + hidden_BTF @ gathered["down"], "fsdp"), None

    x_BTD, _ = jax.lax.scan(layer, x_BTD, params)
    return jnp.sum(x_BTD.astype(jnp.float32) ** 2)


@functools.cache
def _fsdp_program(mesh):
    params = {
        "up": _abstract(mesh, (LAYERS, EMBED, FFN), jnp.float32, None, "fsdp"),
        "down": _abstract(mesh, (LAYERS, FFN, EMBED), jnp.float32, None, "fsdp"),
    }
    x_BTD = _abstract(mesh, (BATCH, SEQ, EMBED), jnp.bfloat16, "fsdp")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return compile_for(
        mesh,
        jax.grad(_fsdp_loss),
        params,
        x_BTD,
        compiler_options=CUBLAS,
        out_shardings=shardings,
    )


def test_fsdp_gathers_bf16_weights_inside_the_layer_loop(h200_mesh):
    summary = _fsdp_program(h200_mesh(fsdp=8)).summary
    gathers = summary.collectives("all-gather", axis="fsdp")
    assert gathers == summary.collectives("all-gather")
    assert {gather.dtypes for gather in gathers} == {("bf16",)}
    assert all(gather.inside_loop and gather.executions == LAYERS for gather in gathers)
    # Two matrices, gathered once going forward and once for the rematerialised backward.
    weight_bytes = 2 * EMBED * FFN * 2
    assert sum(gather.output_bytes for gather in gathers) == 2 * weight_bytes
    assert sum(gather.operand_bytes for gather in gathers) == 2 * weight_bytes / 8


def test_fsdp_reduces_gradients_by_reduce_scatter_inside_the_loop(h200_mesh):
    summary = _fsdp_program(h200_mesh(fsdp=8)).summary
    scatters = summary.collectives("reduce-scatter", axis="fsdp", inside_loop=True)
    assert sum(s.operand_bytes for s in scatters) == 2 * EMBED * FFN * 2
    assert sum(s.output_bytes for s in scatters) == 2 * EMBED * FFN * 2 / 8
    assert summary.collectives("all-reduce") == []
    # Ring: (n-1)/n of the weights of all layers, two gathers and one scatter.
    assert summary.wire_bytes("fsdp") == 3 * LAYERS * 2 * EMBED * FFN * 2 * 7 / 8


def test_the_gemm_census_counts_flops_through_the_loops(h200_mesh):
    summary = _fsdp_program(h200_mesh(fsdp=8)).summary
    assert [loop.trips for loop in summary.loops] == [LAYERS, LAYERS]
    # Two products forward, four backward, and the first one again under remat; 1/8 of the tokens.
    one_product = 2 * (BATCH * SEQ // 8) * EMBED * FFN
    assert len(summary.all_gemms) == 7
    assert summary.gemm_flops == 7 * LAYERS * one_product
    assert summary.gemm_flops_by_dtype() == {("bf16", "bf16"): summary.gemm_flops}
    assert {gemm.backend for gemm in summary.all_gemms} == {"cublas"}


def test_triton_products_count_the_same_flops(h200_mesh):
    mesh = h200_mesh(device=1)
    lhs = _abstract(mesh, (512, 1024), jnp.bfloat16)
    rhs = _abstract(mesh, (1024, 256), jnp.bfloat16)
    for options, backend in ((CUBLAS, "cublas"), ({}, "triton")):
        summary = compile_for(mesh, jnp.dot, lhs, rhs, compiler_options=options).summary
        (gemm,) = summary.gemms(dtype="bf16")
        assert (gemm.backend, gemm.flops) == (backend, 2 * 512 * 1024 * 256)


def test_memory_counts_the_shards_of_one_device(h200_mesh):
    memory = _fsdp_program(h200_mesh(fsdp=8)).memory
    params_bytes = 2 * LAYERS * EMBED * FFN * 4 / 8
    batch_bytes = BATCH * SEQ * EMBED * 2 / 8
    assert memory.arguments_bytes == params_bytes + batch_bytes
    assert memory.outputs_bytes == pytest.approx(params_bytes, abs=1024)
    assert memory.total_bytes == memory.arguments_bytes + memory.outputs_bytes + memory.temp_bytes


def test_donated_arguments_are_aliased(h200_mesh):
    mesh = h200_mesh(fsdp=8)
    x = _abstract(mesh, (1024, 1024), jnp.float32, "fsdp")
    memory = compile_for(mesh, lambda x: x * 2, x, donate_argnums=0).memory
    shard_bytes = 1024 * 1024 * 4 // 8
    assert (memory.arguments_bytes, memory.alias_bytes) == (shard_bytes, shard_bytes)
    assert memory.total_bytes == shard_bytes + memory.temp_bytes


def _sequence_parallel_mlp(params, x_BTD):
    gathered_BTD = _constrain(_constrain(x_BTD, "fsdp", "tensor"), "fsdp", None)
    hidden_BTF = _constrain(jax.nn.relu(gathered_BTD @ params["up"]), "fsdp", None, "tensor")
    return x_BTD + _constrain(hidden_BTF @ params["down"], "fsdp", "tensor")


def test_a_sequence_parallel_mlp_gathers_and_scatters_over_tensor(h200_mesh):
    mesh = h200_mesh(fsdp=2, tensor=4)
    params = {
        "up": _abstract(mesh, (EMBED, FFN), jnp.bfloat16, None, "tensor"),
        "down": _abstract(mesh, (FFN, EMBED), jnp.bfloat16, "tensor"),
    }
    x_BTD = _abstract(mesh, (BATCH, SEQ, EMBED), jnp.bfloat16, "fsdp", "tensor")
    summary = compile_for(mesh, _sequence_parallel_mlp, params, x_BTD).summary
    (gather,) = summary.collectives("all-gather")
    (scatter,) = summary.collectives("reduce-scatter")
    assert summary.collectives(axis="tensor") == [gather, scatter]
    activation_bytes = BATCH // 2 * SEQ * EMBED * 2
    assert (gather.output_bytes, scatter.operand_bytes) == (activation_bytes, activation_bytes)
    assert (gather.group_size, scatter.group_size) == (4, 4)
    assert not gather.inside_loop
    assert summary.gemm_flops == 2 * (2 * BATCH * SEQ * EMBED * FFN) // 8


@pytest.mark.parametrize("axes", [("fsdp",), ("tensor",), ("context", "tensor")])
def test_a_psum_moves_the_bytes_of_its_operand_over_its_axes(h200_mesh, axes):
    mesh = h200_mesh(fsdp=2, context=2, tensor=2)
    fn = jax.shard_map(
        lambda x: jax.lax.psum(x, axes),
        mesh=mesh,
        in_specs=P(None, ("fsdp", "context", "tensor")),
        out_specs=P(None, ("fsdp", "context", "tensor")),
        check_vma=False,
    )
    x = _abstract(mesh, (256, 8192), jnp.float32, None, ("fsdp", "context", "tensor"))
    (reduce,) = compile_for(mesh, fn, x).summary.collectives("all-reduce", axis=axes)
    assert reduce.axes == axes
    assert reduce.operand_bytes == reduce.output_bytes == 256 * 1024 * 4
    size = 2 ** len(axes)
    assert reduce.wire_bytes == 2 * 256 * 1024 * 4 * (size - 1) / size


def test_permutes_and_all_to_alls_name_their_axis(h200_mesh):
    mesh = h200_mesh(pipeline=4, expert=2)

    def body(x):
        x = jax.lax.ppermute(x, "pipeline", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.all_to_all(x, "expert", 0, 1, tiled=True)

    spec = P("pipeline", "expert")
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = _abstract(mesh, (1024, 512), jnp.bfloat16, "pipeline", "expert")
    summary = compile_for(mesh, fn, x).summary
    (permute,) = summary.collectives("collective-permute")
    (exchange,) = summary.collectives("all-to-all")
    assert (permute.axes, exchange.axes) == (("pipeline",), ("expert",))
    assert permute.operand_bytes == exchange.operand_bytes == 256 * 256 * 2
    assert exchange.wire_bytes == 256 * 256 * 2 / 2


def test_topology_devices_belong_to_their_hosts(h200_mesh):
    devices = topology_devices("h200:4x8")
    assert devices.shape == (32,)
    assert [device.process_index for device in devices] == [i // 8 for i in range(32)]


def test_a_mesh_must_use_all_devices_of_the_target(h200_mesh):
    with pytest.raises(ValueError, match=r"got \{'fsdp': 3\}.*the 8 devices of h200:1x8"):
        make_target_mesh("h200:1x8", fsdp=3)


def test_options_are_probed_and_unknown_ones_named(h200_mesh):
    mesh = h200_mesh(device=1)
    options = {**CUBLAS, "xla_gpu_no_such_option": True}
    accepted, rejected = supported_options(options)
    assert accepted == CUBLAS
    assert list(rejected) == ["xla_gpu_no_such_option"]
    x = _abstract(mesh, (8,), jnp.float32)
    with pytest.raises(ValueError, match="got xla_gpu_no_such_option"):
        compile_for(mesh, jnp.sin, x, compiler_options=options)


@pytest.mark.parametrize("name", ["a100", "h100", "b200"])
def test_every_target_compiles(h200_mesh, name):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = compile_for(name, lambda x: x * 2, x)
    assert (program.platform, program.mesh_shape) == ("cuda", {"device": 1})
    assert program.memory.arguments_bytes == 64 * 64 * 4


def test_fp8_products_stay_fp8_in_the_census(h200_mesh):
    mesh = h200_mesh(device=1)
    lhs = _abstract(mesh, (512, 1024), jnp.float8_e4m3fn)
    rhs = _abstract(mesh, (256, 1024), jnp.float8_e4m3fn)

    def product(lhs, rhs):
        contract = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(lhs, rhs, contract, preferred_element_type=jnp.bfloat16)

    summary = compile_for(mesh, product, lhs, rhs, compiler_options=CUBLAS).summary
    flops = 2 * 512 * 1024 * 256
    assert summary.gemm_flops_by_dtype() == {("f8e4m3fn", "f8e4m3fn"): flops}


def test_axes_are_right_when_the_mesh_permutes_the_devices(h200_mesh):
    devices = topology_devices("h200:1x8").reshape(4, 2).T
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"))
    fn = jax.shard_map(
        lambda x: jax.lax.psum(x, "tensor"),
        mesh=mesh,
        in_specs=P("fsdp", "tensor"),
        out_specs=P("fsdp", "tensor"),
        check_vma=False,
    )
    x = _abstract(mesh, (64, 64), jnp.float32, "fsdp", "tensor")
    (reduce,) = compile_for(mesh, fn, x).summary.collectives("all-reduce")
    assert (reduce.axes, reduce.group_size) == (("tensor",), 4)
