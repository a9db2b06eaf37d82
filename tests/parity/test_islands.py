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


HEADS_OUT, FFN_OUT = ("batch", "seq", "act_heads", None), ("batch", "seq", "act_ffn")
PRODUCTS = {
    "query": (("embed", "heads", "head_dim"), 1, Gathered, SPLIT),
    "attention out": (("heads", "head_dim", "embed"), 2, lambda x: x, HEADS_OUT),
    "up": (("embed", "ffn"), 1, Gathered, SPLIT),
    "down": (("ffn", "embed"), 1, lambda x: x, FFN_OUT),
    "into a latent": (("embed", "latent"), 1, Shared, SPLIT),
    "out of a latent": (("latent", "heads", "head_dim"), 1, Gathered, SPLIT),
    "rotating key": (("embed", None), 1, Shared, SPLIT),
    "half of a predictor": (("embed", "residual"), 1, lambda x: x, SPLIT),
}
"""Logical dims of the kernel, how many of them are summed over, what a layer makes of its input,
and the logical dims of that."""
SIZES = {
    "embed": EMBED, "latent": EMBED, "residual": EMBED, "heads": HEADS, "head_dim": HEAD_DIM,
    "ffn": FFN, None: 64,
}  # fmt: skip


def operands(names, num_in):
    """x, w and g, uneven along every dim."""
    rng = np.random.default_rng(0)
    w_shape = tuple(SIZES[name] for name in names)
    shapes = (ROWS, SEQ, *w_shape[:num_in]), w_shape, (ROWS, SEQ, *w_shape[num_in:])
    arrays = []
    for shape in shapes:
        array = rng.normal(size=shape)
        for dim, size in enumerate(shape):
            powers = 2.0 ** rng.integers(-3, 4, size)
            array *= powers.reshape(-1, *[1] * (len(shape) - dim - 1))
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
