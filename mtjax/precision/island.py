"""Products of local blocks, where XLA cannot partition what multiplies them."""

from collections.abc import Callable, Sequence

import jax

from mtjax.precision.quantize import Quantized
from mtjax.sharding import Names, local_sum


def in_island(
    multiply: Callable[[Quantized, Quantized], jax.Array],
    a: Quantized,
    b: Quantized,
    summed: Sequence[int],
    names: tuple[Names, Names, Names] | None,
    apart: bool,
) -> jax.Array:
    """`multiply(a, b)` of the blocks that each device has, added up over devices.

    Custom calls are partitioned in no region that is manual over some axes only, as the step is:
    hence an island over those that are left.

    Args:
        summed: dims of a that the product sums over.
        names: logical dims of a, of b and of the result; None: all of it is local.
        apart: each device keeps its part of the sum, along a leading dim "act_ffn".
    """
    operands, tree = jax.tree.flatten((a, b))

    def local(*operands: jax.Array) -> jax.Array:
        y = multiply(*jax.tree.unflatten(tree, operands))
        return y[None] if apart else y

    if names is None:
        return local(*operands)
    of_a, of_b, of_result = names
    ins = [
        own if leaf.size > 1 else (None,) * leaf.ndim  # one scale for the tensor is everywhere
        for x, own in ((a, of_a), (b, of_b))
        for leaf in jax.tree.leaves(x)
    ]
    if apart:
        return local_sum(local, ins, ("act_ffn", *of_result), ())(*operands)
    return local_sum(local, ins, of_result, summed)(*operands)
