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
from mtjax.config.precision import QUANTIZED
from mtjax.precision.te import check_installed
from mtjax.sharding import make_mesh, platform_of
from mtjax.training.compiled import compile_step
from mtjax.training.feed import Feed
from mtjax.training.state import create_state, make_setup
from mtjax.training.step import Limits, StepInput, dropout_key, loss_and_gradients

TOLERANCES = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 2e-2}
"""Largest relative difference: float32 rounding in another order, or half-precision rounding.
In bfloat16 one device and a mesh are each about 2e-2 from the float32 gradients of a small
model."""

INTEGER_TOLERANCE = 1e-3
"""With int8, whose scales are no powers of two and move every value with their last place."""

_TRIES = 8
"""Batches, with operands that are rounded, of which one must agree. Where a sum lies within float32
rounding of a tie, a value goes to its other neighbour on another layout, and gradients differ by
1e-4 to 5e-2; on a batch without one they differ by rounding. A fault shows on every batch."""

_ZERO_RATIO = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""Share of the largest gradient below which another one is rounding alone, as of key biases."""


class LayoutRun(NamedTuple):
    """What one layout computed, on the host."""

    params: Any
    """Initial parameters."""
    gradients: list[Any]
    """Of the first batches, at the initial parameters."""
    losses: list[float]
    grad_norms: list[float]


def run_layout(config: Config, num_devices: int, steps: int, tries: int = 1) -> LayoutRun:
    """Initialise and train `steps` steps on the first devices; `config.mesh` must use them all.

    Before, the gradients of the first `tries` batches.

    Raises:
        ValueError: the config doesn't fit the mesh, or there are too few devices or batches.
    """
    mesh = _mesh(config, num_devices)
    config = resolve_backends(validate(config), *platform_of(mesh))
    setup = make_setup(config, mesh)
    state = create_state(config, mesh, setup)
    params = jax.device_get(state.params)
    compiled = compile_step(config, mesh, setup)

    def gradients_of(params: Any, batch: Any) -> Any:
        per_token = 1.0 / jnp.maximum(jnp.sum(batch.weights), 1e-6)
        key = dropout_key(config, 0)
        return loss_and_gradients(config, setup, mesh, params, batch, key, per_token)[1]

    batches = _first_batches(config, mesh, steps, tries)
    with jax.set_mesh(mesh):
        run = jax.jit(gradients_of)
        gradients = [jax.device_get(run(state.params, batch)) for batch in batches[:tries]]
    losses, norms = [], []
    for batch in batches[:steps]:
        state, metrics = compiled.run(state, batch, Limits(np.float32(np.inf), np.float32(np.inf)))
        losses.append(float(metrics["train/loss"]))
        norms.append(float(metrics["train/grad_norm"]))
    return LayoutRun(params, gradients, losses, norms)


def _first_batches(config: Config, mesh: Mesh, steps: int, tries: int) -> list[StepInput]:
    """For `steps` steps, and up to `tries` if there are as many."""
    wanted = max(steps, tries)
    feed = Feed(config, mesh, "train", wanted * config.train.batch_size)
    batches: list[StepInput] = []
    while len(batches) < wanted:
        try:
            batches.append(feed.next()[0])
        except StopIteration as error:
            if len(batches) >= steps:
                break
            raise ValueError(
                f"--steps: got {steps}, expected at most the {len(batches)} that the data has "
                "batches for; lower it, or set data.epochs to None"
            ) from error
    return batches


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
    """Initial weights bit by bit; losses and norms of all steps; each gradient leaf by its norm, of
    the batch that agrees best.

    A leaf below `zero_ratio` of the largest is compared to that one: softmax ignores a key bias,
    whose gradient is therefore rounding, different on each layout.
    """
    equal = jax.tree.map(np.array_equal, reference.params, other.params)
    pairs = zip(reference.gradients, other.gradients, strict=True)
    error, worst = min(_worst_leaf(ours, theirs, zero_ratio) for ours, theirs in pairs)
    return Difference(
        all(jax.tree.leaves(equal)),
        _relative(reference.losses, other.losses),
        _relative(reference.grad_norms, other.grad_norms),
        error,
        worst,
    )


def _worst_leaf(gradients: Any, others: Any, zero_ratio: float) -> tuple[float, str]:
    """The largest relative difference, and the leaf that has it."""
    worst, error = "", 0.0
    expected = jax.tree_util.tree_leaves_with_path(gradients)
    largest = max(float(np.linalg.norm(leaf)) for _, leaf in expected)
    for (path, ours), theirs in zip(expected, jax.tree.leaves(others), strict=True):
        norm = float(np.linalg.norm(ours))
        scale = largest if norm < zero_ratio * largest else norm
        leaf_error = _no_nan(np.linalg.norm(ours - theirs) / scale)
        if leaf_error >= error:
            worst = jax.tree_util.keystr(path, simple=True, separator=".")
            error = leaf_error
    return error, worst


def _relative(expected: list[float], got: list[float]) -> float:
    pairs = zip(expected, got, strict=True)
    return _no_nan(np.max([abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]))


def _no_nan(difference: Any) -> float:
    """NaN agrees with nothing, as no comparison with it says."""
    return float(np.nan_to_num(difference, nan=np.inf))


def parity(config: Config, layouts: Sequence[Layout], steps: int, tolerance: float | None) -> int:
    """Print a table of differences to one device; returns 1 if one is above the tolerance."""
    check_installed(config)
    limit = TOLERANCES[config.compute_dtype]
    rounded = config.precision in QUANTIZED and config.compute_dtype == "fp32"
    trained, tries = (TOLERANCES["bf16"], _TRIES) if rounded else (limit, 1)
    if rounded and config.precision == "int8":
        limit = INTEGER_TOLERANCE
    if tolerance is not None:
        limit = trained = tolerance
    base = on_layout(config, Layout("one device", MeshConfig(), None, None, None))
    others = [checked_layout(config, layout) for layout in layouts]
    # What is wrong with a layout is said before the reference takes its time.
    for other, layout in zip(others, layouts, strict=True):
        make_setup(other, _mesh(other, layout.num_devices))
    reference = run_layout(base, 1, steps, tries)
    print(f"one device: losses {' '.join(f'{x:.6f}' for x in reference.losses)}")
    allowed = f"at most {limit:g} allowed"
    if rounded:
        allowed += (
            f" in gradients of one of {tries} batches (where no value\n"
            f"is at a tie of its rounding), {trained:g} in losses and norms"
        )
    print(f"relative differences, {allowed}:")
    width = max(len(layout.text) for layout in layouts)
    print(f"{'layout':<{width}}  weights    loss      grad norm  gradients  verdict")
    failed = 0
    for other, layout in zip(others, layouts, strict=True):
        found = compare(
            reference,
            run_layout(other, layout.num_devices, steps, tries),
            _ZERO_RATIO[config.compute_dtype],
        )
        ok = found.params_equal and found.gradient <= limit
        ok = ok and max(found.loss, found.grad_norm) <= trained
        failed += not ok
        print(
            f"{layout.text:<{width}}  {'bit-equal' if found.params_equal else 'DIFFER   '}  "
            f"{found.loss:.2e}  {found.grad_norm:.2e}   {found.gradient:.2e}   "
            f"{'same' if ok else f'DIFFERENT (worst: {found.worst})'}",
            flush=True,
        )
    if failed and rounded:
        print("fewer tokens (--train.seq-len, --train.batch-size) meet fewer ties")
    return 1 if failed else 0
