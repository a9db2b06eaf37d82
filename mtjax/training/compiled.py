"""The train step as an executable."""

import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.training.state import Setup
from mtjax.training.step import jit_train_step


class CompiledStep(NamedTuple):
    """The step, and what compiling told about it."""

    run: Any
    compile_s: float
    memory: str


def compile_step(config: Config, mesh: Mesh, setup: Setup) -> CompiledStep:
    """Compile the train step for the mesh; the state is donated, nothing is run."""
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        step = jit_train_step(config, mesh, setup)
        compiled = step.fn.lower(*step.args).compile()
    return CompiledStep(compiled, time.perf_counter() - started, _describe_memory(compiled))


def _describe_memory(compiled: Any) -> str:
    memory = compiled.memory_analysis()
    if memory is None:
        return "memory n/a"
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    arguments, temporaries = (f"{size / 2**30:.2f} GiB" for size in sizes)
    return f"per device: arguments {arguments}, temporaries {temporaries}"
