"""How tokens reach their experts and come back, on local blocks of the mesh.

The experts are split over (expert, context, tensor). Along context and tensor, devices hold parts
of the same sequences: they gather them, each serves its own share of the experts, and a
reduce-scatter adds up what they give, as in a tensor-parallel feed-forward part. Along expert,
devices hold other sequences: there the dispatchers exchange tokens. Whole sequences meet on one
device, which is why what the capacity dispatcher drops depends on the sequence alone, on any mesh.

Shape suffixes beside those of the package: K experts of one token, P token-expert pairs, R devices
that exchange tokens, J experts served here for all R devices, L experts held here (J = R L).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mtjax.config.model import ModelConfig
from mtjax.config.moe import MoeConfig
from mtjax.layers.context import token_order
from mtjax.layers.expert_products import (
    by_token,
    expert_product,
    grouped_product,
    held,
    hold,
    num_experts,
    one_by_one,
    one_expert_product,
    round_tokens,
    tokens,
)
from mtjax.layers.mlp import activate
from mtjax.layers.router import Routing
from mtjax.precision.quantize import name_for_remat
from mtjax.sharding import local_map, mesh_axes, reshard

KERNEL_NAMES = {
    "gate": ("experts", "embed", "expert_ffn"),
    "up": ("experts", "embed", "expert_ffn"),
    "down": ("experts", "expert_ffn", "embed"),
    "gate_bias": ("experts", "expert_ffn"),
    "up_bias": ("experts", "expert_ffn"),
    "down_bias": ("experts", "embed"),
}
"""Logical names of the kernels and biases of all experts."""

Kernels = dict[str, Any]
"""gate (gated activations), up [E, D, F] and down [E, F, D], arrays or QuantizedKernels; with
biases also gate_bias, up_bias [E, F] and down_bias [E, D]."""


class _Call(NamedTuple):
    """What the dispatchers know beside their operands: settings and mesh axes."""

    moe: MoeConfig
    ffn: Callable[..., jax.Array]
    """(product, x, kernels) -> y; see `_ffn`."""
    order_T: np.ndarray | None
    """Index in the sequence of the token at each place; None: they are in order."""
    exchange: tuple[str, ...]
    """Those that split experts and sequences alike."""
    share: tuple[str, ...]
    """Those that split experts only, once sequences are gathered."""
    gather: tuple[str, ...]
    """Those that split each sequence outside: `share`, or none (generation)."""


def run_experts(
    model: ModelConfig, x_BTD: jax.Array, routing: Routing, kernels: Kernels
) -> jax.Array:
    """Weighted sum of the outputs of each token's experts, [B, T, D]; 0 where a token has none."""
    experts, batch = mesh_axes("experts"), mesh_axes("batch")
    call = _Call(
        model.moe,
        partial(_ffn, model),
        token_order(model, x_BTD.shape[1]),
        exchange=tuple(axis for axis in experts if axis in batch),
        share=tuple(axis for axis in experts if axis not in batch),
        gather=mesh_axes("seq_sp"),
    )
    assert call.gather in ((), call.share), "sequences and experts are split over other axes"
    split, whole = ("batch", "seq_sp", None), ("batch", None, None)
    x = round_tokens(x_BTD, kernels["up"])
    operands, tree = jax.tree.flatten((x, {n: hold(kernels[n], KERNEL_NAMES[n]) for n in kernels}))
    num_x = len(jax.tree.leaves(x))
    parts = [split if leaf.shape[:-1] == x_BTD.shape[:-1] else () for leaf in operands[:num_x]]
    in_names = (whole, whole, *parts, *[held(leaf) for leaf in operands[num_x:]])

    def local(experts_BTK, weights_BTK, *operands):
        x, kernels = jax.tree.unflatten(tree, operands)
        return _local(call, x, experts_BTK, weights_BTK, kernels)

    experts_BTK, weights_BTK = (reshard(a, split, whole) for a in routing)
    return local_map(local, in_names, split)(experts_BTK, weights_BTK, *operands)


def _local(call: _Call, x_BTD, experts_BTK, weights_BTK, kernels: Kernels) -> jax.Array:
    """Tokens held here; T is the whole sequence but for `x_BTD`, which is gathered first."""
    if call.gather:
        gather = partial(jax.lax.all_gather, axis_name=call.gather, axis=1, tiled=True)
        x_BTD = by_token(gather, x_BTD)
    num_held = num_experts(kernels)
    num_peers, num_shares = (_size(a) for a in (call.exchange, call.share))
    # Expert e lives on the device (peer, share) with e // L = peer * num_shares + share.
    peer, share = jnp.divmod(experts_BTK // num_held, num_shares)
    mine = (peer < num_peers) & (share == _index(call.share))
    served = jnp.where(mine, peer * num_held + experts_BTK % num_held, num_peers * num_held)
    dispatch = _DISPATCHERS[call.moe.dispatcher]
    y_BTD = dispatch(call, x_BTD, served, weights_BTK, kernels)
    if call.gather:
        return jax.lax.psum_scatter(y_BTD, call.gather, scatter_dimension=1, tiled=True)
    return jax.lax.psum(y_BTD, call.share) if call.share else y_BTD


def _size(axes: tuple[str, ...]) -> int:
    return jax.lax.axis_size(axes) if axes else 1


def _index(axes: tuple[str, ...]) -> Any:
    return jax.lax.axis_index(axes) if axes else 0


Product = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
"""Rows times the kernel of their expert, and its bias where there is one."""


def _ffn(model: ModelConfig, product: Product, x: jax.Array, kernels: Kernels) -> jax.Array:
    """The feed-forward part of the experts that `product` sees."""

    def project(name: str, x: jax.Array) -> jax.Array:
        return product(x, kernels[name], kernels.get(f"{name}_bias"))

    up = checkpoint_name(project("up", x), "ffn_in")
    gate = checkpoint_name(project("gate", x), "ffn_in") if model.gated else None
    return project("down", activate(model, up, gate))


@jax.custom_vjp
def take_rows(x_ND: jax.Array, index_M: jax.Array, inverse_NK: jax.Array) -> jax.Array:
    """Rows x[index], [M, D]; an index of N gives zeros.

    `inverse_NK` names the rows of the result that hold each row of x, M where there are fewer
    than K: with it the gradient is a gather too, in place of a scatter that adds.
    """
    return x_ND.at[index_M].get(mode="fill", fill_value=0)


def _take_rows_forward(x_ND, index_M, inverse_NK):
    return take_rows(x_ND, index_M, inverse_NK), inverse_NK


def _take_rows_backward(inverse_NK, dy_MD):
    rows_NKD = dy_MD.at[inverse_NK].get(mode="fill", fill_value=0)
    # Several terms are added in float32.
    return jnp.sum(rows_NKD.astype(jnp.float32), axis=1).astype(dy_MD.dtype), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def _invert(slot_P: jax.Array, num_slots: int) -> jax.Array:
    """Which entry holds each slot, [num_slots]; P where none does."""
    empty = jnp.full((num_slots,), slot_P.size, jnp.int32)
    return empty.at[slot_P].set(jnp.arange(slot_P.size, dtype=jnp.int32), mode="drop")


def _places(
    num: int, number_P: np.ndarray, served_P: jax.Array, urgency_P: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each pair's place in the queue of its expert, int32 [P], and the lengths of the queues [J].

    The most urgent is first, then the one with the lower number.
    """
    index_P = jnp.arange(served_P.size, dtype=jnp.int32)
    keys = served_P, -urgency_P, jnp.asarray(number_P)
    sorted_P, _, _, order_P = jax.lax.sort((*keys, index_P), num_keys=3)
    length_J = jnp.sum(served_P[:, None] == jnp.arange(num), axis=0, dtype=jnp.int32)
    first = jnp.cumsum(length_J) - length_J
    # Pairs served elsewhere come last; their place is never read.
    place_sorted = index_P - first.at[sorted_P].get(mode="fill", fill_value=0)
    return jnp.zeros_like(index_P).at[order_P].set(place_sorted, unique_indices=True), length_J


def _combine(rows_PD: jax.Array, weights_BTK: jax.Array) -> jax.Array:
    """Weighted sum over each token's experts, added in float32."""
    rows = rows_PD.reshape(*weights_BTK.shape, -1).astype(jnp.float32)
    return jnp.sum(rows * weights_BTK[..., None], axis=2).astype(rows_PD.dtype)


def _capacity(call: _Call, x_BTD, served_BTK, weights_BTK, kernels: Kernels) -> jax.Array:
    """Buffers of fixed size, one per sequence and expert (Lepikhin et al. 2020, GShard)."""
    B, T, K = served_BTK.shape
    P, C = T * K, call.moe.capacity(T)
    num = _size(call.exchange) * num_experts(kernels)
    served_BP = served_BTK.reshape(B, P)
    urgency_BP = jnp.zeros((B, P), jnp.float32)
    if call.moe.drop_policy == "probability":
        urgency_BP = jax.lax.stop_gradient(weights_BTK).reshape(B, P)
    order_T = np.arange(T) if call.order_T is None else call.order_T
    number_P = (order_T[:, None] * K + np.arange(K)).reshape(-1).astype(np.int32)
    place_BP, _ = jax.vmap(partial(_places, num, number_P))(served_BP, urgency_BP)
    fits = (served_BP < num) & (place_BP < C)
    slot_BP = (served_BP * B + jnp.arange(B)[:, None]) * C + place_BP
    slot = jnp.where(fits, slot_BP, num * B * C).reshape(-1)
    pair = _invert(slot, num * B * C)

    def to_experts(x_BTD: jax.Array) -> jax.Array:
        x = take_rows(x_BTD.reshape(B * T, -1), pair // K, slot.reshape(B * T, K))
        x_JCD = x.reshape(num, B * C, -1)
        if call.exchange:
            x_JCD = jax.lax.all_to_all(x_JCD, call.exchange, 0, 1, tiled=True)
        return name_for_remat(x_JCD, "expert_in")

    y_JCD = call.ffn(
        partial(expert_product, call.exchange, C), by_token(to_experts, x_BTD), kernels
    )
    if call.exchange:
        y_JCD = jax.lax.all_to_all(y_JCD, call.exchange, 1, 0, tiled=True)
    y = checkpoint_name(y_JCD, "expert_out").reshape(num * B * C, -1)
    return _combine(take_rows(y, slot, pair[:, None]), weights_BTK)


def _dropless(call: _Call, x_BTD, served_BTK, weights_BTK, kernels: Kernels) -> jax.Array:
    """Rows sorted by expert, products by group (Gale et al. 2022, MegaBlocks, arXiv 2211.15841).

    Buffers hold the worst case, every token of R devices sent here, so nothing is ever dropped.
    """
    B, T, K = served_BTK.shape
    L, R = num_experts(kernels), _size(call.exchange)
    served = served_BTK.reshape(-1)
    number = np.arange(served.size, dtype=np.int32)
    place, length_J = _places(R * L, number, served, jnp.zeros(served.shape, jnp.float32))
    length_RL = length_J.reshape(R, L)
    # Sent to each device: its rows in the order of its experts, at most S of them.
    S = B * T * min(K, L)
    first_RL = S * jnp.arange(R)[:, None] + jnp.cumsum(length_RL, axis=1) - length_RL
    first = first_RL.reshape(-1).at[served].get(mode="fill", fill_value=0)
    slot = jnp.where(served < R * L, first + place, R * S)
    pair = _invert(slot, R * S)
    if call.exchange:
        length_RL = jax.lax.all_to_all(length_RL, call.exchange, 0, 0, tiled=True)
    regrouped = _by_expert(length_RL, S)
    back = _invert(regrouped, R * S)

    def to_experts(x_BTD: jax.Array) -> jax.Array:
        x = take_rows(x_BTD.reshape(B * T, -1), pair // K, slot.reshape(B * T, K))
        if call.exchange:
            x = jax.lax.all_to_all(x, call.exchange, 0, 0, tiled=True)
        return name_for_remat(take_rows(x, back, regrouped[:, None]), "expert_in")

    product = partial(grouped_product, call.exchange, jnp.sum(length_RL, axis=0))
    y = call.ffn(product, by_token(to_experts, x_BTD), kernels)
    y = take_rows(y, regrouped, back[:, None])
    if call.exchange:
        y = jax.lax.all_to_all(y, call.exchange, 0, 0, tiled=True)
    y = checkpoint_name(y, "expert_out")
    return _combine(take_rows(y, slot, pair[:, None]), weights_BTK)


def _by_expert(length_RL: jax.Array, size: int) -> jax.Array:
    """New row of each received one, int32 [R * S]: by expert, then by sender; R S if it is empty.

    Sender r wrote length_RL[r] rows of each expert, one behind the other, from row r S on.
    """
    R, L = length_RL.shape
    end_RL = jnp.cumsum(length_RL, axis=1)
    row_S = jnp.arange(size)
    expert_RS = jnp.sum(row_S[None, :, None] >= end_RL[:, None, :], axis=-1)
    by_expert = length_RL.T.reshape(-1)
    target_RL = (jnp.cumsum(by_expert) - by_expert).reshape(L, R).T
    shift_RL = target_RL - (end_RL - length_RL)
    shift_RS = jnp.take_along_axis(shift_RL, jnp.minimum(expert_RS, L - 1), axis=1)
    return jnp.where(expert_RS < L, row_S + shift_RS, R * size).reshape(-1)


def _allgather(call: _Call, x_BTD, served_BTK, weights_BTK, kernels: Kernels) -> jax.Array:
    """Every held expert on every token of all peers, weighted by 0 where it was not chosen."""
    L = num_experts(kernels)
    first: Any = 0
    if call.exchange:
        gather = partial(jax.lax.all_gather, axis_name=call.exchange, axis=0, tiled=True)
        x_BTD = by_token(gather, x_BTD)
        served_BTK, weights_BTK = gather(served_BTK), gather(weights_BTK)
        first = _index(call.exchange) * L

    def add(y_BTD, one):
        number, kernels = one
        weight_BT = jnp.sum(jnp.where(served_BTK == first + number, weights_BTK, 0.0), axis=-1)
        product = partial(one_expert_product, call.exchange)
        out_BTD = call.ffn(product, x_BTD, kernels).astype(jnp.float32)
        return y_BTD + weight_BT[..., None] * out_BTD, None

    like = tokens(x_BTD)
    start = jnp.zeros(like.shape, jnp.float32)
    y_BTD = jax.lax.scan(add, start, (jnp.arange(L), one_by_one(kernels)))[0].astype(like.dtype)
    if call.exchange:
        y_BTD = jax.lax.psum_scatter(y_BTD, call.exchange, scatter_dimension=0, tiled=True)
    return y_BTD


_DISPATCHERS: dict[str, Callable[..., jax.Array]] = {
    "capacity": _capacity,
    "dropless": _dropless,
    "allgather": _allgather,
}
