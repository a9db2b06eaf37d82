"""Products of 8-bit floats by TransformerEngine, which hands them to cuBLASLt.

It takes operands that are rounded already, and their scales: which values share a scale, and over
which devices, is decided elsewhere, as with XLA's products.
"""

import functools
import importlib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mtjax.config import Config
from mtjax.config.check import require
from mtjax.precision.island import in_island
from mtjax.precision.quantize import Quantized

_ACCURATE_SUMS = "NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION"


def check_installed(config: Config) -> None:
    """Check that TransformerEngine can be imported if the config asks for it. Touches no device.

    Raises:
        ValueError: saying why it can't be.
    """
    if config.quantize.backend != "te":
        return
    try:
        library()
    except Exception as error:
        # It raises ImportError, OSError, RuntimeError, or AssertionError of versions that differ.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        require(
            False,
            "quantize.backend",
            "te",
            f"xla where TransformerEngine can't be imported ({reason})",
            "install it as docs/precision.md says, or drop the option",
        )


def product(
    a: Quantized, b: Quantized, dims: Any, names: Any, dtype: Any, apart: bool
) -> jax.Array:
    """Product of operands of one scale each, and of the scales; `dims` as in
    `jax.lax.dot_general`, without batch dims. `names`, `apart`: as in `in_island`."""
    summed, batch = dims
    assert batch == ((), ()), "the config refuses experts"
    te = library()

    def operand(x: Quantized, dims: Sequence[int]) -> Any:
        return te.ScaledTensorFactory.create_1x(
            data=_summed_last(x.values, dims),
            scale_inv=x.scale.reshape(1),
            scaling_mode=te.ScalingMode.CURRENT_TENSOR_SCALING,
            dq_dtype=dtype,
        )

    def multiply(a: Quantized, b: Quantized) -> jax.Array:
        operands = (operand(x, own) for x, own in zip((a, b), summed, strict=True))
        y = te.gemm(*operands, contracting_dims=((1,), (1,)))
        left = (_others(x.values, own) for x, own in zip((a, b), summed, strict=True))
        return y.reshape([size for x in left for size in x])

    return in_island(multiply, a, b, summed[0], names, apart)


def _summed_last(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """x as a matrix whose rows are summed along: Hopper multiplies 8 bits in no other layout."""
    others = [dim for dim in range(x.ndim) if dim not in dims]
    summed = math.prod(x.shape[dim] for dim in dims)
    return x.transpose(*others, *dims).reshape(-1, summed)


def _others(x: jax.Array, dims: Sequence[int]) -> list[int]:
    """Sizes of the dims that are not summed over."""
    return [size for dim, size in enumerate(x.shape) if dim not in dims]


class _Library(NamedTuple):
    gemm: Any
    ScaledTensorFactory: Any
    ScalingMode: Any


@functools.cache
def library() -> _Library:
    """What is used of TransformerEngine, which is imported at the first call."""
    # TransformerEngine has one choice for all its products, read at the first. Gradients bear less
    # well than outputs that sums run in fewer bits.
    os.environ.setdefault(_ACCURATE_SUMS, "1")
    extensions = importlib.import_module("transformer_engine.jax.cpp_extensions")
    quantize = importlib.import_module("transformer_engine.jax.quantize")
    return _Library(extensions.gemm, quantize.ScaledTensorFactory, quantize.ScalingMode)
