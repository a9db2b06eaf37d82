"""Products of quantised operands, forward and backward, against exact arithmetic on the values
that their definition rounds to (float64)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.precision.product import Placement, QuantizedKernel, product, round_activation
from mtjax.precision.quantize import quantize_weight
from mtjax.precision.recipe import RECIPES
from mtjax.precision.statistics import SIZE, read
from tests.precision import reference

NOWHERE = Placement((), ())
RNG = np.random.default_rng(0)


def uneven(*shape):
    """Normal numbers over twelve powers of two, along every dim."""
    x = RNG.normal(size=shape)
    for axis, size in enumerate(shape):
        powers = 2.0 ** RNG.integers(-4, 5, size)
        x *= np.moveaxis(powers.reshape(-1, *[1] * (len(shape) - 1)), 0, axis)
    return x.astype(np.float32)


def rounded(recipe, spec, x, summed, num_batch=0):
    """x by the definition, for a sum over the dims `summed`."""
    if spec.sharing == "tensor":
        return reference.rounded(x, spec.format, tuple(range(num_batch, x.ndim)))
    if spec.sharing == "row":
        return reference.rounded(x, spec.format, summed)
    others = [d for d in range(x.ndim) if d not in summed]
    moved = np.transpose(x, [*others, *summed])
    flat = moved.reshape(*moved.shape[: len(others)], -1)
    tiles = reference.tiled(flat, spec, -1, recipe).reshape(moved.shape)
    return np.transpose(tiles, np.argsort([*others, *summed]))


def block(w, spec, num_batch):
    """Matrices smaller than one block."""
    assert max(w.shape[num_batch:]) <= spec.size
    return reference.rounded(w, spec.format, tuple(range(num_batch, w.ndim)))


def expected(recipe, x, w, g, num_batch):
    """y, dx, dw of x [(E,) B, T, D], w [(E,) D, N, H] and g [(E,) B, T, N, H]."""
    nb = num_batch
    letters = "E" if nb else ""
    last = x.ndim - 1
    ins, outs = (nb,), (nb + 1, nb + 2)
    x_in = rounded(recipe, recipe.x, x, (last,))
    if recipe.w.sharing == "block":
        w_in = w_out = block(w, recipe.w, nb)
    else:
        w_in = rounded(recipe, recipe.w, w, ins, nb)
        w_out = rounded(recipe, recipe.w, w, outs, nb) if recipe.tiled else w_in
    g_outs, tokens = (last, last + 1), tuple(range(nb, last))
    if recipe.tiled:
        x_w = rounded(recipe, recipe.x, x, (last - 1,))
        g_in = rounded(recipe, recipe.g, g, g_outs)
        g_w = rounded(recipe, recipe.g, g, (last - 1,))
    elif recipe.one_gradient:
        x_w, g_in = x_in, rounded(recipe, recipe.g, g, g_outs)
        g_w = g_in
    else:
        # Scales that vary along the sum are taken out of one operand, and put into g.
        def scales(a, dims, format):
            largest = np.max(np.abs(a), axis=dims, keepdims=True)
            return np.vectorize(lambda m: reference.scale(m, format))(largest)

        w_scale = scales(w, ins, recipe.w.format)
        x_scale = scales(x, (last,), recipe.x.format)
        shape = (*w.shape[:nb], *[1] * (last - nb), *w.shape[nb + 1 :])
        folded = g * w_scale.reshape(shape)
        g_in = rounded(recipe, recipe.g, folded, g_outs) / w_scale.reshape(shape)
        folded = g * x_scale[..., None]
        g_w, x_w = rounded(recipe, recipe.g, folded, tokens) / x_scale[..., None], x_in
    y = np.einsum(f"{letters}BTD,{letters}DNH->{letters}BTNH", x_in, w_in)
    dx = np.einsum(f"{letters}BTNH,{letters}DNH->{letters}BTD", g_in, w_out)
    dw = np.einsum(f"{letters}BTD,{letters}BTNH->{letters}DNH", x_w, g_w)
    return y, dx, dw


SMALL = (40, 24, 3, 5)
"""Tokens, embed, heads, head dim: no multiples of any tile."""
MXFP8 = RECIPES["mxfp8"]
CASES = {name: (recipe, SMALL) for name, recipe in RECIPES.items()}
# Tokens may end within a tile.
CASES["mxfp8, scaled"] = (dataclasses.replace(MXFP8, backend="scaled_matmul"), (40, 64, 3, 32))


@pytest.mark.parametrize("num_batch", [0, 1], ids=["dense", "experts"])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_both_gradients_are_exact_on_the_rounded_operands(name, num_batch):
    recipe, (tokens, embed, heads, head_dim) = CASES[name]
    experts = (2,) * num_batch
    x, w = uneven(*experts, 2, tokens, embed), uneven(*experts, embed, heads, head_dim)
    g = uneven(*experts, 2, tokens, heads, head_dim)

    def run(x, w, g):
        ins = tuple(range(num_batch, num_batch + 1))
        outs = tuple(range(num_batch + 1, w.ndim))
        forward = quantize_weight(recipe, w, num_batch, ins)
        tiles = recipe.w.sharing == "tile"
        backward = quantize_weight(recipe, w, num_batch, outs) if tiles else None

        def multiply(x, carrier):
            kernel = QuantizedKernel(carrier, forward, backward, recipe)
            operand = round_activation(kernel, x, 1, NOWHERE)
            return product(operand, kernel, NOWHERE, 1, num_batch)

        y, vjp = jax.vjp(multiply, x, jnp.zeros_like(w))
        return y, *vjp(g)

    got = jax.jit(run)(x, w, g)
    for what, a, b in zip(
        ("y", "dx", "dw"), got, expected(recipe, x, w, g, num_batch), strict=True
    ):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        # float32 sums of some hundred terms. int8 scales are float32 numbers, so a value close to
        # a tie may be rounded the other way.
        assert error < (1e-3 if name == "int8" else 1e-6), f"{what}: {error:.2e}"


def test_gradients_of_values_that_are_not_finite_are_not_finite():
    recipe = RECIPES["fp8"]
    w = jnp.ones((4, 4))
    kernel = QuantizedKernel(jnp.zeros_like(w), quantize_weight(recipe, w, 0, (0,)), None, recipe)

    def multiply(x):
        return product(round_activation(kernel, x, 1, NOWHERE), kernel, NOWHERE)

    y, vjp = jax.vjp(multiply, jnp.ones((1, 3, 4)))
    assert np.all(np.isfinite(vjp(jnp.ones_like(y))[0]))
    assert np.all(np.isnan(vjp(jnp.full_like(y, jnp.inf))[0]))
    assert np.all(np.isnan(multiply(jnp.ones((1, 3, 4)).at[0, 1, 2].set(jnp.nan))))


def test_rounded_inputs_that_rematerialisation_keeps_are_the_same():
    """At the end of the range too, where JAX's reduce_precision knows no e4m3fn."""
    recipe = RECIPES["fp8"]
    x, w = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 8, 6), (6, 4)))
    x[0, 0, 0] = 448.0
    forward = quantize_weight(recipe, w, 0, (0,))

    def loss(x, carrier):
        kernel = QuantizedKernel(carrier, forward, None, recipe)
        y = product(round_activation(kernel, jnp.sin(x) + x, 1, NOWHERE), kernel, NOWHERE)
        return jnp.sum(y**2)

    policy = jax.checkpoint_policies.save_only_these_names("quantized")
    kept = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))(x, jnp.zeros_like(w))
    for ours, theirs in zip(kept, jax.grad(loss, (0, 1))(x, jnp.zeros_like(w)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_scales_known_before_are_used_and_what_they_met_is_recorded():
    recipe = dataclasses.replace(RECIPES["fp8_delayed"], counted=True)
    x, w = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 30, 24), (24, 40)))
    g = RNG.normal(size=(2, 30, 40)).astype(np.float32)
    x[0, 0, 0], g[0, 0, :2] = 700.0, (0.0, 1e-9)
    x_scale, g_scale = 0.5, 2.0**-12
    forward = quantize_weight(recipe, w, 0, (0,))

    def run(x, w, record):
        kernel = QuantizedKernel(
            w, forward, None, recipe, record, jnp.asarray([x_scale, g_scale], jnp.float32)
        )
        return product(round_activation(kernel, x, 1, NOWHERE), kernel, NOWHERE)

    y, vjp = jax.vjp(run, x, jnp.zeros_like(w), jnp.zeros(3 * SIZE))
    dx, dw, record = vjp(g)

    x_in = reference.nearest(x / x_scale, recipe.x.format) * x_scale
    g_in = reference.nearest(g / g_scale, recipe.g.format) * g_scale
    w_in = rounded(recipe, recipe.w, w, (0,))
    assert x_in[0, 0, 0] == 224
    np.testing.assert_allclose(y, x_in @ w_in, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, g_in @ w_in.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("BTD,BTF->DF", x_in, g_in), rtol=1e-5, atol=1e-3)
    found = read(record)
    assert found.amax[0] == 704 and 0 <= found.amax[2] / np.abs(g).max() - 1 < 1 / 8
    assert found.saturation[0] * np.count_nonzero(x) == pytest.approx(1)
    assert found.underflow[2] * np.count_nonzero(g) == pytest.approx(1)
