"""The same steps on several layouts, compared number by number with one device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtjax.config import Config, on_layout, resolve_backends, validate
from mtjax.config.layout import checked_layout
from mtjax.config.mesh import Layout, MeshConfig
from mtjax.precision.te import check_installed
from mtjax.sharding import make_mesh, platform_of
from mtjax.training.compiled import compile_step
from mtjax.training.feed import Feed
from mtjax.training.state import create_state, make_setup
from mtjax.training.step import Limits, dropout_key, loss_and_gradients

TOLERANCES = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 2e-2}
"""Largest relative difference: float32 rounding in another order, or half-precision rounding.
In bfloat16 one device and a mesh are each about 2e-2 from the float32 gradients of a small
model."""

_ZERO_RATIO = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""Share of the largest gradient below which another one is rounding alone, as of key biases."""


class LayoutRun(NamedTuple):
    """What one layout computed, on the host."""

    params: Any
    """Initial parameters."""
    gradients: Any
    """Of the first step."""
    losses: list[float]
    grad_norms: list[float]


def run_layout(config: Config, num_devices: int, steps: int) -> LayoutRun:
    """Initialise and train `steps` steps on the first devices; `config.mesh` must use them all.

    Raises:
        ValueError: the config doesn't fit the mesh, or there are too few devices.
    """
    mesh = _mesh(config, num_devices)
    config = resolve_backends(validate(config), *platform_of(mesh))
    setup = make_setup(config, mesh)
    state = create_state(config, mesh, setup)
    params = jax.device_get(state.params)
    feed = Feed(config, mesh, "train", steps * config.train.batch_size)
    compiled = compile_step(config, mesh, setup)

    def first_gradients(params: Any, batch: Any) -> Any:
        per_token = 1.0 / jnp.maximum(jnp.sum(batch.weights), 1e-6)
        key = dropout_key(config, 0)
        return loss_and_gradients(config, setup, mesh, params, batch, key, per_token)[1]

    losses, norms, gradients = [], [], None
    for step in range(steps):
        try:
            batch, _ = feed.next()
        except StopIteration as error:
            raise ValueError(
                f"--steps: got {steps}, expected at most the {step} that the data has batches "
                "for; lower it, or set data.epochs to None"
            ) from error
        if step == 0:
            with jax.set_mesh(mesh):
                gradients = jax.device_get(jax.jit(first_gradients)(state.params, batch))
        state, metrics = compiled.run(state, batch, Limits(np.float32(np.inf), np.float32(np.inf)))
        losses.append(float(metrics["train/loss"]))
        norms.append(float(metrics["train/grad_norm"]))
    return LayoutRun(params, gradients, losses, norms)


def _mesh(config: Config, num_devices: int) -> Mesh:
    """The mesh over the first devices. Raises ValueError when there are too few."""
    devices = jax.devices()
    if len(devices) < num_devices:
        raise ValueError(
            f"mesh: got {num_devices} devices, expected at most the {len(devices)} present; on CPU "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}"
        )
    return make_mesh(config.mesh, devices[:num_devices])


class Difference(NamedTuple):
    """How far a layout is from the reference: relative differences, and the worst gradient."""

    params_equal: bool
    loss: float
    grad_norm: float
    gradient: float
    worst: str


def compare(reference: LayoutRun, other: LayoutRun, zero_ratio: float) -> Difference:
    """Initial weights bit by bit; losses and norms of all steps; each gradient leaf by its norm.

    A leaf below `zero_ratio` of the largest is compared to that one: softmax ignores a key bias,
    whose gradient is therefore rounding, different on each layout.
    """
    equal = jax.tree.map(np.array_equal, reference.params, other.params)
    worst, error = "", 0.0
    expected = jax.tree_util.tree_leaves_with_path(reference.gradients)
    largest = max(float(np.linalg.norm(leaf)) for _, leaf in expected)
    for (path, ours), theirs in zip(expected, jax.tree.leaves(other.gradients), strict=True):
        norm = float(np.linalg.norm(ours))
        scale = largest if norm < zero_ratio * largest else norm
        leaf_error = float(np.linalg.norm(ours - theirs)) / scale
        if leaf_error >= error:
            worst = jax.tree_util.keystr(path, simple=True, separator=".")
            error = leaf_error
    return Difference(
        all(jax.tree.leaves(equal)),
        _relative(reference.losses, other.losses),
        _relative(reference.grad_norms, other.grad_norms),
        error,
        worst,
    )


def _relative(expected: list[float], got: list[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, got, strict=True))


def parity(config: Config, layouts: Sequence[Layout], steps: int, tolerance: float | None) -> int:
    """Print a table of differences to one device; returns 1 if one is above the tolerance."""
    check_installed(config)
    limit = TOLERANCES[config.compute_dtype] if tolerance is None else tolerance
    base = on_layout(config, Layout("one device", MeshConfig(), None, None, None))
    others = [checked_layout(config, layout) for layout in layouts]
    # What is wrong with a layout is said before the reference takes its time.
    for other, layout in zip(others, layouts, strict=True):
        make_setup(other, _mesh(other, layout.num_devices))
    reference = run_layout(base, 1, steps)
    print(f"one device: losses {' '.join(f'{x:.6f}' for x in reference.losses)}")
    print(f"relative differences, at most {limit:g} allowed:")
    width = max(len(layout.text) for layout in layouts)
    print(f"{'layout':<{width}}  weights    loss      grad norm  gradients  verdict")
    failed = 0
    for other, layout in zip(others, layouts, strict=True):
        found = compare(
            reference,
            run_layout(other, layout.num_devices, steps),
            _ZERO_RATIO[config.compute_dtype],
        )
        ok = found.params_equal and max(found.loss, found.grad_norm, found.gradient) <= limit
        failed += not ok
        print(
            f"{layout.text:<{width}}  {'bit-equal' if found.params_equal else 'DIFFER   '}  "
            f"{found.loss:.2e}  {found.grad_norm:.2e}   {found.gradient:.2e}   "
            f"{'same' if ok else f'DIFFERENT (worst: {found.worst})'}",
            flush=True,
        )
    return 1 if failed else 0
