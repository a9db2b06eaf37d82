"""Who computes which token: scores, choice of experts, and what keeps their loads even.

Shape suffixes beside those of the package: E experts, K experts of one token.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from mtjax.config.model import ModelConfig
from mtjax.config.moe import SEQUENCE_ROUTERS, MoeConfig
from mtjax.layers.context import token_order
from mtjax.layers.dropout import fold_rows, normal_of_tokens
from mtjax.layers.init import normal
from mtjax.layers.linear import named
from mtjax.sharding import local_map, reshard, shard, sum_over_manual

_TOKENS = ("batch", "seq_sp", None)
_SEQUENCES = ("batch", None, None)
_NOISE_SITE = 3  # beside those of attention and of the two branches of a block


class Routing(NamedTuple):
    """Where each token goes.

    `experts`: int32 [B, T, K], E where the token does not count or, with expert_choice (where K is
    E), the expert did not take it. `weights`: float32 [B, T, K], factors on the outputs of those
    experts.
    """

    experts: jax.Array
    weights: jax.Array


class RouterStats(NamedTuple):
    """What one layer's router did to the tokens that count: float32 sums, so that microbatches
    and shards add up. Only the losses, from `balance` on, carry gradients."""

    load: jax.Array
    """[E]: tokens sent to each expert, before any is dropped."""
    dropped: jax.Array
    """Token-expert pairs that find no room."""
    entropy: jax.Array
    """Entropy of each token's probabilities, in nats."""
    balance: jax.Array
    """Balance loss, times the tokens of its scope; scope sequence: summed over sequences."""
    device_balance: jax.Array
    """The same between the groups of experts that share a device."""
    z: jax.Array
    """Squared log-partition of the logits of each token."""


class Router(nn.Module):
    """Scores every expert for every token, in float32."""

    model: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        counts_BT: jax.Array,
        load_E: jax.Array | None,
        keys_B: jax.Array | None = None,
    ) -> tuple[Routing, RouterStats]:
        """Routing and its statistics.

        `counts_BT`: bool, which tokens are no padding. `load_E`: load of the whole batch, for a
        balance loss of that scope; None takes the load of these tokens. `keys_B`: one key per
        sequence for noise; None outside training, where sinkhorn takes the best logits.
        """
        moe = self.model.moe
        kernel_DE = self.param(
            "kernel",
            named(normal(self.model.init_std), ("embed", "router")),
            (self.model.embed_dim, moe.num_experts),
            jnp.float32,
        )
        bias_E = jnp.zeros((moe.num_experts,), jnp.float32)
        if moe.score_bias:
            box = named(nn.initializers.zeros, ("router",))
            bias_E = self.param("bias", box, (moe.num_experts,), jnp.float32)
        kernel_DE = reshard(kernel_DE.astype(jnp.float32), ("embed", "router"), (None, "router"))
        # HIGHEST: on GPU float32 products would otherwise be rounded to TF32.
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE",
            x_BTD.astype(jnp.float32),
            kernel_DE,
            precision=jax.lax.Precision.HIGHEST,
        )
        if moe.router_bias:
            box = named(nn.initializers.zeros, ("router",))
            logits_BTE += self.param("logit_bias", box, (moe.num_experts,), jnp.float32)
        if keys_B is not None and moe.router_noise:
            T, E = logits_BTE.shape[1:]
            site = fold_rows(keys_B, _NOISE_SITE)
            noise_BTE = normal_of_tokens(site, token_order(self.model, T), T, E)
            logits_BTE += moe.router_noise * shard(noise_BTE, *_TOKENS)
        logits_BTE = shard(logits_BTE, *_TOKENS)
        names = _SEQUENCES if moe.router in SEQUENCE_ROUTERS else _TOKENS
        # An island: XLA gathers the operand of a top-k that it splits by itself.
        routed = local_map(
            partial(route, moe, training=keys_B is not None),
            (names, (None,), names[:2]),
            [names] * 3,
        )(
            reshard(logits_BTE, _TOKENS, names),
            jax.lax.stop_gradient(bias_E),
            reshard(counts_BT, _TOKENS[:2], names[:2]),
        )
        experts, weights, probabilities = (shard(a, *_TOKENS) for a in routed)
        experts = jnp.where(counts_BT[..., None], experts, moe.num_experts)
        stats = router_stats(moe, logits_BTE, probabilities, experts, counts_BT, load_E)
        return Routing(experts, weights), stats


def route(
    moe: MoeConfig,
    logits_BTE: jax.Array,
    bias_E: jax.Array,
    counts_BT: jax.Array | None = None,
    *,
    training: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chosen experts int32 [B, T, K], their weights [B, T, K], and probabilities [B, T, E].

    `counts_BT`: tokens that are no padding (None: all), which SEQUENCE_ROUTERS leave out.

    The probabilities, which add up to 1, are those of the balance loss: the softmax of all
    logits, or sigmoid scores by their sum (DeepSeek-AI 2024, arXiv 2412.19437, eq. 17-20).
    """
    if counts_BT is None:
        counts_BT = jnp.ones(logits_BTE.shape[:2], bool)
    probabilities = jax.nn.softmax(logits_BTE, axis=-1)
    if moe.router == "softmax_after_topk":
        chosen, experts = jax.lax.top_k(logits_BTE, moe.top_k)
        return experts, moe.routed_scale * jax.nn.softmax(chosen, axis=-1), probabilities
    if moe.router == "expert_choice":
        experts_BTE = _taken(moe, jax.lax.stop_gradient(probabilities), counts_BT)
        return experts_BTE, moe.routed_scale * probabilities, probabilities
    scores = probabilities
    if moe.router == "sigmoid":
        scores = jax.nn.sigmoid(logits_BTE)
        probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    if moe.router == "sinkhorn" and moe.top_k == 1:
        scores = jax.nn.sigmoid(logits_BTE)
    preference = jax.lax.stop_gradient(scores) + bias_E
    if moe.router == "sinkhorn" and training:
        preference = balanced_plan(moe, jax.lax.stop_gradient(logits_BTE), counts_BT)
    if moe.num_groups > 1:
        preference = _only_best_groups(moe, preference)
    _, experts = jax.lax.top_k(preference, moe.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.renormalize:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return experts, moe.routed_scale * weights, probabilities


def _taken(moe: MoeConfig, scores_BTE: jax.Array, counts_BT: jax.Array) -> jax.Array:
    """int32 [B, T, E]: the expert's number where it takes the token, E elsewhere.

    Each takes ceil(T k / E) of the T tokens of a sequence that count; of equals, the earlier ones.
    """
    num_BT11 = jnp.sum(counts_BT, axis=1)[:, None, None]
    limit = -(-num_BT11 * moe.top_k // moe.num_experts)
    order = jnp.argsort(jnp.where(counts_BT[..., None], -scores_BTE, 1.0), axis=1, stable=True)
    place_BTE = jnp.argsort(order, axis=1)
    taken = counts_BT[..., None] & (place_BTE < limit)
    return jnp.where(taken, jnp.arange(moe.num_experts, dtype=jnp.int32), moe.num_experts)


def balanced_plan(moe: MoeConfig, logits_BTE: jax.Array, counts_BT: jax.Array) -> jax.Array:
    """Logarithm of exp(logits) whose rows and columns were scaled, until all tokens of a sequence
    weigh the same and all experts do: Sinkhorn's algorithm (Clark et al. 2022, arXiv 2202.01169).

    Per sequence, so that the plan depends on neither the batch, nor microbatches, nor the mesh.
    """
    counts_BT1 = counts_BT[..., None]

    def scale(_: Any, row_BT1: jax.Array) -> jax.Array:
        return -jax.nn.logsumexp(logits_BTE + columns(row_BT1), axis=2, keepdims=True)

    def columns(row_BT1: jax.Array) -> jax.Array:
        # A sequence without tokens has sums of zero.
        sums = jax.nn.logsumexp(logits_BTE + row_BT1, axis=1, keepdims=True, where=counts_BT1)
        return -jnp.where(jnp.isfinite(sums), sums, 0.0)

    rows = -jax.nn.logsumexp(logits_BTE, axis=2, keepdims=True)
    rows = jax.lax.fori_loop(0, moe.sinkhorn_iterations - 1, scale, rows)
    return logits_BTE + rows + columns(rows)


def _only_best_groups(moe: MoeConfig, preference_BTE: jax.Array) -> jax.Array:
    """The preference with -inf outside of each token's best groups.

    Not 0 in place of -inf: a biased score may be negative.
    """
    shape = (*preference_BTE.shape[:-1], moe.num_groups, -1)
    grouped_BTGE = preference_BTE.reshape(shape)
    num_best = 2 if moe.router == "sigmoid" else 1
    score_BTG = jnp.sum(jax.lax.top_k(grouped_BTGE, num_best)[0], axis=-1)
    _, groups = jax.lax.top_k(score_BTG, moe.top_groups)
    allowed_BTG = jnp.any(groups[..., None] == jnp.arange(moe.num_groups), axis=-2)
    return jnp.where(allowed_BTG[..., None], grouped_BTGE, -jnp.inf).reshape(preference_BTE.shape)


def router_stats(
    moe: MoeConfig,
    logits_BTE: jax.Array,
    probabilities_BTE: jax.Array,
    experts_BTK: jax.Array,
    counts_BT: jax.Array,
    load_E: jax.Array | None,
) -> RouterStats:
    """Sums over the tokens that count.

    The balance loss of T tokens is E / (k T^2) * sum_i (sum_t p_ti) n_i, with n_i tokens sent to
    expert i (Fedus et al. 2021, arXiv 2101.03961, eq. 4, for k = 1). It is linear in p: with the
    load of the whole scope known, shards and microbatches give their share by themselves.
    """
    chosen = experts_BTK[..., None] == jnp.arange(moe.num_experts)
    load_BE = jnp.sum(chosen, axis=(1, 2)).astype(jnp.float32)
    load_here_E = jnp.sum(load_BE, axis=0)
    probability_BE = jnp.sum(jnp.where(counts_BT[..., None], probabilities_BTE, 0.0), axis=1)
    if moe.balance_scope == "sequence":
        tokens_B = jnp.sum(counts_BT, axis=1).astype(jnp.float32)
        cost = _cost(moe, load_BE) / jnp.maximum(tokens_B, 1.0)[:, None]
    else:
        if load_E is None:
            load_E = sum_over_manual(load_here_E, "batch")
        cost = _cost(moe, load_E)
    log_z_BT = jax.nn.logsumexp(logits_BTE, axis=-1)
    fixed = jax.lax.stop_gradient(probabilities_BTE)
    entropy_BT = -jnp.sum(jax.scipy.special.xlogy(fixed, fixed), axis=-1)
    dropped = jnp.zeros((), jnp.float32)
    if moe.dispatcher == "capacity":
        dropped = jnp.sum(jnp.maximum(load_BE - moe.capacity(logits_BTE.shape[1]), 0.0))
    return RouterStats(
        load=load_here_E,
        dropped=dropped,
        entropy=jnp.sum(jnp.where(counts_BT, entropy_BT, 0.0)),
        balance=jnp.sum(probability_BE * cost),
        device_balance=jnp.sum(probability_BE * _group_means(moe, cost)),
        z=jnp.sum(jnp.where(counts_BT, jnp.square(log_z_BT), 0.0)),
    )


def _cost(moe: MoeConfig, load: jax.Array) -> jax.Array:
    """What a token's probability of each expert costs: E n_i / (k T), 1 for each at even loads."""
    pairs = jnp.sum(load, axis=-1, keepdims=True)  # k for each token
    return moe.num_experts * load / jnp.maximum(pairs, 1.0)


def _group_means(moe: MoeConfig, cost: jax.Array) -> jax.Array:
    """The cost of each expert replaced by the mean of its group (DeepSeek-V2, eq. 27 and 28)."""
    grouped = cost.reshape(*cost.shape[:-1], moe.device_groups, -1)
    means = jnp.broadcast_to(jnp.mean(grouped, axis=-1, keepdims=True), grouped.shape)
    return means.reshape(cost.shape)


def next_score_bias(moe: MoeConfig, bias: jax.Array, load: jax.Array) -> jax.Array:
    """Biases [..., E] after a step in which the experts had these loads over the whole batch.

    bias += rate * sign(mean load - load) (Wang et al. 2024, arXiv 2408.15664, algorithm 1).
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return bias + moe.bias_update_rate * jnp.sign(mean - load)
