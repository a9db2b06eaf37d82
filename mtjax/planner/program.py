"""The train step of a config, compiled for a target in a process of its own."""

import dataclasses
import math
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mtjax.config import BatchRampConfig, Config, resolve_backends, validate
from mtjax.planning.subprocess_compile import compile_in_subprocess
from mtjax.planning.targets import Target


@dataclass(frozen=True, kw_only=True)
class ParamRow:
    """Parameters that share a layout."""

    names: str
    """Logical names of the dims."""
    axes: str
    """Mesh axes of the dims where layers use them, in order; - where a dim is whole."""
    count: int
    """Parameters in total, padding included."""
    per_device: int
    """Parameters on one device, as layers use them."""


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A compiled train step and what is known of its arrays. Bytes are per device."""

    config: Config
    """With mesh and backends resolved."""
    program: Any
    """mtjax.planning.compile.CompiledProgram."""
    param_rows: tuple[ParamRow, ...]
    param_bytes: int
    """Masters, as stored."""
    optimizer_bytes: int
    compute_bytes: int
    """Copy of the weights in the compute dtype, or quantised, as layers use it."""
    gradient_bytes: int
    """float32 gradients, laid out as the copy."""
    asked_flops: dict[str, float]
    """Matrix-product FLOPs the traced step asks for per device, by primitive."""


def compile_step_for(config: Config, devices: Target | int, time_limit_s: float) -> StepProgram:
    """Compiles the step that training would run, in a subprocess.

    Args:
        config: valid; its mesh must use all devices.
        devices: GPUs of a target, or a number of virtual CPU devices of this machine.
        time_limit_s: the compile is ended after this long.

    Raises:
        CompileFailed: XLA aborted, ran out of time, or refused; with its last lines.
    """
    env = {}
    if isinstance(devices, int):
        flag = f"--xla_force_host_platform_device_count={devices}"
        env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return compile_in_subprocess(
        build_step, config=config, devices=devices, time_limit_s=time_limit_s, env=env
    )


def build_step(config: Config, devices: Target | int) -> StepProgram:
    """Compiles the step in this process, for full batches: a ramp's loop has no known length."""
    import jax
    import numpy as np

    from mtjax.planning.asked import asked_flops
    from mtjax.planning.compile import compile_for, topology_devices
    from mtjax.sharding import make_mesh, platform_of
    from mtjax.training.state import make_setup
    from mtjax.training.step import jit_train_step

    if isinstance(devices, Target):
        present = topology_devices(devices)
    else:
        present = np.array(jax.devices("cpu"))
    mesh = make_mesh(config.mesh, present)
    full = dataclasses.replace(config.train, batch_ramp=BatchRampConfig())
    config = dataclasses.replace(config, train=full)
    config = resolve_backends(validate(config), *platform_of(mesh))
    setup = make_setup(config, mesh)
    with jax.set_mesh(mesh):
        step = jit_train_step(config, mesh, setup)
        jaxpr = step.fn.trace(*step.args).jaxpr
        rows = _param_rows(setup.boxes, mesh)
        compute_bytes = _compute_bytes(config, setup.boxes, mesh)
    params_per_device = sum(row.per_device for row in rows)
    return StepProgram(
        config=config,
        program=compile_for(mesh, step.fn, *step.args),
        param_rows=rows,
        param_bytes=_bytes_per_device(setup.abstract.params),
        optimizer_bytes=_bytes_per_device(setup.abstract.opt_state),
        compute_bytes=compute_bytes,
        gradient_bytes=params_per_device * 4,
        asked_flops=asked_flops(jaxpr, mesh.size),
    )


def _bytes_per_device(tree: Any) -> int:
    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _compute_bytes(config: Config, boxes: Any, mesh: Any) -> int:
    """Of the weights as layers use them; scales are left out."""
    import jax
    import jax.numpy as jnp

    from mtjax.sharding import is_boxed
    from mtjax.training.quantized import bytes_per_value, quantized_share
    from mtjax.training.state import gathered_shardings
    from mtjax.training.step import COMPUTE_DTYPES

    dtype = COMPUTE_DTYPES[config.compute_dtype]
    wide, rounded = jnp.dtype(dtype).itemsize, bytes_per_value(config, dtype)
    total = 0.0
    used = gathered_shardings(boxes, mesh)
    for (path, box), sharding in zip(
        jax.tree_util.tree_leaves_with_path(boxes, is_leaf=is_boxed),
        jax.tree.leaves(used),
        strict=True,
    ):
        narrow = quantized_share(config, path[0].key, box)
        size = math.prod(sharding.shard_shape(box.value.shape))
        total += size * (narrow * rounded + (1 - narrow) * wide)
    return round(total)


def _param_rows(boxes: Any, mesh: Any) -> tuple[ParamRow, ...]:
    """Layouts of the parameters, most parameters first."""
    import jax

    from mtjax.sharding import is_boxed
    from mtjax.training.state import gathered_shardings

    used = gathered_shardings(boxes, mesh)

    total: Counter[tuple[str, str]] = Counter()
    local: Counter[tuple[str, str]] = Counter()
    leaves = jax.tree.leaves(boxes, is_leaf=is_boxed)
    for box, sharding in zip(leaves, jax.tree.leaves(used), strict=True):
        shape = box.value.shape
        entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        axes = " ".join("*".join((e,) if isinstance(e, str) else e or "-") for e in entries)
        key = " ".join(str(name or "-") for name in box.names), axes
        total[key] += math.prod(shape)
        local[key] += math.prod(sharding.shard_shape(shape))
    return tuple(
        ParamRow(names=names, axes=axes, count=count, per_device=local[names, axes])
        for (names, axes), count in total.most_common()
    )
