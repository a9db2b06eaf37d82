"""Reads XLA's scheduled HLO text into computations and instructions.

Only what the summaries need: names, result shapes, opcodes, operands and the attribute text. The
grammar is that of `compiled.as_text()` in jaxlib 0.10 to 0.12.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

DTYPE_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")


def dtype_bits(dtype: str) -> int:
    """Bits per element of an HLO dtype: 16 for bf16, 8 for f8e4m3fn, 4 for s4; 0 for a token."""
    if dtype in DTYPE_BITS:
        return DTYPE_BITS[dtype]
    match = re.match(r"[fsu](\d+)", dtype)
    return int(match[1]) if match else 0


@dataclass(frozen=True)
class Array:
    """Dtype and dims of one buffer, as HLO names them."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer; sub-byte elements packed."""
        return math.prod(self.dims) * dtype_bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: tuple[Array, ...]
    """Buffers of the result, a tuple's flattened."""
    operands: tuple[str, ...]
    """Names of the operands."""
    literal: str
    """Text between the parentheses: the value of a constant, the index of a parameter."""
    attributes: str
    """Everything behind the parentheses."""
    is_root: bool

    def called(self, *keys: str) -> tuple[str, ...]:
        """Names of the computations behind the given attributes, such as body or calls."""
        names = []
        for key in keys:
            match = re.search(rf"[ ,]{key}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.attributes)
            if match:
                names += re.findall(r"[\w.\-]+", match[1] or match[2])
        return tuple(names)

    def attribute_ints(self, key: str) -> tuple[int, ...] | None:
        """The integers of an attribute such as lhs_contracting_dims={1}; None where absent."""
        match = re.search(rf"[ ,]{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, filter(None, match[1].split(",")))) if match else None

    @property
    def op_name(self) -> str:
        """Path of the jax operation this came from; empty where XLA kept none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def custom_call_target(self) -> str:
        """Name of the library entry of a custom-call; empty for others."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclass
class Computation:
    """Instructions in schedule order."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    by_name: dict[str, Instruction] = field(default_factory=dict)

    def add(self, instruction: Instruction) -> None:
        """Appends an instruction."""
        self.instructions.append(instruction)
        self.by_name[instruction.name] = instruction

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next(i for i in reversed(self.instructions) if i.is_root)

    def operand_arrays(self, instruction: Instruction) -> tuple[tuple[Array, ...], ...]:
        """Buffers of each operand of an instruction of this computation."""
        found = (self.by_name.get(name) for name in instruction.operands)
        return tuple(operand.shape if operand else () for operand in found)


@dataclass
class Module:
    """A parsed program."""

    entry: Computation
    computations: dict[str, Computation]
    num_partitions: int
    """Devices the program is partitioned over."""


def parse_arrays(text: str) -> tuple[Array, ...]:
    """All buffers in a type such as (f32[2,3]{1,0}, u32[]), in order."""
    return tuple(
        Array(dtype, tuple(map(int, filter(None, dims.split(",")))))
        for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text))
    )


def _closing(text: str, start: int) -> int:
    """Index behind the parenthesis that closes the one at `start`, quoted text skipped."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and char == "(":
            depth += 1
        elif not quoted and char == ")":
            depth -= 1
            if depth == 0:
                return i + 1
    raise ValueError(
        f"HLO text: got unbalanced parentheses in {text[:120]!r}, expected a whole line"
    )


def parse_instruction(line: str) -> Instruction | None:
    """One line of a computation, or None if it holds no instruction."""
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    # Layouts follow an array type without a space; a tuple type ends with its parenthesis.
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    inside = _COMMENT.sub("", line[opcode.end() : close - 1])
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        shape=parse_arrays(line[start:end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        literal=inside,
        attributes=" " + line[close:],
        is_root=bool(head[1]),
    )


def parse_module(text: str) -> Module:
    """Parses the text of a compiled program.

    Raises:
        ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = computations.setdefault(head[2], Computation(head[2]))
            entry = current if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            instruction = parse_instruction(line)
            if instruction:
                current.add(instruction)
    if entry is None:
        raise ValueError(
            f"HLO text: got {text[:60]!r}, expected a module with an ENTRY computation; "
            "pass compiled.as_text()"
        )
    partitions = re.search(r"num_partitions=(\d+)", text)
    return Module(entry, computations, int(partitions[1]) if partitions else 1)


@dataclass(frozen=True)
class Loop:
    """A while loop on the way to an instruction."""

    body: str
    trips: int | None
    """Iterations; None where XLA does not know."""
    op_name: str


@dataclass(frozen=True)
class Site:
    """One place in the executed program, with the loops around it."""

    computation: Computation
    instruction: Instruction
    loops: tuple[Loop, ...]
    wrappers: tuple[Instruction, ...]
    """Fusions and async starts that contain it, outermost first."""


_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation")
# Their to_apply is a scalar function.
_APPLIES_SCALAR = ("reduce", "map", "sort", "scatter", "select-and-scatter", "reduce-window")


def walk(module: Module) -> Iterator[Site]:
    """Every instruction the entry reaches, in schedule order, once per call site.

    All branches of a conditional are visited; the conditions of loops are not.
    """
    yield from _walk(module, module.entry, (), ())


def _walk(module, computation, loops, wrappers) -> Iterator[Site]:
    for instruction in computation.instructions:
        yield Site(computation, instruction, loops, wrappers)
        opcode = instruction.opcode
        if opcode == "while":
            (body,) = instruction.called("body")
            trips = trip_count(module, computation, instruction)
            loop = Loop(body, trips, instruction.op_name)
            yield from _walk(module, module.computations[body], (*loops, loop), ())
        elif "reduce" not in opcode and opcode not in _APPLIES_SCALAR:
            inner = wrappers
            if opcode.startswith(("fusion", "async")):
                inner = (*wrappers, instruction)
            if not opcode.endswith(("-done", "-update")):
                for called in called_computations(module, instruction):
                    yield from _walk(module, called, loops, inner)


def called_computations(module: Module, instruction: Instruction) -> list[Computation]:
    """Computations that a call, fusion or conditional runs, all branches of it."""
    names = instruction.called(*_CALLS)
    return [module.computations[name] for name in names if name in module.computations]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a while: as XLA annotated it, else from `i < constant` with i from a constant.

    Returns None where neither is there.
    """
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    compare = _loop_bound(module, module.computations[loop.called("condition")[0]])
    if compare is None:
        return None
    index, bound = compare
    state = computation.by_name.get(loop.operands[0])
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    start = computation.by_name.get(state.operands[index])
    while start is not None and start.opcode in ("copy", "bitcast"):
        start = computation.by_name.get(start.operands[0])
    if start is None or start.opcode != "constant":
        return None
    return max(0, bound - int(start.literal))


def _loop_bound(module: Module, condition: Computation) -> tuple[int, int] | None:
    """(tuple index of the counter, bound) of a condition `counter < bound`, else None."""
    outer = condition.root
    inner, compare = condition, outer
    if outer.opcode == "fusion":
        inner = module.computations[outer.called("calls")[0]]
        compare = inner.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None

    def resolve(name: str) -> Instruction:
        found = inner.by_name[name]
        if inner is not condition and found.opcode == "parameter":
            found = condition.by_name[outer.operands[int(found.literal)]]
        while found.opcode in ("copy", "bitcast"):
            found = condition.by_name[found.operands[0]]
        return found

    counter, bound = map(resolve, compare.operands)
    index = re.search(r"index=(\d+)", counter.attributes)
    if counter.opcode != "get-tuple-element" or bound.opcode != "constant" or not index:
        return None
    return int(index[1]), int(bound.literal)
