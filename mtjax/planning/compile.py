"""Compiles a function for GPUs that are not there, and reads what the program will do.

XLA's CUDA plugin compiles from a description of the target (targets.py), on a machine without a
driver. The program is the one a GPU would get, apart from autotuning: collectives, fusions, dtypes
and memory are to be trusted, tile sizes and speeds are not.

    mesh = make_target_mesh("h200:1x8", fsdp=4, tensor=2)
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    program = compile_for(mesh, step, x)
    print(program.memory, program.summary)
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The plugin looks for a driver when it loads, and refuses to compile without one unless told so.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mtjax.planning.hlo import ProgramSummary, summarize
from mtjax.planning.targets import Target, parse_target, target_config_text

INSTALL = "pip install -e '.[gpu]'"


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes per device, as XLA's buffer assignment has them."""

    arguments_bytes: int
    outputs_bytes: int
    alias_bytes: int
    """Outputs that live in donated arguments."""
    temp_bytes: int
    """Everything in between, at its largest."""

    @property
    def total_bytes(self) -> int:
        """Peak: arguments, outputs outside of them, and temporaries."""
        return self.arguments_bytes + self.outputs_bytes - self.alias_bytes + self.temp_bytes

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"total_bytes": self.total_bytes}
        return ", ".join(
            f"{name.removesuffix('_bytes')} {value / 2**30:.3f} GiB"
            for name, value in parts.items()
        )


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A compiled program: how much memory it takes and what it does."""

    platform: str
    """cuda for a GPU target; cpu when compiled for virtual CPU devices instead."""
    mesh_shape: dict[str, int]
    memory: MemoryUse
    hlo: str = field(repr=False)
    """Scheduled HLO text."""
    executable: Any = field(default=None, repr=False, compare=False)
    """jax.stages.Compiled; None when it comes from a subprocess."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh_shape.values())

    def __getstate__(self) -> dict[str, Any]:
        """Without the executable, which lives in this process only."""
        return self.__dict__ | {"executable": None}

    @functools.cached_property
    def summary(self) -> ProgramSummary:
        """Collectives, matrix products, library calls and loops."""
        return summarize(self.hlo, self.mesh_shape)


@functools.cache
def cuda_plugin_missing() -> str | None:
    """Why nothing can be compiled for GPUs here, with the remedy; None if it can."""
    try:
        _topology(parse_target("h200"))
    except Exception as error:
        # Backends raise NotImplementedError, RuntimeError, JaxRuntimeError or ImportError.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"jax {jax.__version__} cannot compile for CUDA here ({reason}); install the CUDA "
            f"plugin: {INSTALL}"
        )
    return None


@functools.cache
def _topology(target: Target) -> tuple[jax.Device, ...]:
    """Devices of the target, cached so that equal targets give the same devices."""
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x{target.hosts}x{target.gpus_per_host}",
        target_config=target_config_text(target.gpu),
    )
    return tuple(description.devices)


def topology_devices(target: Target | str) -> np.ndarray:
    """Devices [hosts * gpus_per_host] of a cluster that need not exist, host by host.

    Raises:
        ValueError: the target is malformed.
        RuntimeError: no CUDA plugin; the text says what to install.
    """
    target = parse_target(target) if isinstance(target, str) else target
    missing = cuda_plugin_missing()
    if missing:
        raise RuntimeError(missing)
    return np.array(_topology(target))


def make_target_mesh(target: Target | str, **axis_sizes: int) -> Mesh:
    """A mesh of automatic axes over the target's devices, first axis outermost.

    Raises:
        ValueError: the sizes don't multiply to the number of devices.
        RuntimeError: no CUDA plugin.
    """
    devices = topology_devices(target)
    if math.prod(axis_sizes.values()) != devices.size:
        raise ValueError(
            f"mesh: got {axis_sizes}, expected sizes that multiply to the {devices.size} devices "
            f"of {target}; change an axis or the target"
        )
    types = (AxisType.Auto,) * len(axis_sizes)
    return Mesh(devices.reshape(tuple(axis_sizes.values())), tuple(axis_sizes), axis_types=types)


def compile_for(
    where: Mesh | Target | str,
    fn: Callable[..., Any],
    *abstract_args: Any,
    compiler_options: Mapping[str, Any] | None = None,
    **jit_options: Any,
) -> CompiledProgram:
    """Compiles fn for the devices of a mesh or target.

    Args:
        where: mesh over `topology_devices` (or over CPU devices: then it compiles for those), or
            a target, which means a mesh of one axis "device".
        fn: function, or the result of jax.jit.
        abstract_args: trees of arrays or ShapeDtypeStructs; a leaf without a NamedSharding on
            the mesh is replicated.
        compiler_options: XLA options by name; unknown names raise, `supported_options` sorts
            them out.
        jit_options: for jax.jit, such as out_shardings and donate_argnums.

    Raises:
        ValueError: an XLA option this jaxlib does not know.
        RuntimeError: no CUDA plugin.
    """
    mesh = where if isinstance(where, Mesh) else _flat_mesh(where)
    rejected = supported_options(compiler_options or {}, mesh.devices.flat[0])[1]
    if rejected:
        raise ValueError(
            f"compiler_options: got {', '.join(rejected)}, expected options of XLA in jax "
            f"{jax.__version__} ({'; '.join(rejected.values())}); drop them or use "
            "supported_options, names change between versions"
        )
    args = jax.tree.map(lambda leaf: _place(leaf, mesh), abstract_args)
    with jax.set_mesh(mesh):
        jitted = fn if hasattr(fn, "trace") and not jit_options else jax.jit(fn, **jit_options)
        executable = _compile(jitted, args, _platform(mesh.devices.flat[0]), compiler_options)
    stats = executable.memory_analysis()
    return CompiledProgram(
        platform=_platform(mesh.devices.flat[0]),
        mesh_shape=dict(mesh.shape),
        memory=MemoryUse(
            arguments_bytes=stats.argument_size_in_bytes,
            outputs_bytes=stats.output_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            temp_bytes=stats.temp_size_in_bytes,
        ),
        hlo=executable.as_text(),
        executable=executable,
    )


def _flat_mesh(target: Target | str) -> Mesh:
    target = parse_target(target) if isinstance(target, str) else target
    return make_target_mesh(target, device=target.num_devices)


def _platform(device: jax.Device) -> str:
    """The lowering platform of a device: jax calls a topology's GPUs gpu, lowering wants cuda."""
    return "cuda" if device.platform in ("gpu", "cuda") else device.platform


def _place(leaf: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The abstract value of a leaf, on the mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not (isinstance(sharding, NamedSharding) and sharding.mesh == mesh):
        sharding = NamedSharding(mesh, PartitionSpec())
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)


def _compile(jitted, args: tuple, platform: str, options: Mapping[str, Any] | None):
    lowered = jitted.trace(*args).lower(lowering_platforms=(platform,))
    return lowered.compile(compiler_options=dict(options) if options else None)


def supported_options(
    options: Mapping[str, Any], device: jax.Device | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tries each XLA option on a trivial compile: names come and go between jaxlib versions.

    Args:
        options: XLA debug options by name.
        device: what to compile for; None means the H200 target.

    Returns (accepted options, reason by rejected name).
    """
    device = topology_devices("h200")[0] if device is None else device
    reasons = {name: _option_error(name, value, device) for name, value in options.items()}
    accepted = {name: value for name, value in options.items() if reasons[name] is None}
    return accepted, {name: reason for name, reason in reasons.items() if reason is not None}


@functools.cache
def _option_error(name: str, value: Any, device: jax.Device) -> str | None:
    """XLA's complaint about an option, or None if it compiles with it."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    scalar = jax.ShapeDtypeStruct((), np.float32, sharding=sharding)
    try:
        _compile(jax.jit(lambda x: x + 1), (scalar,), _platform(device), {name: value})
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return None
