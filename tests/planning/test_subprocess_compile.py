"""Compiles in a process of their own: results, crashes and time limits, on virtual CPU devices."""

import os
import time

import pytest

from mtjax.planning.compile import MemoryUse
from mtjax.planning.subprocess_compile import CompileFailed, compile_in_subprocess

FOUR_CPUS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def compile_matmul_over_cpu_devices(embed):
    """A row-parallel product on four CPU devices: an all-reduce over tensor."""
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from mtjax.planning.compile import compile_for

    mesh = jax.make_mesh((1, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct(
        (64, embed), "float32", sharding=NamedSharding(mesh, P(None, "tensor"))
    )
    w = jax.ShapeDtypeStruct((embed, 32), "float32", sharding=NamedSharding(mesh, P("tensor")))
    replicated = NamedSharding(mesh, P())
    return compile_for(mesh, lambda x, w: x @ w, x, w, out_shardings=replicated)


def abort_like_a_failed_check():
    """Writes what XLA writes, and dies as it does."""
    os.write(2, b"F0000 xla/service/gpu/thing.cc:1] Check failed: block == 32 (128 vs. 32) dot.7\n")
    os.write(2, b"*** Check failure stack trace: ***\n    @     0x7f  absl::LogMessage\n")
    os.abort()


def sleep_forever():
    """Never returns."""
    time.sleep(600)


def raise_error():
    """Raises before there is a program."""
    raise ValueError("no such preset")


def test_the_program_comes_back_and_is_summarised_here():
    program = compile_in_subprocess(compile_matmul_over_cpu_devices, env=FOUR_CPUS, embed=256)
    assert (program.platform, program.mesh_shape) == ("cpu", {"fsdp": 1, "tensor": 4})
    assert program.executable is None
    (reduce,) = program.summary.collectives("all-reduce", axis="tensor")
    assert reduce.operand_bytes == 64 * 32 * 4
    assert program.memory.arguments_bytes == (64 * 256 + 256 * 32) * 4 // 4
    assert program.memory.outputs_bytes == 64 * 32 * 4


def test_an_abort_names_the_signal_and_the_failed_check():
    with pytest.raises(CompileFailed, match="SIGABRT") as caught:
        compile_in_subprocess(abort_like_a_failed_check)
    assert "Check failed: block == 32 (128 vs. 32) dot.7" in str(caught.value)
    assert "absl::LogMessage" not in str(caught.value)


def test_a_time_limit_ends_the_process():
    start = time.monotonic()
    with pytest.raises(CompileFailed, match="still compiling after 2 s"):
        compile_in_subprocess(sleep_forever, time_limit_s=2)
    assert time.monotonic() - start < 30


def test_an_exception_is_passed_on_as_text():
    with pytest.raises(CompileFailed, match="no such preset"):
        compile_in_subprocess(raise_error)


def test_only_top_level_functions_can_be_sent():
    with pytest.raises(ValueError, match="at the top level of a module"):
        compile_in_subprocess(lambda: None)


def test_total_memory_counts_aliased_outputs_once():
    memory = MemoryUse(arguments_bytes=100, outputs_bytes=80, alias_bytes=60, temp_bytes=7)
    assert memory.total_bytes == 100 + 20 + 7
