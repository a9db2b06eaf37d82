"""Logical names of tensor dims, and the one table that maps them to mesh axes.

Layers say what a dim is; this file says where it lives. The same names serve outside and inside
manual regions, because axes that are absent, of size 1, already used or currently manual drop out.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.config.mesh import AXES, MeshConfig
from mtjax.config.precision import Role

Names = tuple[str | None, ...]

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context",),
    # Megatron sequence parallelism: norms and residuals split the sequence over tensor too.
    "seq_sp": ("context", "tensor"),
    # Partial sums over tokens, one per shard of batch and sequence.
    "token_shards": ("data", "fsdp", "expert", "context"),
    "act_heads": ("tensor",),
    "act_ffn": ("tensor",),
    "act_vocab": ("tensor",),
    # parameters
    # Outside of the experts, which take the axis first, expert is a second fsdp axis; context is
    # another: each of its devices would otherwise hold, and sum, the same weights' gradients.
    "embed": ("fsdp", "expert", "context"),
    # Projections from a latent have no embed dim: this one takes its axes there.
    "latent": ("fsdp", "expert", "context"),
    # What a product adds to the residual stream where tokens are split over tensor already.
    "residual": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "ffn": ("tensor",),
    # Embedding and loss are shared by all stages, so that none waits for another or holds all.
    "vocab": ("pipeline", "tensor"),
    # With the axes of a sequence: its parts meet at the experts, and each device serves its own.
    "experts": ("expert", "context", "tensor"),
    "expert_ffn": (),
    "router": (),
    "position": (),
    "norm": (),
    "layers": (),
    # Layers where an even cut over the pipeline gives each stage its own.
    "stages": ("pipeline",),
}
"""Logical dim -> mesh axes it is split over."""

_rules: contextvars.ContextVar[dict[str, tuple[str, ...]]] = contextvars.ContextVar(
    "rules", default=RULES
)


@contextlib.contextmanager
def override_rules(**rules: tuple[str, ...]) -> Iterator[None]:
    """Use other mesh axes for some logical dims while tracing, as generation does."""
    token = _rules.set(_rules.get() | rules)
    try:
        yield
    finally:
        _rules.reset(token)


class Product(NamedTuple):
    """How a kernel is used in a matrix product that may run in fewer bits."""

    role: Role
    num_in: int
    """Dims that are summed over, the first ones behind layers and experts."""


class Boxed(flax.struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter with the logical names of its dims.

    Not `nn.Partitioned`: its unbox constrains by logical name whenever a mesh is set, and fails.
    """

    value: Any
    names: Names = flax.struct.field(pytree_node=False)
    product: Product | None = flax.struct.field(pytree_node=False, default=None)
    """None: always used in the compute dtype."""

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Boxed":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Boxed":
        raise NotImplementedError("layers are stacked by mtjax.parallel.stack, not by nn.scan")

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Boxed":
        raise NotImplementedError("layers are stacked by mtjax.parallel.stack, not by nn.scan")


def is_boxed(x: object) -> bool:
    """Whether `x` is a parameter box: the leaf test for trees of boxes."""
    return isinstance(x, Boxed)


def unbox(tree: Any) -> Any:
    """Replace each box by its value."""
    return jax.tree.map(lambda b: b.value if is_boxed(b) else b, tree, is_leaf=is_boxed)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | np.ndarray | None = None) -> Mesh:
    """Arrange devices (all by default) in a mesh with automatic axes.

    Raises:
        ValueError: the axes don't multiply to the number of devices.
    """
    flat = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    sizes = config.resolve(flat.size).sizes
    # jax.make_mesh reorders devices for locality; the given order already has hosts outermost.
    grid = flat.reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform_of(mesh: Mesh) -> tuple[str, tuple[int, int] | None]:
    """Platform of a mesh's devices and, of GPUs, compute capability: major and minor."""
    device = mesh.devices.flat[0]
    text = getattr(device, "compute_capability", None)
    if text is None:
        return device.platform, None
    major, minor = str(text).split(".")
    return device.platform, (int(major), int(minor))


def no_mesh() -> Any:
    """Context without a mesh, for initialisation: its dummy shapes need not divide."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def axis_size(name: str) -> int:
    """Size of a mesh axis in the current context, 1 where there is none."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def _axes_and_types() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    mesh = jax.sharding.get_abstract_mesh()
    return ((), ()) if mesh.empty else (mesh.axis_names, mesh.axis_types)


def _free_axes() -> set[str]:
    types = zip(*_axes_and_types(), strict=True)
    return {name for name, kind in types if kind == AxisType.Auto}


def spec(*names: str | None) -> P:
    """Partition spec of dims with these logical names (None: not split) in the current context.

    Raises:
        ValueError: a name is not in RULES.
    """
    free = {axis for axis in _free_axes() if axis_size(axis) > 1}
    rules = _rules.get()
    entries: list[str | tuple[str, ...] | None] = []
    for name in names:
        if name is not None and name not in rules:
            raise ValueError(
                f"logical name: got {name!r}, expected one of {', '.join(rules)}; "
                "add a rule in mtjax/sharding.py"
            )
        axes = tuple(axis for axis in rules[name] if axis in free) if name else ()
        free -= set(axes)
        entries.append(axes[0] if len(axes) == 1 else (axes or None))
    return P(*entries)


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the layout of `x` by the logical names of its dims; no-op without a mesh."""
    if not _free_axes():
        return x
    return jax.lax.with_sharding_constraint(x, spec(*names))


def reshard(x: jax.Array, source: Names, target: Names) -> jax.Array:
    """Move `x` from one layout to another, in its own dtype.

    Both sides are pinned: with the target alone, recomputed and differentiated code moves the
    float32 value that `x` was cast from.
    """
    return shard(shard(x, *source), *target)


def local_map(f: Callable[..., Any], in_names: Sequence[Names], out_names: Any) -> Callable:
    """Run `f` on local blocks, manual over every axis that is still automatic.

    `out_names` is one tuple of names, or a list of them for several outputs. Replication is not
    checked (it does not nest), so `f` must not be differentiated through collectives of its own.
    """
    free = _free_axes()
    if not free:
        return f
    outs = [spec(*n) for n in out_names] if isinstance(out_names, list) else spec(*out_names)
    return jax.shard_map(
        f,
        in_specs=tuple(spec(*n) for n in in_names),
        out_specs=tuple(outs) if isinstance(outs, list) else outs,
        axis_names=free,
        check_vma=False,
    )


def local_sum(
    f: Callable[..., Any], in_names: Sequence[Names], out_names: Names, summed: Sequence[int]
) -> Callable:
    """`local_map` of a product f, which sums over the dims `summed` of its first operand.

    Devices that hold parts of these dims add up what f gives them: by a reduce-scatter over mesh
    axes that split the result, innermost in their dim of it, and by an all-reduce over others.
    """
    operand, result = _axes_by_dim(in_names[0]), _axes_by_dim(out_names)
    parted = tuple(axis for dim in summed for axis in operand[dim])

    def whole(*operands: jax.Array) -> jax.Array:
        y, left = f(*operands), parted
        for dim, axes in enumerate(result):
            scattered = tuple(axis for axis in axes if axis in parted)
            if scattered:
                assert axes[-len(scattered) :] == scattered, "the parts would come out of order"
                y = jax.lax.psum_scatter(y, scattered, scatter_dimension=dim, tiled=True)
                left = tuple(axis for axis in left if axis not in scattered)
        return jax.lax.psum(y, left) if left else y

    return local_map(whole, in_names, out_names)


def _axes_by_dim(names: Names) -> list[tuple[str, ...]]:
    """Mesh axes that split each dim here."""
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec(*names)]


def mesh_axes(*names: str) -> tuple[str, ...]:
    """Mesh axes that split dims with these names here, for collectives inside `local_map`."""
    return tuple(axis for axes in _axes_by_dim(names) for axis in axes)


def all_mesh_axes(name: str) -> tuple[str, ...]:
    """Mesh axes that split dims of this name, those that are already manual included."""
    return tuple(axis for axis in _rules.get()[name] if axis_size(axis) > 1)


def sum_and_scatter(x_BTD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside `local_map`: the sum over mesh axes, laid out ("batch", "seq_sp", None).

    A reduce-scatter over the axes that split the sequence there, an all-reduce over others.
    """
    scattered = tuple(axis for axis in axes if axis in all_mesh_axes("seq_sp"))
    others = tuple(axis for axis in axes if axis not in scattered)
    if scattered:
        x_BTD = jax.lax.psum_scatter(x_BTD, scattered, scatter_dimension=1, tiled=True)
    return jax.lax.psum(x_BTD, others) if others else x_BTD


def manual_axes(name: str) -> tuple[str, ...]:
    """Axes that split dims of this name and are manual here, such as data in the step.

    What is reduced over all tokens needs them named; over automatic axes the array is the global
    one.
    """
    types = dict(zip(*_axes_and_types(), strict=True))
    return tuple(axis for axis in all_mesh_axes(name) if types.get(axis) == AxisType.Manual)


def sum_over_manual(x: jax.Array, name: str) -> jax.Array:
    """Sum over the `manual_axes` of this name. Not to be differentiated through."""
    axes = manual_axes(name)
    return jax.lax.psum(x, axes) if axes else x


def compute_dtypes(boxes: Any, dtype: Any) -> Any:
    """The dtype in which layers use each parameter: `dtype`, but float32 for those of routers,
    where rounding changes which experts are chosen."""
    return jax.tree.map(
        lambda b: np.dtype(np.float32) if "router" in b.names else dtype, boxes, is_leaf=is_boxed
    )


def check_divisible(tree: Any) -> None:
    """Check that the mesh splits every parameter of a tree of boxes evenly.

    Raises:
        ValueError: naming the parameter, its dim and the axes that don't divide it.
    """
    for path, box in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_boxed):
        for dim, (size, entry) in enumerate(zip(box.value.shape, spec(*box.names), strict=False)):
            axes = (entry,) if isinstance(entry, str) else (entry or ())
            parts = math.prod(axis_size(axis) for axis in axes)
            if size % parts:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(
                    f"parameter {name.removesuffix('.value')}: dim {dim} ({box.names[dim]}) has "
                    f"{size} entries, expected a multiple of {' x '.join(axes)} = {parts}; "
                    f"shrink the axis or change the model so that {box.names[dim]} divides"
                )


def compute_shardings(boxes: Any, mesh: Mesh) -> Any:
    """Sharding of each parameter as layers use it: split over fsdp and tensor."""
    return jax.tree.map(lambda b: NamedSharding(mesh, spec(*b.names)), boxes, is_leaf=is_boxed)


def storage_shardings(boxes: Any, mesh: Mesh, axes: tuple[str, ...] = ("pipeline", "data")) -> Any:
    """Sharding of each parameter at rest: as computed, and split over `axes` too where it is not.

    Over data this is ZeRO stage 1 (Rajbhandari et al. 2020): masters and optimizer moments live in
    pieces. Over pipeline it keeps what all stages use, or what can't be cut by stage at rest, from
    being held by each. A leaf without a dim that divides stays replicated.
    """

    def one(box: Boxed) -> NamedSharding:
        entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec(*box.names)]
        entries += [()] * (box.value.ndim - len(entries))
        for axis in axes:
            if mesh.shape[axis] > 1 and axis not in {a for entry in entries for a in entry}:
                _split_one_more(entries, box, axis, mesh)
        return NamedSharding(mesh, P(*(e[0] if len(e) == 1 else (e or None) for e in entries)))

    return jax.tree.map(one, boxes, is_leaf=is_boxed)


def _split_one_more(entries: list[tuple[str, ...]], box: Boxed, axis: str, mesh: Mesh) -> None:
    """Give an axis to the first dim that is whole and divides, else to one that is split more."""
    for whole in (True, False):
        for dim, (entry, size) in enumerate(zip(entries, box.value.shape, strict=True)):
            # Which layers go where is the pipeline's matter alone.
            by_layer = mesh.shape["pipeline"] > 1 and box.names[dim] in ("layers", "stages")
            parts = mesh.shape[axis] * math.prod(mesh.shape[a] for a in entry)
            if (not entry) == whole and not by_layer and size % parts == 0:
                entries[dim] = (*entry, axis)
                return
