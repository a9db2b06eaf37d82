"""What one instruction of a compiled program asks of the machine: FLOPs and bytes.

Bytes of device memory are what a kernel reads and writes once, as if its cache were perfect: a
fusion that slices its operand counts the slice. Arithmetic outside of matrix products and attention
is not counted: on these machines its memory traffic takes longer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mtjax.planning.hlo import GEMM_TARGETS, product_at
from mtjax.planning.hlo_text import Array, Computation, Instruction, Module

# They name, shape or order values and launch nothing.
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "add-dependency",
    "partition-id", "replica-id", "opt-barrier", "domain", "get-dimension-size", "iota",
}  # fmt: skip
_VIEWS = ("bitcast", "reshape", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")
_ATTENTION = "__cudnn$fmha"
# A backward pass of attention has five products where the forward pass has two.
_ATTENTION_PRODUCTS = {False: 2, True: 5}


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of device memory of one run of an instruction."""

    kind: str
    """gemm, attention or memory."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """FLOPs by the dtype that sets their rate."""
    num_bytes: float = 0.0
    """Bytes read from and written to device memory."""


def instruction_cost(module: Module, where: Computation, instruction: Instruction) -> Cost | None:
    """Cost of an instruction of `where`; None if it launches nothing.

    Loops, calls and collectives are not looked into: they have a duration, not a cost.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return None
    if opcode.removesuffix("-start") in ("fusion", "async"):
        called = module.computations[instruction.called("calls")[0]]
        return _fusion_cost(module, called)
    if opcode == "custom-call":
        return _custom_call_cost(where, instruction)
    if opcode == "dot":
        moved = _operand_bytes(where, instruction) + _bytes(instruction.shape)
        return Cost("gemm", _product_flops(where, instruction), moved)
    if opcode in _SLICES:
        return Cost("memory", num_bytes=2 * _bytes(instruction.shape))
    if opcode == "dynamic-update-slice":
        return Cost("memory", num_bytes=2 * _bytes(where.operand_arrays(instruction)[1]))
    if opcode == "copy-start":
        return Cost("memory", num_bytes=2 * _operand_bytes(where, instruction))
    return Cost("memory", num_bytes=_operand_bytes(where, instruction) + _bytes(instruction.shape))


def _bytes(arrays: Iterable[Array]) -> int:
    return sum(array.num_bytes for array in arrays)


def _operand_bytes(where: Computation, instruction: Instruction) -> int:
    return sum(map(_bytes, where.operand_arrays(instruction)))


def _fusion_cost(module: Module, called: Computation) -> Cost:
    """A kernel: its products wherever they are nested, each parameter read, each result written."""
    flops: dict[str, float] = {}
    for computation, instruction in _nested(module, called):
        if instruction.opcode in ("dot", "scaled-dot"):
            for rate, value in _product_flops(computation, instruction).items():
                flops[rate] = flops.get(rate, 0.0) + value
    parameters = [i for i in called.instructions if i.opcode == "parameter"]
    read = sum(_read_bytes(called, p) for p in parameters)
    return Cost("gemm" if flops else "memory", flops, read + _written_bytes(called))


def _nested(module: Module, computation: Computation):
    for instruction in computation.instructions:
        yield computation, instruction
        if instruction.opcode == "fusion":
            yield from _nested(module, module.computations[instruction.called("calls")[0]])


def _read_bytes(called: Computation, value: Instruction) -> int:
    """Bytes that a kernel reads of one value: slices of it where nothing else is used."""
    total = 0
    for user in called.instructions:
        if value.name not in user.operands:
            continue
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += _bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            pass  # updated in place: the rest of the buffer is not touched
        elif user.opcode in _VIEWS:
            total += _read_bytes(called, user)
        else:
            return _bytes(value.shape)
    return min(total, _bytes(value.shape))


def _written_bytes(called: Computation) -> int:
    root = called.root
    results = [called.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_result_bytes(called, result) for result in results)


def _result_bytes(called: Computation, result: Instruction) -> int:
    while result.opcode in _VIEWS and result.operands:
        result = called.by_name[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return _bytes(called.operand_arrays(result)[1])
    return _bytes(result.shape)


def _product_flops(where: Computation, instruction: Instruction) -> dict[str, float]:
    product = product_at(where, instruction)
    exact = re.search(r'operand_precision(=\{highest|":\s*\["HIGHEST")', instruction.attributes)
    rate = rate_dtype(product.lhs.dtype, product.rhs.dtype, exact is not None)
    return {rate: float(product.flops)}


def rate_dtype(lhs: str, rhs: str, exact: bool = False) -> str:
    """The dtype whose peak rate bounds a product: fp8 only if both sides are, tf32 for float32."""
    sides = {_rate(lhs), _rate(rhs)}
    for slow in ("fp32", "tf32", "bf16", "int8", "fp8"):
        if slow in sides:
            return "fp32" if slow == "tf32" and exact else slow
    return "fp4"


def _rate(dtype: str) -> str:
    if dtype in ("bf16", "f16"):
        return "bf16"
    if dtype == "f32":
        return "tf32"
    for prefix, rate in (("f8", "fp8"), ("f4", "fp4"), ("s8", "int8"), ("u8", "int8")):
        if dtype.startswith(prefix):
            return rate
    return "fp32"


def _custom_call_cost(where: Computation, instruction: Instruction) -> Cost:
    target = instruction.custom_call_target
    # The last result of a library call is its workspace.
    moved = _operand_bytes(where, instruction) + _bytes(
        a for a in instruction.shape if a.dtype not in ("u8", "s8") or len(instruction.shape) == 1
    )
    if target.startswith(GEMM_TARGETS):
        return Cost("gemm", _product_flops(where, instruction), moved)
    if target.startswith(_ATTENTION):
        return Cost("attention", _attention_flops(where, instruction), moved)
    return Cost("memory", num_bytes=moved)


def _attention_flops(where: Computation, instruction: Instruction) -> dict[str, float]:
    """cuDNN attention [B, T, N, H]: products over the pairs that its mask lets through."""
    q, k = (arrays[0] for arrays in where.operand_arrays(instruction)[:2])
    batch, length, heads, dim = q.dims
    keys = k.dims[1]
    pairs: float = length * keys
    if "CAUSAL" in instruction.attributes:
        window = re.search(r'"sliding_window_length":\s*"?(\d+)', instruction.attributes)
        reach = min(int(window[1]) if window else 0, keys) or keys
        pairs = length * reach - reach**2 / 2
    products = _ATTENTION_PRODUCTS["Backward" in instruction.custom_call_target]
    return {"bf16": 2.0 * products * batch * heads * dim * pairs}
