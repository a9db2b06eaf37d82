"""Matrix-product FLOPs that a traced function asks for, before XLA partitions and expands them."""

import math
from collections.abc import Iterator
from typing import Any


def asked_flops(jaxpr: Any, free_devices: int) -> dict[str, float]:
    """FLOPs per device by primitive (dot_general, ragged_dot_general), loops multiplied in; those
    of scaled_matmul count as dot_general.

    Args:
        jaxpr: of the whole program, such as `jax.jit(f).trace(*args).jaxpr`.
        free_devices: devices that the compiler divides the work between; inside a shard_map, those
            of the axes that are still automatic.

    A while loop whose trip count is not known counts once.
    """
    flops = {"dot_general": 0.0, "ragged_dot_general": 0.0}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            flops[name] += _dot_flops(eqn) / free_devices
        elif name == "scaled_matmul_wrapper":
            flops["dot_general"] += _scaled_flops(eqn) / free_devices
        elif name.startswith("ragged_dot"):
            flops["ragged_dot_general"] += _ragged_flops(eqn) / free_devices
        elif name == "cond":
            branches = [asked_flops(branch, free_devices) for branch in eqn.params["branches"]]
            largest = max(branches, key=lambda branch: sum(branch.values()))
            flops = {key: value + largest[key] for key, value in flops.items()}
        else:
            times = eqn.params["length"] if name == "scan" else 1
            inner_devices = free_devices
            if name == "shard_map":
                mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
                # Each device runs the body on its own block.
                inner_devices //= math.prod(mesh.shape[axis] for axis in manual)
            for inner in _inner_jaxprs(eqn.params):
                for key, value in asked_flops(inner, inner_devices).items():
                    flops[key] += times * value
    return flops


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item


def _dot_flops(eqn: Any) -> float:
    (lhs_dims, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in lhs_dims)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _scaled_flops(eqn: Any) -> float:
    """Of [B, M, K] by [B, N, K]."""
    depth = eqn.invars[0].aval.shape[-1]
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _ragged_flops(eqn: Any) -> float:
    """Each row meets one group: rows x width of a group's matrix x depth."""
    lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, rhs_contract), (_, rhs_batch) = numbers.dot_dimension_numbers
    used = {*rhs_contract, *rhs_batch, *numbers.rhs_group_dimensions}
    width = math.prod(size for dim, size in enumerate(rhs) if dim not in used)
    return 2.0 * math.prod(lhs) * width
