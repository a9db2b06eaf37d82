"""Products of quantised operands, forward and backward.

What is multiplied are arrays of few bits, so that XLA has no wider product to fall back to. Scales
stand outside of the products: those that vary along a sum are multiplied into the other operand
before it is rounded, so that one rounded copy of x and of w serves both directions.

Gradients go to carriers: arrays whose values nothing reads, beside the rounded ones that no
gradient goes through. Records of what was rounded leave the backward pass the same way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from mtjax.precision import te
from mtjax.precision.block_scaled import block_scaled_dot
from mtjax.precision.quantize import (
    Quantized,
    name_for_remat,
    no_dims_of_one,
    quantize_activation,
)
from mtjax.precision.recipe import Recipe
from mtjax.precision.statistics import report
from mtjax.sharding import Names, reshard, shard


class QuantizedKernel(flax.struct.PyTreeNode):
    """Kernel [experts or nothing, input dims, output dims] of a product, rounded."""

    carrier: Any
    """Zeros in the compute dtype, as large as the kernel: takes the gradient."""
    forward: Any
    """Quantized for the sum over input dims."""
    backward: Any
    """Rounded for the sum over output dims, where that differs: with tiles; else None."""
    recipe: Recipe = flax.struct.field(pytree_node=False)
    record: Any = None
    """Takes the records of one layer's operands, see `mtjax.precision.statistics`; that of w stands
    in it from the start. None: nobody asks."""
    scales: Any = None
    """Of x and of g, [2], known before the step; None: they come from the values at hand."""

    def map_kernel(self, f: Callable[[jax.Array], jax.Array]) -> "QuantizedKernel":
        """f of the arrays that have the dims of the kernel, or 1 in their place."""
        parts = jax.tree.map(f, (self.carrier, self.forward, self.backward))
        return self.replace(carrier=parts[0], forward=parts[1], backward=parts[2])


class Trained(NamedTuple):
    """What is differentiated of a kernel that keeps a record."""

    carrier: Any
    record: Any


def carriers(params: Any) -> Any:
    """What is differentiated of a tree of parameters: carriers in place of quantised kernels."""

    def one(node: Any) -> Any:
        if not _is_kernel(node):
            return node
        return node.carrier if node.record is None else Trained(node.carrier, node.record)

    return jax.tree.map(one, params, is_leaf=_is_kernel)


def with_carriers(params: Any, carriers: Any) -> Any:
    """The parameters, such that gradients go to `carriers`."""

    def one(node: Any, carrier: Any) -> Any:
        if not _is_kernel(node):
            return carrier
        if not is_trained(carrier):
            return node.replace(carrier=carrier)
        return node.replace(carrier=carrier.carrier, record=carrier.record)

    return jax.tree.map(one, params, carriers, is_leaf=_is_kernel)


def _is_kernel(node: object) -> bool:
    return isinstance(node, QuantizedKernel)


def recorded_where(real: jax.Array, params: Any) -> Any:
    """The parameters, or their carriers, such that records of what is not real are dropped."""

    def only(record: jax.Array) -> jax.Array:
        return jnp.where(real, record, jax.lax.stop_gradient(record))

    def one(node: Any) -> Any:
        if is_trained(node):
            return node._replace(record=only(node.record))
        if _is_kernel(node) and node.record is not None:
            return node.replace(record=only(node.record))
        return node

    return jax.tree.map(one, params, is_leaf=lambda node: _is_kernel(node) or is_trained(node))


def is_trained(node: object) -> bool:
    """For `is_leaf` over gradients."""
    return isinstance(node, Trained)


class Operand(NamedTuple):
    """Activations [experts or nothing, tokens, input dims] of a product, rounded."""

    carrier: Any
    """The activations; or [parts, ...] of them, one part of the gradient for each device that
    holds a piece of the kernel's first output dim."""
    forward: Any
    """Quantized for the sum over input dims."""
    backward: Any = None
    """Rounded for the sum over tokens, where that differs: with tiles; else None."""
    record: Any = None
    """Of the rounding."""


class ProductNames(NamedTuple):
    """Logical dims of the operands of a product, outside of manual islands."""

    x: Names
    """Of activations where they are multiplied."""
    kernel: Names
    """Of the kernel, which is gathered over "embed" and "latent" before it is used."""
    y: Names
    """Of the result. Where it is split over the sequence and x is not, its gradient is gathered
    once rounded."""

    @property
    def whole_kernel(self) -> Names:
        """Of the kernel once gathered."""
        return tuple(None if name in ("embed", "latent") else name for name in self.kernel)

    @property
    def g(self) -> Names:
        """Of the gradient of the result where it is multiplied."""
        return (*self.x[:2], *self.y[2:])


class Placement(NamedTuple):
    """Where the arrays of a product are."""

    tensor_axes: tuple[str, ...]
    """Manual mesh axes that split activations."""
    token_axes: tuple[str, ...]
    """Those that split the tokens which meet one kernel."""
    names: ProductNames | None = None
    """Where arrays are along axes that are automatic; None: there is none, or the product is local
    along them."""


class _How(NamedTuple):
    recipe: Recipe
    placement: Placement
    num_in: int
    num_batch: int


def round_activation(
    kernel: QuantizedKernel, x: jax.Array, num_in: int, placement: Placement
) -> Operand:
    """x as an operand for this kernel, and for others of its recipe that have the same input; its
    last `num_in` dims are those that the forward product sums over."""
    recipe, fixed = kernel.recipe, jax.lax.stop_gradient(x)
    ins = tuple(range(x.ndim - num_in, x.ndim))
    scale = None if kernel.scales is None else kernel.scales[0]
    over = placement.tensor_axes if recipe.x.sharing == "tensor" else ()
    forward = quantize_activation(recipe, recipe.x, fixed, ins, over, scale)
    backward = None
    if recipe.tiled:
        backward = quantize_activation(recipe, recipe.x, fixed, (ins[0] - 1,))
    record = None if kernel.record is None else report(recipe, recipe.x, fixed, forward)
    forward, backward = jax.tree.map(
        lambda leaf: name_for_remat(leaf, "quantized"), (forward, backward)
    )
    return Operand(x, forward, backward, record)


def product(
    x: Operand, kernel: QuantizedKernel, placement: Placement, num_in: int = 1, num_batch: int = 0
) -> jax.Array:
    """x W, in the compute dtype: summed over the last `num_in` dims of x, for each of `num_batch`
    leading dims of both."""
    how = _How(kernel.recipe, placement, num_in, num_batch)
    return _product(how, x, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: Operand, kernel: QuantizedKernel) -> jax.Array:
    return _output(how, x, kernel, _gather(how, kernel.forward))


def _output(how: _How, x: Operand, kernel: QuantizedKernel, gathered: Quantized) -> jax.Array:
    """x W of a gathered kernel."""
    carrier, w = kernel.carrier, kernel.forward
    nb, tokens = how.num_batch, x.forward.values.ndim - how.num_in
    ins = tuple(range(nb, nb + how.num_in))
    dims = ((tuple(range(tokens, tokens + how.num_in)), ins), (tuple(range(nb)),) * 2)
    outs = carrier.ndim - nb - how.num_in
    here = how.placement.names
    names = here and (here.x, here.whole_kernel, here.y)
    scales = _fit(x.forward.scale, tokens, outs), _w_scale(how, w, tokens)
    dtype = carrier.dtype
    return _multiply(how, x.forward, gathered, dims, names, scales, dtype, "default")


class _Saved(NamedTuple):
    """For the backward pass; `nothing`, of size 0, holds parts and dtype of the gradient of x."""

    x: Quantized
    w: Quantized
    """Gathered, if `_shares_gather`."""
    nothing: jax.Array
    g_scale: Any
    record: Any
    """Of x and of w."""


def _forward(how, x, kernel):
    parts = x.carrier.shape[0] if x.carrier.ndim > x.forward.values.ndim else 0
    gathered = _gather(how, kernel.forward)
    saved = _Saved(
        x.backward or x.forward,
        kernel.backward or (gathered if _shares_gather(how) else kernel.forward),
        jnp.zeros((parts, 0), kernel.carrier.dtype),
        None if kernel.scales is None else kernel.scales[1],
        record_so_far(x, kernel),
    )
    return _output(how, x, kernel, gathered), saved


def _shares_gather(how: _How) -> bool:
    """Forward and backward pass multiply the same values, and nothing is kept in between."""
    return how.recipe.recomputed and not how.recipe.tiled


def _backward(how, saved, g):
    x, w, (parts, _), dtype = saved.x, saved.w, saved.nothing.shape, saved.nothing.dtype
    nb, tokens = how.num_batch, x.values.ndim - how.num_in
    outs = g.ndim - tokens
    batch = tuple(range(nb))
    x_scale, w_scale = _fit(x.scale, tokens, outs), _w_scale(how, w, tokens)
    out_dims, token_dims = tuple(range(tokens, g.ndim)), tuple(range(nb, tokens))
    scales = x_scale, w_scale, saved.g_scale
    g_in, g_w, g_record = _round_gradient(how, g, out_dims, token_dims, scales, saved.record)

    left = w_scale if how.recipe.one_gradient else None
    in_scales = tuple(_fit(scale, tokens, how.num_in) for scale in (left, g_in.scale))
    gathered = w if _shares_gather(how) else _gather(how, w)
    dx = _input_gradient(how, g_in, gathered, tokens, parts, in_scales, dtype)

    dims = ((token_dims, token_dims), (batch, batch))
    here = how.placement.names
    names = here and (here.x, here.g, here.kernel)
    left = x_scale if how.recipe.one_gradient else None
    w_scales = tuple(_onto_kernel(how, scale, tokens) for scale in (left, g_w.scale))
    dw = _multiply(how, x, g_w, dims, names, w_scales, dtype, "highest")
    if here is not None:
        dw = shard(dw, *here.kernel)
    return Operand(dx, None, None), QuantizedKernel(dw, None, None, how.recipe, g_record)


_product.defvjp(_forward, _backward)


def _input_gradient(
    how: _How, g: Quantized, w: Quantized, tokens: int, parts: int, scales: Any, dtype: Any
) -> jax.Array:
    """g W^T; with parts, [parts, ...] from as many pieces of the first output dim each."""
    first, batch = how.num_batch + how.num_in, tuple(range(how.num_batch))
    outs = g.values.ndim - tokens
    dims = (
        (tuple(range(tokens, g.values.ndim)), tuple(range(first, first + outs))),
        (batch, batch),
    )
    here = how.placement.names
    names = here and (here.g, here.whole_kernel, here.x)
    multiply = partial(_multiply, how, scales=scales, dtype=dtype, precision="highest")
    if not parts or how.recipe.backend != "xla":
        return multiply(g, w, dims, names, apart=parts > 0)

    def in_pieces(x: Quantized, dim: int) -> Quantized:
        return x._replace(
            values=x.values.reshape(*x.values.shape[:dim], parts, -1, *x.values.shape[dim + 1 :])
        )

    g, w = in_pieces(g, tokens), in_pieces(w, first)
    contracted = tuple(range(tokens + 1, g.values.ndim)), tuple(range(first + 1, w.values.ndim))
    dx = multiply(g, w, (contracted, ((tokens,), (first,))), None)
    return shard(dx, "act_ffn", "batch", "seq", None)


def _round_gradient(how, g, out_dims, token_dims, scales, record) -> tuple[Any, Any, Any]:
    """g rounded for the sum over outputs (dx), and for the sum over tokens (dw); and the record of
    all operands, if there is one of x and w."""
    recipe, place = how.recipe, how.placement
    x_scale, w_scale, g_scale = scales
    if recipe.one_gradient:
        g_in = quantize_activation(recipe, recipe.g, g, out_dims, place.tensor_axes, g_scale)
        g_w = g_in
    elif recipe.tiled:
        along = (out_dims, token_dims[-1:])
        g_in, g_w = (quantize_activation(recipe, recipe.g, g, dims) for dims in along)
    else:
        g = g.astype(jnp.float32)
        g_in = quantize_activation(recipe, recipe.g, g * w_scale, out_dims)
        g_w = quantize_activation(recipe, recipe.g, g * x_scale, token_dims, place.token_axes)
    whole = _whole(how, g_in)
    both = whole, whole if g_w is g_in else _whole(how, g_w)
    return *both, whole_record(recipe, record, g, g_in)


def record_so_far(x: Operand, kernel: QuantizedKernel) -> Any:
    """Of x and of w, if the kernel keeps one."""
    return None if kernel.record is None else (x.record, kernel.record.reshape(3, -1)[1])


def whole_record(recipe: Recipe, so_far: Any, g: jax.Array, rounded: Quantized) -> Any:
    """With that of g, once it is rounded."""
    if so_far is None:
        return None
    return jnp.concatenate([*so_far, report(recipe, recipe.g, g, rounded)])


def _whole(how: _How, g: Quantized) -> Quantized:
    """Gathered over the sequence, if it is split."""
    names = how.placement.names
    if names is None or names.g == names.y:
        return g
    split, whole = ("batch", "seq_sp", None), ("batch", "seq", None)
    return _moved(g, split, whole)


def _gather(how: _How, w: Quantized) -> Quantized:
    """A kernel where it is multiplied: whole along the dims that fsdp splits."""
    names = how.placement.names
    return w if names is None else _moved(w, names.kernel, names.whole_kernel)


def _moved(x: Quantized, source: Names, target: Names) -> Quantized:
    """Values, and scales of tiles, in another layout."""
    values, tile_scale = jax.tree.map(
        lambda leaf: reshard(leaf, source, target), (x.values, x.tile_scale)
    )
    return x._replace(values=values, tile_scale=tile_scale)


def _multiply(
    how: _How,
    a: Quantized,
    b: Quantized,
    dims: Any,
    names: Any,
    scales: Any,
    dtype: Any,
    precision: str,
    *,
    apart: bool = False,
) -> jax.Array:
    """The product of two operands, by the backend of the recipe.

    `dims`: as in `jax.lax.dot_general`. `names`, `apart`: as in `in_island`. `scales`: in the dims
    of the result, those that are not part of the other operand.
    """
    if how.recipe.backend == "te":
        return te.product(a, b, dims, names, dtype, apart)
    if how.recipe.backend == "scaled_matmul":
        return block_scaled_dot(a, b, dims, names, dtype, apart)
    return _scaled(_dot(a.values, b.values, dims, dtype, precision), dtype, *scales)


def _dot(a: jax.Array, b: jax.Array, dims: Any, dtype: Any, precision: str) -> jax.Array:
    """The product alone. On GPU "default" lets f8 sums run in fewer bits, which gradients bear
    less well than outputs."""
    out = jnp.int32 if a.dtype == jnp.int8 else dtype
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)


def _scaled(y: jax.Array, dtype: Any, *scales: Any) -> jax.Array:
    """y times the scales that there are."""
    if y.dtype == jnp.int32:
        y = y.astype(jnp.float32)
    for scale in scales:
        if scale is not None:
            # In the dtype of y: exact for powers of two, and XLA makes them part of the product.
            y = y * no_dims_of_one(scale).astype(y.dtype)
    return y.astype(dtype)


def _fit(scale: Any, tokens: int, others: int) -> Any:
    """A scale that varies at most along the first `tokens` dims, with `others` dims of 1 behind."""
    if scale is None:
        return None
    return scale.reshape(*scale.shape[:tokens], *[1] * others)


def _w_scale(how: _How, w: Quantized, tokens: int) -> Any:
    """The scale of a kernel, in the dims of the result."""
    if w.scale is None:
        return None
    nb, shape = how.num_batch, w.scale.shape
    return w.scale.reshape(*shape[:nb], *[1] * (tokens - nb), *shape[nb + how.num_in :])


def _onto_kernel(how: _How, scale: Any, tokens: int) -> Any:
    """A scale in the dims of the result, one for all tokens, in those of the kernel."""
    if scale is None:
        return None
    nb, shape = how.num_batch, scale.shape
    return scale.reshape(*shape[:nb], *[1] * how.num_in, *shape[tokens:])
