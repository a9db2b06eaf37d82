"""Which temporaries a program holds at its peak, from the schedule and the aliases XLA must keep.

XLA tells how much memory a program takes and not for what. Here the lifetimes are derived again:
a buffer lives from the instruction that makes it to its last use; views, tuples, loops and updates
in place share the buffer of their operand; what a loop body passes on lives in the loop's carry.
"""

import re
from dataclasses import dataclass, replace

from mtjax.planning.hlo_text import (
    Computation,
    Instruction,
    Module,
    called_computations,
    parse_module,
)

_VIEWS = ("bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "add-dependency")


@dataclass(frozen=True)
class Buffer:
    """One allocation."""

    num_bytes: int
    name: str
    """Instruction that makes it."""
    op_name: str
    """Path of the jax operation it came from; may be empty."""
    shape: str


Places = tuple[tuple[Buffer, ...], ...]
"""The buffers that each element of a value lies in; one element for an array."""


@dataclass(frozen=True)
class Peak:
    """The moment when most is held."""

    num_bytes: int
    buffers: tuple[Buffer, ...]
    """Largest first; arguments of the program are not among them."""


def peak_temporaries(hlo: str) -> Peak:
    """The peak of a scheduled program, arguments and what is returned in their place left out."""
    module = parse_module(hlo)
    return _Holder(module).peak(module.entry)


class _Holder:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Peak] = {}

    def peak(self, computation: Computation) -> Peak:
        if computation.name not in self._known:
            self._known[computation.name] = self._peak(computation)
        return self._known[computation.name]

    def _peak(self, computation: Computation) -> Peak:
        held = self._places(computation)
        last_use = _last_uses(computation, held)
        origins = self._origins(computation, held)
        returned = set(_flat(held[computation.root.name]))
        live: dict[Buffer, None] = {}
        best = Peak(0, ())
        for position, instruction in enumerate(computation.instructions):
            if instruction.opcode not in _VIEWS:
                made = _flat(held[instruction.name])
                live |= dict.fromkeys(b for b in made if b not in returned)
            inside = self._inside(computation, instruction)
            total = sum(b.num_bytes for b in live) + inside.num_bytes
            if total > best.num_bytes:
                mine = (replace(b, op_name=origins.get(b, b.op_name)) for b in live)
                found = sorted((*mine, *inside.buffers), key=lambda b: -b.num_bytes)
                best = Peak(total, tuple(found))
            live = {b: None for b in live if last_use[b] > position}
        return best

    def _inside(self, computation: Computation, instruction: Instruction) -> Peak:
        """The peak of what an instruction runs, on top of what lives around it."""
        if instruction.opcode == "while":
            return self.peak(self._module.computations[instruction.called("body")[0]])
        if instruction.opcode in ("conditional", "call"):
            peaks = [self.peak(c) for c in called_computations(self._module, instruction)]
            return max(peaks, key=lambda peak: peak.num_bytes, default=Peak(0, ()))
        return Peak(0, ())

    def _origins(self, computation: Computation, held: dict[str, Places]) -> dict[Buffer, str]:
        """What loops write into buffers that start as plain fillings."""
        origins: dict[Buffer, str] = {}
        for loop in computation.instructions:
            if loop.opcode == "while":
                body = self._module.computations[loop.called("body")[0]]
                for index, place in enumerate(held[loop.operands[0]]):
                    for buffer in place if len(place) == 1 else ():
                        written = self._written(body, index)
                        if written and "/" not in origins.get(buffer, buffer.op_name):
                            origins[buffer] = written
        return origins

    def _written(self, body: Computation, index: int) -> str:
        """The jax path of what a loop body passes on at `index`; empty where it is unchanged."""
        value = body.by_name[body.root.operands[index]]
        while value.opcode in ("bitcast", "copy"):
            value = body.by_name[value.operands[0]]
        if value.opcode != "get-tuple-element":
            return value.op_name
        source = body.by_name[value.operands[0]]
        inner = re.search(r"index=(\d+)", value.attributes)
        if source.opcode == "while" and inner:
            nested = self._module.computations[source.called("body")[0]]
            return self._written(nested, int(inner[1]))
        return "" if source.opcode == "parameter" else source.op_name

    def _places(self, computation: Computation) -> dict[str, Places]:
        held: dict[str, Places] = {}
        for instruction in computation.instructions:
            held[instruction.name] = self._places_of(computation, instruction, held)
        return held

    def _places_of(
        self, where: Computation, instruction: Instruction, held: dict[str, Places]
    ) -> Places:
        opcode, operands, shape = instruction.opcode, instruction.operands, instruction.shape
        if opcode in ("parameter", "constant"):
            return ((),) * len(shape)
        if opcode == "tuple":
            return tuple(_flat(held[name]) for name in operands)
        if opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.attributes)
            places = held[operands[0]]
            return (places[int(index[1])],) if index and int(index[1]) < len(places) else ((),)
        if opcode in _VIEWS or opcode.endswith(("-done", "-update")):
            return held[operands[0]]
        if opcode.endswith("-start"):
            # The result names the operands first: only what follows is new.
            shape = shape[sum(len(arrays) for arrays in where.operand_arrays(instruction)) :]
        target = self._updated_in_place(where, instruction)
        updated = None if target is None else where.by_name[target].shape[0]
        made: list[tuple[Buffer, ...]] = []
        for i, array in enumerate(shape):
            if target is not None and array == updated:
                made.append(_flat(held[target]))
            else:
                name = f"{instruction.name}.{i}"
                made.append((Buffer(array.num_bytes, name, instruction.op_name, str(array)),))
        return tuple(made)

    def _updated_in_place(self, where: Computation, instruction: Instruction) -> str | None:
        """The operand that an update writes into, if it is one."""
        if instruction.opcode == "dynamic-update-slice":
            return instruction.operands[0]
        if instruction.opcode.removesuffix("-start") != "fusion":
            return None
        called = self._module.computations[instruction.called("calls")[0]]
        root = called.root
        results = [called.by_name[n] for n in root.operands] if root.opcode == "tuple" else [root]
        for result in results:
            while result.opcode == "bitcast":
                result = called.by_name[result.operands[0]]
            if result.opcode == "dynamic-update-slice":
                target = called.by_name[result.operands[0]]
                while target.opcode == "bitcast":
                    target = called.by_name[target.operands[0]]
                if target.opcode == "parameter":
                    return instruction.operands[int(target.literal)]
        return None


def _flat(places: Places) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(buffer for place in places for buffer in place))


def _last_uses(computation: Computation, held: dict[str, Places]) -> dict[Buffer, int]:
    last: dict[Buffer, int] = {}
    for position, instruction in enumerate(computation.instructions):
        used = [instruction.name]
        if instruction.opcode not in _VIEWS or instruction.opcode == "while":
            used += instruction.operands
        for name in instruction.operands if instruction.opcode.endswith("-done") else ():
            # What an asynchronous operation reads must stay until it is done.
            used += computation.by_name[name].operands
        for name in used:
            for buffer in _flat(held.get(name, ())):
                last[buffer] = position
    return last
