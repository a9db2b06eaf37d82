"""What a compiled program does: its collectives, matrix products, library calls and loops.

Read from the scheduled HLO text, so the same queries serve a deviceless compile for a GPU, a
compile for virtual CPU devices and a program that ran.

    summary = summarize(compiled.as_text(), {"fsdp": 4, "tensor": 2})
    summary.collectives("all-gather", axis="fsdp", inside_loop=True, dtype="bf16")
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtjax.planning.groups import Groups, group_axes, parse_groups
from mtjax.planning.hlo_text import Array, Computation, Instruction, Loop, Site, parse_module, walk

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Collectives by their HLO name."""

# Opcodes that keep the GPU busy between the start and the end of a collective, if they touch more
# than this: loop counters and index arithmetic hide nothing.
_COMPUTE = ("fusion", "custom-call", "dot", "convolution", "while", "conditional", "call")
_MIN_COMPUTE_BYTES = 4096
BLOCK_SCALED = "__cudnn$blockScaledDot"
"""Operands [B, M, K] and [B, N, K], then their scales."""
GEMM_TARGETS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$groupedMatmul", BLOCK_SCALED)


@dataclass(frozen=True, kw_only=True)
class _Located:
    """Where something stands in the program, and how often it runs."""

    name: str
    """Instruction name in the text."""
    op_name: str
    """Path of the jax operation it came from; may be empty."""
    loops: tuple[Loop, ...]
    """While loops around it, outermost first."""

    @property
    def executions(self) -> int:
        """Runs per call of the program: the product of trip counts, unknown ones counted once."""
        return math.prod(loop.trips or 1 for loop in self.loops)

    @property
    def inside_loop(self) -> bool:
        """Whether any loop is around it."""
        return bool(self.loops)


@dataclass(frozen=True, kw_only=True)
class Collective(_Located):
    """One communication, possibly of several combined buffers. Bytes are per device and run."""

    kind: str
    """One of KINDS."""
    operands: tuple[Array, ...]
    """Buffers sent."""
    groups: Groups
    """Device numbers that talk to each other; (source, target) pairs of a collective-permute."""
    axes: tuple[str, ...]
    """Mesh axes it runs over, in mesh order, without axes of size 1; empty without a mesh."""
    is_async: bool
    """Split in start and done, so that computation may run meanwhile."""
    overlapped_ops: int
    """Compute instructions scheduled between start and done: what hides it; 0 if sync."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """HLO dtypes of the buffers, each once, such as ("bf16",)."""
        return tuple(sorted({array.dtype for array in self.operands}))

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return max(map(len, self.groups))

    @property
    def operand_bytes(self) -> int:
        """Bytes each device puts in."""
        return sum(array.num_bytes for array in self.operands)

    @property
    def output_bytes(self) -> int:
        """Bytes each device gets out."""
        if self.kind == "all-gather":
            return self.operand_bytes * self.group_size
        if self.kind == "reduce-scatter":
            return self.operand_bytes // self.group_size
        return self.operand_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends, by ring algorithms; a permute sends its operand once."""
        n = self.group_size
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.operand_bytes)
        whole = max(self.operand_bytes, self.output_bytes)
        return whole * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)

    def __str__(self) -> str:
        buffers = " ".join(f"{n}x{array}" for array, n in Counter(map(str, self.operands)).items())
        state = f"async over {self.overlapped_ops} ops" if self.is_async else "sync"
        return (
            f"{self.executions:4d} x {self.kind} over ({','.join(self.axes)}) "
            f"in loop depth {len(self.loops)}, {state}: {buffers} [{self.op_name}]"
        )


@dataclass(frozen=True, kw_only=True)
class Gemm(_Located):
    """One matrix product, batched or not."""

    backend: str
    """cublas, cudnn, triton, or xla for a dot in an ordinary fusion or on its own."""
    lhs: Array
    rhs: Array
    output: Array
    flops_per_run: int
    """2 x output elements x contracted elements."""

    @property
    def flops(self) -> int:
        """FLOPs per call of the program and device, loops multiplied in."""
        return self.flops_per_run * self.executions

    def __str__(self) -> str:
        return (
            f"{self.executions:4d} x {self.backend} {self.output} <- {self.lhs} x {self.rhs}, "
            f"{self.flops_per_run / 1e9:.3g} GFLOP [{self.op_name}]"
        )


@dataclass(frozen=True, kw_only=True)
class CustomCall(_Located):
    """A call into a library or a kernel of ours; products are among the gemms instead."""

    target: str
    operands: tuple[Array, ...]
    outputs: tuple[Array, ...]


@dataclass(frozen=True)
class ProgramSummary:
    """Everything found in one program. Print it to see all of it."""

    all_collectives: tuple[Collective, ...]
    all_gemms: tuple[Gemm, ...]
    custom_calls: tuple[CustomCall, ...]
    loops: tuple[Loop, ...]
    """While loops in schedule order."""
    mesh_shape: dict[str, int]

    def collectives(
        self,
        kind: str | None = None,
        axis: str | tuple[str, ...] | None = None,
        inside_loop: bool | None = None,
        dtype: str | None = None,
        op_name: str | None = None,
    ) -> list[Collective]:
        """Collectives that match all that is given.

        Args:
            kind: one of KINDS.
            axis: mesh axis, or tuple of axes, it runs over: exactly these, in any order.
            inside_loop: whether a while loop is around it.
            dtype: HLO dtype of at least one of its buffers, such as bf16.
            op_name: regular expression searched for in the jax path.

        Raises:
            ValueError: no such kind, or an axis the mesh does not have.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}; correct it")
        axes = None if axis is None else {axis} if isinstance(axis, str) else set(axis)
        if axes and not axes <= set(self.mesh_shape):
            raise ValueError(
                f"axis: got {axis!r}, expected axes of the mesh {self.mesh_shape}; correct it or "
                "pass the mesh shape to summarize"
            )
        tests: list[tuple[Any, Callable[[Collective], bool]]] = [
            (kind, lambda c: c.kind == kind),
            (axes, lambda c: set(c.axes) == axes),
            (dtype, lambda c: dtype in c.dtypes),
        ]
        return _matching(self.all_collectives, tests, inside_loop, op_name)

    def gemms(
        self,
        dtype: str | None = None,
        inside_loop: bool | None = None,
        op_name: str | None = None,
    ) -> list[Gemm]:
        """Matrix products that match all that is given; dtype is that of either operand."""
        return _matching(
            self.all_gemms,
            [(dtype, lambda g: dtype in (g.lhs.dtype, g.rhs.dtype))],
            inside_loop,
            op_name,
        )

    @property
    def gemm_flops(self) -> int:
        """FLOPs of all matrix products per call and device, loops multiplied in."""
        return sum(gemm.flops for gemm in self.all_gemms)

    def gemm_flops_by_dtype(self) -> dict[tuple[str, str], int]:
        """FLOPs per pair of operand dtypes, largest first."""
        flops: Counter[tuple[str, str]] = Counter()
        for gemm in self.all_gemms:
            flops[gemm.lhs.dtype, gemm.rhs.dtype] += gemm.flops
        return dict(flops.most_common())

    def wire_bytes(self, axis: str | tuple[str, ...] | None = None) -> float:
        """Bytes a device sends per call of the program, over the given axes or over all."""
        return sum(c.wire_bytes * c.executions for c in self.collectives(axis=axis))

    def __str__(self) -> str:
        parts = [f"mesh {self.mesh_shape}"]
        parts += [f"loop {loop.body}: {loop.trips} trips [{loop.op_name}]" for loop in self.loops]
        parts += map(str, (*self.all_collectives, *self.all_gemms))
        parts += [f"{call.executions:4d} x custom call {call.target}" for call in self.custom_calls]
        return "\n".join(parts)


def _matching(items: Iterable[Any], tests, inside_loop: bool | None, op_name: str | None) -> list:
    """The items for which each test with a wanted value holds."""
    tests = [
        *tests,
        (inside_loop, lambda item: item.inside_loop == inside_loop),
        (op_name, lambda item: re.search(op_name or "", item.op_name) is not None),
    ]
    active = [test for wanted, test in tests if wanted is not None]
    return [item for item in items if all(test(item) for test in active)]


def summarize(hlo: str, mesh_shape: Mapping[str, int] | None = None) -> ProgramSummary:
    """Reads a scheduled HLO module.

    Args:
        hlo: `compiled.as_text()`.
        mesh_shape: mesh axis -> size, outermost first, as in `dict(mesh.shape)`; without it no
            collective has axes.

    Raises:
        ValueError: not an HLO module, or a replica group form not known here.
        IndexError: the program runs on more devices than the mesh has.
    """
    module = parse_module(hlo)
    mesh_shape = dict(mesh_shape or {})
    collectives, gemms, calls, loops = [], [], [], []
    seen_loops = set()
    for site in walk(module):
        if site.loops and site.loops not in seen_loops:
            seen_loops.add(site.loops)
            loops.append(site.loops[-1])
        kind = site.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            collectives.append(collective_at(site, module.num_partitions, mesh_shape))
        elif site.instruction.opcode in ("dot", "scaled-dot"):
            gemms.append(_dot(site))
        elif site.instruction.opcode == "custom-call":
            target = site.instruction.custom_call_target
            if target.startswith(GEMM_TARGETS):
                gemms.append(_gemm(site, "cudnn" if target == BLOCK_SCALED else "cublas"))
            else:
                calls.append(_custom_call(site, target))
    return ProgramSummary(tuple(collectives), tuple(gemms), tuple(calls), tuple(loops), mesh_shape)


def _place(site: Site) -> dict[str, Any]:
    """Fields of _Located; the op_name of the fusion around stands in for a missing one."""
    names = (site.instruction, *reversed(site.wrappers))
    op_name = next((i.op_name for i in names if i.op_name), "")
    return {"name": site.instruction.name, "op_name": op_name, "loops": site.loops}


def _flat_operands(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """Buffers of all operands."""
    arrays = computation.operand_arrays(instruction)
    return tuple(array for operand in arrays for array in operand)


def collective_at(site: Site, num_partitions: int, mesh_shape: Mapping[str, int]) -> Collective:
    """The collective whose instruction (or start) stands at `site`."""
    instruction = site.instruction
    kind = instruction.opcode.removesuffix("-start")
    groups = parse_groups(instruction.attributes, num_partitions)
    operands = _flat_operands(site.computation, instruction)
    if kind == "ragged-all-to-all":
        # Operands are input, output, and four vectors of offsets and sizes.
        operands = operands[:1]
    starts = [i for i in (instruction, *site.wrappers) if i.opcode.endswith("-start")]
    # Older jaxlib splits every collective and marks the ones it does not overlap.
    is_async = bool(starts) and '"is_sync":true' not in instruction.attributes
    return Collective(
        **_place(site),
        kind=kind,
        operands=operands,
        groups=groups,
        axes=group_axes(groups, dict(mesh_shape)) if mesh_shape else (),
        is_async=is_async,
        overlapped_ops=_overlapped_ops(site) if is_async and not site.wrappers else 0,
    )


def _overlapped_ops(site: Site) -> int:
    """Compute instructions scheduled between a start and its done, in the same computation."""
    instructions = site.computation.instructions
    count = 0
    for instruction in instructions[instructions.index(site.instruction) + 1 :]:
        if instruction.opcode.endswith("-done") and site.instruction.name in instruction.operands:
            return count
        touched = (*instruction.shape, *_flat_operands(site.computation, instruction))
        count += (
            instruction.opcode.removesuffix("-start") in _COMPUTE
            and sum(array.num_bytes for array in touched) > _MIN_COMPUTE_BYTES
        )
    return count


def _dot(site: Site) -> Gemm:
    in_triton = any('"kind":"__triton' in wrapper.attributes for wrapper in site.wrappers)
    return _gemm(site, "triton" if in_triton else "xla")


def _gemm(site: Site, backend: str) -> Gemm:
    product = product_at(site.computation, site.instruction)
    return Gemm(
        **_place(site),
        backend=backend,
        lhs=product.lhs,
        rhs=product.rhs,
        output=product.output,
        flops_per_run=product.flops,
    )


@dataclass(frozen=True)
class Product:
    """Operands of a matrix product."""

    lhs: Array
    rhs: Array
    output: Array
    depth: int
    """Elements contracted per element of the output."""

    @property
    def flops(self) -> int:
        """2 x output elements x contracted elements."""
        return 2 * math.prod(self.output.dims) * self.depth


def product_at(where: Computation, instruction: Instruction) -> Product:
    """The product of a dot, or of a call of one of GEMM_TARGETS.

    Raises:
        ValueError: a cuBLAS call without dimension numbers.
    """
    lhs, rhs = (arrays[0] for arrays in where.operand_arrays(instruction)[:2])
    contracting: tuple[int, ...]
    if instruction.opcode != "custom-call":
        contracting = instruction.attribute_ints("lhs_contracting_dims") or ()
    elif instruction.custom_call_target == BLOCK_SCALED:
        contracting = (len(lhs.dims) - 1,)
    else:
        numbers = re.search(r'"lhs_contracting_dimensions":\s*(\[[^\]]*\])', instruction.attributes)
        if not numbers:
            raise ValueError(
                f"{instruction.name}: got no lhs_contracting_dimensions, expected a cuBLAS call "
                "with them; teach mtjax/planning/hlo.py the form of this jaxlib"
            )
        contracting = tuple(map(int, json.loads(numbers[1])))
    depth = math.prod(lhs.dims[dim] for dim in contracting)
    return Product(lhs, rhs, instruction.shape[0], depth)


def _custom_call(site: Site, target: str) -> CustomCall:
    return CustomCall(
        **_place(site),
        target=target,
        operands=_flat_operands(site.computation, site.instruction),
        outputs=site.instruction.shape,
    )
