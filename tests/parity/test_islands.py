"""Each kind of product in an island on split operands: result and both gradients are those of XLA's
product of the rounded numbers on one device.

Operands are given, so that layouts round the same values, and differ in the order of sums alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtjax.config.mesh import parse_layout
from mtjax.layers.linear import Gathered, Linear, Shared
from mtjax.precision.product import QuantizedKernel
from mtjax.precision.quantize import quantize_weight
from mtjax.precision.recipe import RECIPES
from mtjax.sharding import make_mesh, shard
from tests.parity.layouts import COMPILER_OPTIONS
from tests.precision import stand_in

# Whole tiles on eight devices along any axis.
ROWS, SEQ, EMBED, HEADS, HEAD_DIM, FFN = 8, 256, 256, 8, 32, 256
SPLIT = ("batch", "seq_sp", None)


def gathered(x_BTD):
    return Gathered(x_BTD)


def shared(x_BTD):
    return Shared(x_BTD)


def plain(x):
    return x


PRODUCTS = {
    "query": (("embed", "heads", "head_dim"), 1, gathered, SPLIT),
    "attention out": (
        ("heads", "head_dim", "embed"), 2, plain, ("batch", "seq", "act_heads", None)
    ),
    "up": (("embed", "ffn"), 1, gathered, SPLIT),
    "down": (("ffn", "embed"), 1, plain, ("batch", "seq", "act_ffn")),
    "into a latent": (("embed", "latent"), 1, shared, SPLIT),
    "out of a latent": (("latent", "heads", "head_dim"), 1, gathered, SPLIT),
    "rotating key": (("embed", None), 1, shared, SPLIT),
    "half of a predictor": (("embed", "residual"), 1, plain, SPLIT),
}  # fmt: skip
SIZES = {
    "embed": EMBED, "latent": EMBED, "residual": EMBED, "heads": HEADS, "head_dim": HEAD_DIM,
    "ffn": FFN, None: 64,
}  # fmt: skip


def operands(names, num_in):
    """Of an uneven size along the dims that are summed over."""
    rng = np.random.default_rng(len(names) + num_in)
    w_shape = tuple(SIZES[name] for name in names)
    shapes = (ROWS, SEQ, *w_shape[:num_in]), w_shape, (ROWS, SEQ, *w_shape[num_in:])
    arrays = []
    for shape in shapes:
        array = rng.normal(size=shape)
        for dim in range(1 if len(shape) > 2 else 0, len(shape)):
            sizes = [shape[dim] if d == dim else 1 for d in range(len(shape))]
            array *= 2.0 ** rng.integers(-3, 4, sizes)
        arrays.append(array.astype(np.float32))
    return arrays


def results(name, recipe):
    """y, dx, dw of a product, on the mesh that is set."""
    names, num_in, as_input, x_names = PRODUCTS[name]
    linear = Linear(tuple(SIZES[n] for n in names[num_in:]), names, 1.0, "qkv", num_in=num_in)

    def local(x, w, forward, backward, g):
        x = shard(x, *x_names)

        def multiply(x, carrier):
            kernel = QuantizedKernel(carrier, forward, backward, recipe)
            return linear.apply({"params": {"kernel": kernel}}, as_input(x))

        y, vjp = jax.vjp(multiply, x, jnp.zeros_like(w))
        dx, dw = vjp(g)
        return y, dx, dw[None]

    def run(x, w, g):
        w = shard(w, *names)
        ins, outs = range(num_in), range(num_in, w.ndim)
        rounded = [quantize_weight(recipe, w, 0, dims) for dims in (ins, outs)]
        if jax.sharding.get_abstract_mesh().empty:
            y, dx, dw = local(x, w, *rounded, g)
        else:
            tokens, whole = P("data"), P()
            y, dx, dw = jax.shard_map(
                local,
                in_specs=(tokens, whole, whole, whole, tokens),
                out_specs=(tokens, tokens, P("data")),
                axis_names={"data"},
                check_vma=False,
            )(x, w, *rounded, g)
        return y, dx, jnp.sum(dw, axis=0)

    x, w, g = operands(names, num_in)
    return jax.device_get(jax.jit(run).lower(x, w, g).compile(COMPILER_OPTIONS)(x, w, g))


BACKENDS = {"scaled_matmul": "mxfp8", "te": "fp8"}
"""And a precision that each multiplies."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data=2,fsdp=2,tensor=2"),
        *(
            pytest.param(layout, marks=pytest.mark.nightly)
            for layout in ("fsdp=8", "tensor=8", "data=8", "fsdp=2,tensor=4",
                           "fsdp=2,context=2,tensor=2", "data=2,context=4")
        ),
    ],
)  # fmt: skip
def test_products_on_islands_are_those_of_one_device(layout, backend, monkeypatch):
    if backend == "te":
        stand_in.install(monkeypatch)
    plain = RECIPES[BACKENDS[backend]]
    recipe = dataclasses.replace(plain, backend=backend)
    mesh = make_mesh(parse_layout(layout).mesh, jax.devices())
    for name in PRODUCTS:
        expected = results(name, plain)
        with jax.set_mesh(mesh):
            got = results(name, recipe)
        for what, ours, theirs in zip(("y", "dx", "dw"), got, expected, strict=True):
            error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            assert error < 1e-6, f"{name}, {what}: {error:.2e}"
    assert stand_in.calls or backend != "te"
