"""A stand-in for TransformerEngine: what mtjax calls of it, with the names, arguments and rules of
its documentation and in plain arithmetic, so that calls can be tested where it isn't installed."""

import dataclasses
import enum
import importlib.util
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.precision import te

FORMATS = {("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"),
           ("float8_e4m3fn", "float8_e5m2")}  # fmt: skip


class ScalingMode(enum.Enum):
    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3


@dataclasses.dataclass
class ScaledTensor1x:
    data: Any
    scale_inv: Any
    scaling_mode: ScalingMode
    dq_dtype: Any


class ScaledTensorFactory:
    @staticmethod
    def create_1x(
        data,
        scale_inv,
        amax=None,
        scaling_mode=ScalingMode.NO_SCALING,
        dq_dtype=jnp.bfloat16,
        is_colwise=False,
        data_layout="N",
        flatten_axis=-1,
    ):
        assert amax is None and not is_colwise and data_layout == "N" and flatten_axis == -1
        assert scaling_mode is ScalingMode.CURRENT_TENSOR_SCALING
        assert data.ndim == 2 and data.dtype.name.startswith("float8")
        assert scale_inv.shape == (1,) and scale_inv.dtype == jnp.float32
        return ScaledTensor1x(data, scale_inv, scaling_mode, np.dtype(dq_dtype))


calls: list[tuple[str, str]] = []
"""Formats of the operands of each product since the list was emptied."""


def gemm(lhs, rhs, bias=None, contracting_dims=((-1,), (0,))):
    """As on Hopper: sums of a multiple of 16 entries, along the last dim of both."""
    assert bias is None and contracting_dims == ((1,), (1,))
    formats = lhs.data.dtype.name, rhs.data.dtype.name
    assert formats in FORMATS
    calls.append(formats)
    assert lhs.data.shape[1] == rhs.data.shape[1] and lhs.data.shape[1] % 16 == 0
    assert lhs.dq_dtype == rhs.dq_dtype
    a, b = (tensor.data.astype(jnp.float32) * tensor.scale_inv for tensor in (lhs, rhs))
    y = jax.lax.dot_general(a, b, (contracting_dims, ((), ())), precision="highest")
    return y.astype(lhs.dq_dtype)


def install(monkeypatch) -> None:
    """Make it what imports find."""
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    for name, module in _modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    te.library.cache_clear()
    calls.clear()


def _modules() -> dict[str, types.ModuleType]:
    """What imports of it find."""
    names = ("", ".jax", ".jax.cpp_extensions", ".jax.quantize")
    found = {f"transformer_engine{name}": types.ModuleType(name) for name in names}
    found["transformer_engine.jax.cpp_extensions"].gemm = gemm
    quantize = found["transformer_engine.jax.quantize"]
    quantize.ScaledTensorFactory, quantize.ScalingMode = ScaledTensorFactory, ScalingMode
    return found


def skip_without_the_real_one():
    """One that is installed and can't be loaded fails instead."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("TransformerEngine, the extra te, is not installed")
    te.library()
