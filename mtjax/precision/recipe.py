"""Recipes: in which format each operand of a matrix product is rounded, and what shares a scale.

A product has three operands: activations x, weights w and, backward, the gradient g of its result.
"""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.precision import ProductBackend, QuantizedPrecision

Sharing = Literal["tensor", "row", "tile", "block"]


@dataclass(frozen=True)
class Format:
    """A number format: how it is stored, and its largest finite value."""

    dtype: str
    largest: float
    power_of_two: bool = True
    """Scales are powers of two, rounded up. A floating format loses nothing by it, multiplying by
    one is exact, and a maximum that differs by rounding between layouts gives the same scale. An
    integer format would lose up to half of its steps."""


E4M3 = Format("float8_e4m3fn", 448.0)
E5M2 = Format("float8_e5m2", 57344.0)
E2M1 = Format("float4_e2m1fn", 6.0)
INT8 = Format("int8", 127.0, power_of_two=False)


@dataclass(frozen=True)
class Spec:
    """How one operand is rounded.

    `sharing` says which values have one scale: the tensor (of one layer or expert); all those that
    are summed into one output (row); `size` neighbours along the sum (tile); or a square of `size`
    (block).
    """

    format: Format
    sharing: Sharing = "tensor"
    size: int = 1


@dataclass(frozen=True)
class Recipe:
    """Formats of the three operands."""

    name: QuantizedPrecision
    x: Spec
    w: Spec
    g: Spec
    scaled_tiles: bool = False
    """Tiles of 4-bit values: their scales are e4m3 themselves, under one for the tensor."""
    delayed: bool = False
    """Scales of x and g come from the largest values of earlier steps, so that rounding need not
    wait for those of this one."""
    counted: bool = False
    """Training steps report underflow and saturation."""
    recomputed: bool = False
    """A layer's backward pass begins with its forward pass, so that both can read the same gathered
    kernels. Otherwise what one gathered would be kept for the other."""
    backend: ProductBackend = "xla"
    """What multiplies the operands."""

    @property
    def tiled(self) -> bool:
        """Scales vary along the sum: each product has its own rounding of its operands."""
        return self.x.sharing == "tile"

    @property
    def block_scaled(self) -> bool:
        """Tiles of 8-bit values are multiplied with their scales. Otherwise tiles are emulated: the
        rounded numbers are multiplied in the compute dtype, which holds them exactly."""
        return self.backend == "scaled_matmul"

    @property
    def one_gradient(self) -> bool:
        """One rounding of g serves both products of the backward pass."""
        return self.g.sharing == "tensor"


def _same(format: Format, sharing: Sharing, size: int = 1) -> tuple[Spec, Spec, Spec]:
    spec = Spec(format, sharing, size)
    return spec, spec, spec


RECIPES: dict[str, Recipe] = {
    # Micikevicius et al. 2022, arXiv 2209.05433.
    "fp8": Recipe("fp8", Spec(E4M3), Spec(E4M3), Spec(E5M2)),
    "fp8_delayed": Recipe("fp8_delayed", Spec(E4M3), Spec(E4M3), Spec(E5M2), delayed=True),
    "fp8_rowwise": Recipe("fp8_rowwise", *_same(E4M3, "row")),
    # DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.
    "fp8_block": Recipe(
        "fp8_block", Spec(E4M3, "tile", 128), Spec(E4M3, "block", 128), Spec(E4M3, "tile", 128)
    ),
    # Rouhani et al. 2023, arXiv 2310.10537; scales rounded up: Mishra et al. 2025, 2506.08027.
    "mxfp8": Recipe("mxfp8", *_same(E4M3, "tile", 32)),
    "nvfp4": Recipe("nvfp4", *_same(E2M1, "tile", 16), scaled_tiles=True),
    "int8": Recipe("int8", *_same(INT8, "row")),
}
