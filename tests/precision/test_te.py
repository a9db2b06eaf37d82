"""Products by TransformerEngine: those of XLA on the same operands and scales.

With the real one where it is installed, which computes in JAX here, and with a stand-in.
"""

import dataclasses
import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import Config, MlaConfig, MoeConfig, MtpConfig, QuantizeConfig
from mtjax.config.precision import ROLES
from mtjax.precision import te
from mtjax.precision.product import Placement, QuantizedKernel, product, round_activation
from mtjax.precision.quantize import quantize_weight
from mtjax.precision.recipe import RECIPES
from tests.parity.layouts import (
    assert_same,
    assert_without_a_tie,
    changed,
    first_gradients,
    gradients_by_draw,
)
from tests.precision import stand_in

NOWHERE = Placement((), ())
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ONE_OF_EACH = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
"""Operands of the output and of the gradients of inputs and weights."""


@pytest.fixture
def library(request, monkeypatch):
    """What an import of TransformerEngine finds: the stand-in or the real one."""
    te.library.cache_clear()
    stand_in.calls.clear()
    if request.param == "stand-in":
        stand_in.install(monkeypatch)
    else:
        monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
        stand_in.skip_without_the_real_one()
    yield request.param
    te.library.cache_clear()


either = pytest.mark.parametrize("library", ["stand-in", "real"], indirect=True)


@either
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("precision", ["fp8", "fp8_delayed"])
def test_output_and_both_gradients_are_those_of_xla(library, precision, dtype):
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((2, 4, 24, 3, 16), (3, 16, 5, 16), (2, 4, 24, 5, 16))
    )
    scales = jnp.array([2.0**-7, 2.0**-14]) if precision == "fp8_delayed" else None

    def run(recipe, x, w, g):
        forward = quantize_weight(recipe, w, 0, (0, 1))

        def multiply(x, carrier):
            kernel = QuantizedKernel(carrier, forward, None, recipe, scales=scales)
            operand = round_activation(kernel, x, 2, NOWHERE)
            return product(operand, kernel, NOWHERE, 2)

        y, vjp = jax.vjp(multiply, x.astype(dtype), jnp.zeros(w.shape, dtype))
        return y, *vjp(g.astype(dtype))

    recipe = RECIPES[precision]
    expected = jax.jit(functools.partial(run, recipe))(x, w, g)
    assert not stand_in.calls
    got = jax.jit(functools.partial(run, dataclasses.replace(recipe, backend="te")))(x, w, g)
    assert stand_in.calls == (ONE_OF_EACH if library == "stand-in" else [])
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        # Sums in another order, and once in two where bf16 rounds them.
        assert error < (1e-6 if dtype == jnp.float32 else 1e-3)


HEADS = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 4, "dropout": 0.0}
"""Enough on each of four devices."""
LATENT = {
    "attention": {"num_heads": 8, "num_kv_heads": None, "head_dim": None, "dropout": 0.0,
                  "mla": MlaConfig(kv_rank=16, q_rank=32, nope_dim=8, rope_dim=16, value_dim=8)},
    "mtp": MtpConfig(depth=1),
}  # fmt: skip


EXPERTS = {"moe": MoeConfig(num_experts=4, capacity_factor=1.5),
           "roles": ("qkv", "attention_out")}  # fmt: skip


def model(precision, backend="te", roles=ROLES, **settings):
    quantize = QuantizeConfig(compute="fp32", backend=backend, roles=roles)
    return dataclasses.replace(changed(**settings), precision=precision, quantize=quantize)


@pytest.mark.parametrize(
    ("library", "precision"),
    [("stand-in", "fp8"), ("real", "fp8"), ("real", "fp8_delayed")],
    indirect=["library"],
)
def test_loss_and_gradients_of_a_model_are_those_of_xla(library, precision):
    first_gradients.cache_clear()
    got = first_gradients(model(precision), "data=1")
    if library == "stand-in":
        assert set(stand_in.calls) == set(ONE_OF_EACH)
    assert_same(got, first_gradients(model(precision, "xla"), "data=1"))


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["stand-in", "real"], indirect=True)
@pytest.mark.parametrize(
    ("precision", "layout", "settings"),
    [
        ("fp8", "fsdp=2,tensor=4", {}),
        ("fp8", "data=2,pipeline=2,tensor=2,microbatches=4", {}),
        ("fp8_delayed", "data=2,fsdp=2,tensor=2,microbatches=2", {}),
        ("fp8", "fsdp=2,context=2,tensor=2", {}),
        ("fp8", "data=2,fsdp=2,tensor=2", LATENT),
        ("fp8", "fsdp=2,expert=2,tensor=2", EXPERTS),
    ],
)
def test_gradients_on_any_layout_are_those_of_one_device(library, precision, layout, settings):
    config = model(precision, **{"attention": HEADS, "dropout": 0.0} | settings)
    got, expected = (gradients_by_draw(config, where) for where in (layout, "data=1"))
    assert_without_a_tie(lambda draw: assert_same(got(draw), expected(draw)))


@pytest.mark.parametrize("library", ["real"], indirect=True)
def test_the_stand_in_takes_no_argument_that_the_real_one_lacks(library):
    real = te.library()
    for ours, theirs in (
        (stand_in.gemm, real.gemm),
        (stand_in.ScaledTensorFactory.create_1x, real.ScaledTensorFactory.create_1x),
    ):
        names = [list(inspect.signature(f).parameters) for f in (ours, theirs)]
        assert set(names[0]) <= set(names[1]) and names[0][:2] == names[1][:2]
    assert hasattr(real.ScalingMode, "CURRENT_TENSOR_SCALING")


def test_a_library_that_is_absent_or_cannot_be_loaded_is_said_to_be(monkeypatch):
    config = Config(precision="fp8", quantize=QuantizeConfig(backend="te"))
    te.library.cache_clear()
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.cpp_extensions", None)
    with pytest.raises(
        ValueError, match=r"got 'te', expected xla .*can't be imported.*precision\.md"
    ):
        te.check_installed(config)
    te.check_installed(Config(precision="fp8"))
