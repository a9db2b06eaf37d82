"""Initialise and run a model whose layers are stacked in arrays [repeat, ...] per group."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_policies as policies

from mtjax.config.model import AttentionConfig, ModelConfig
from mtjax.config.training import TrainConfig
from mtjax.layers.attention import BlockInputs, Cache, cache_shapes
from mtjax.layers.block import DecoderBlock
from mtjax.layers.context import token_order
from mtjax.layers.dropout import dropout, fold_rows
from mtjax.layers.embedding import Embedding, Head
from mtjax.layers.mtp import MtpModule
from mtjax.layers.rope import rope_table
from mtjax.models.decoder import BlockGroup, block_groups, mtp_spec
from mtjax.sharding import all_mesh_axes, is_boxed, no_mesh, shard

Params = dict[str, Any]
"""{"embed": ..., "blocks": {"group0": {"block0": leaves [repeat, ...]}}, "head": ...}, and "mtp":
leaves [depth, ...] of a model with multi-token prediction"""

_EMBEDDING_SITE = 2**31 - 1  # dropout site that no layer index reaches
_MTP_SITE = 3  # beside the three keys that a model's own parameters come from


def init_params(model: ModelConfig, key: jax.Array) -> Params:
    """Boxed float32 parameters, a function of the key and the model alone.

    Each block draws from its own key, folded from its layer index, so that neither the grouping
    nor the mesh changes a weight.
    """
    # Initialisation runs the layers on dummy float32 inputs under vmap, which cuDNN and products
    # by group refuse.
    model = model.with_attention("xla").with_dispatcher("capacity")
    with no_mesh():
        embed_key, blocks_key, head_key = jax.random.split(key, 3)
        ids_BT = jnp.zeros((1, 8), jnp.int32)
        x_BTD = jnp.zeros((1, 8, model.embed_dim), jnp.float32)
        inputs = BlockInputs(rope_angles(model, ids_BT), None, None)

        def init_group(group: BlockGroup) -> Params:
            def init_position(position: int) -> Any:
                block = DecoderBlock(group.unit[position])
                layers = [group.layer_index(r, position) for r in range(group.repeat)]
                keys = jax.vmap(lambda i: jax.random.fold_in(blocks_key, i))(jnp.array(layers))
                return jax.vmap(lambda k: block.init(k, x_BTD, inputs)["params"])(keys)

            return {f"block{p}": init_position(p) for p in range(len(group.unit))}

        blocks = {f"group{i}": init_group(g) for i, g in enumerate(block_groups(model))}
        embed = Embedding(model, jnp.dtype(jnp.float32)).init(embed_key, ids_BT, ids_BT)
        head = Head(model).init(head_key, x_BTD)
        params = {"embed": embed["params"], "blocks": _stacked(blocks), "head": head["params"]}
        if model.mtp.depth:
            module, mtp_key = MtpModule(mtp_spec(model)), jax.random.fold_in(key, _MTP_SITE)
            keys = jax.vmap(lambda i: jax.random.fold_in(mtp_key, i))(jnp.arange(model.mtp.depth))
            init = jax.vmap(lambda k: module.init(k, x_BTD, x_BTD, inputs)["params"])
            params["mtp"] = _stacked(init(keys))
        return params


def _stacked(boxes: Params) -> Params:
    """Boxes whose values have got a leading dim of layers."""
    return jax.tree.map(
        lambda box: box.replace(names=("layers", *box.names)), boxes, is_leaf=is_boxed
    )


def abstract_params(model: ModelConfig) -> Params:
    """Boxed shapes and dtypes of the parameters, without computing them."""
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def forward(
    model: ModelConfig,
    train: TrainConfig,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array | None = None,
    keys_B: jax.Array | None = None,
    caches: Any = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Final hidden states [B, T, D], the output table [V, D], and the updated caches.

    The dtype of the parameters is the compute dtype. `keys_B` turns dropout on.
    """
    extra = Extra(segments_BT, keys_B)
    h_BTD, table_VD, caches, _ = run_model(
        model, train, params, tokens_BT, positions_BT, extra, caches
    )
    return h_BTD, table_VD, caches


class Extra(NamedTuple):
    """What a training step knows beside tokens and positions.

    Segments [B, T], dropout keys [B] and `counts` [B, T] as in BlockInputs; `loads` is the load of
    the whole batch, arrays [repeat, E] in the structure of the statistics that `run_model` returns.
    """

    segments: jax.Array | None = None
    keys: jax.Array | None = None
    counts: jax.Array | None = None
    loads: Any = None


def run_model(
    model: ModelConfig,
    train: TrainConfig,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    extra: Extra,
    caches: Any = None,
) -> tuple[jax.Array, jax.Array, Any, Any]:
    """As `forward`, and statistics {"group0": {"block0": RouterStats [repeat, ...] or None}}."""
    x_BTD = embed_tokens(model, params["embed"], tokens_BT, positions_BT, extra.keys)
    angles = rope_angles(model, positions_BT)
    inputs = BlockInputs(angles, extra.segments, extra.keys, extra.counts)
    new_caches, stats = {}, {}
    for i, group in enumerate(block_groups(model)):
        name = f"group{i}"
        scanned = Scanned(
            params["blocks"][name],
            jnp.arange(group.repeat),
            caches=None if caches is None else caches[name],
            loads=None if extra.loads is None else extra.loads[name],
        )
        x_BTD, (new_caches[name], stats[name]) = _run_group(group, train, scanned, x_BTD, inputs)
    h_BTD, table_VD = output_head(model, params, x_BTD)
    return h_BTD, table_VD, (None if caches is None else new_caches), stats


def embed_tokens(
    model: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    keys_B: jax.Array | None,
) -> jax.Array:
    """The residual stream [B, T, D] before the first block."""
    embed = Embedding(model, params["embedding"].dtype)
    x_BTD: Any = embed.apply({"params": params}, tokens_BT, positions_BT)
    if keys_B is not None and model.dropout > 0:
        site = fold_rows(keys_B, _EMBEDDING_SITE)
        x_BTD = dropout(x_BTD, model.dropout, site, token_order(model, tokens_BT.shape[1]))
    return x_BTD


def output_head(
    model: ModelConfig, params: Params, x_BTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Final hidden states [B, T, D] and the output table [V, D], which may be the embedding's."""
    head_out: Any = Head(model).apply({"params": params["head"]}, x_BTD)
    h_BTD, table_VD = head_out
    return h_BTD, params["embed"]["embedding"] if table_VD is None else table_VD


def init_caches(model: ModelConfig, batch: int, length: int, dtype: Any) -> Any:
    """Empty key-value caches for `length` tokens of `batch` sequences, per group and block."""
    keys, values = cache_shapes(model)

    def one(repeat: int) -> Cache:
        def buffer(heads: int, width: int) -> jax.Array:
            zeros = jnp.zeros((repeat, batch, length, heads, width), dtype)
            return shard(zeros, "layers", "batch", None, "act_heads" if heads > 1 else None, None)

        return Cache(buffer(*keys), buffer(*values), jnp.zeros((repeat,), jnp.int32))

    return {
        f"group{i}": {f"block{p}": one(group.repeat) for p in range(len(group.unit))}
        for i, group in enumerate(block_groups(model))
    }


def rope_angles(model: ModelConfig, positions_BT: jax.Array) -> jax.Array | None:
    """`rope_table` of these positions, None for a model without rotation."""
    if model.position != "rope":
        return None
    return rope_table(model.rope, model.rope_dim, positions_BT)


def run_mtp(
    model: ModelConfig,
    train: TrainConfig,
    params: Params,
    h_BTD: jax.Array,
    tokens: Sequence[jax.Array],
    positions_BT: jax.Array,
    extra: Extra,
    embed: Callable[..., jax.Array] = embed_tokens,
) -> tuple[list[jax.Array], Any]:
    """What the output head reads behind each module, [B, T, D], and statistics {"block": ...}.

    `h_BTD` is what it reads behind the model, `tokens` for each module k = 1, 2, ... the ids [B, T]
    that stand k places ahead. Of `extra.loads` it takes "mtp". `embed` looks tokens up, as
    `embed_tokens` does.
    """

    def module(spec, h_BTD, e_BTD, module_params, inputs):
        return MtpModule(spec).apply({"params": module_params}, h_BTD, e_BTD, inputs)

    run = _rematerialised(module, train, model.attention, unrolled=True)
    inputs = BlockInputs(rope_angles(model, positions_BT), extra.segments, None, extra.counts)
    hidden, stats = [], []
    for depth, tokens_BT in enumerate(tokens):
        own = jax.tree.map(lambda leaf, depth=depth: leaf[depth], params["mtp"])
        if extra.loads is not None and extra.loads["mtp"]["block"] is not None:
            inputs = inputs._replace(load=extra.loads["mtp"]["block"][depth])
        if extra.keys is not None:
            inputs = inputs._replace(keys=fold_rows(extra.keys, model.num_layers + depth))
        e_BTD = embed(model, params["embed"], tokens_BT, positions_BT, inputs.keys)
        h_BTD, found = run(mtp_spec(model), h_BTD, e_BTD, own, inputs)
        hidden.append(h_BTD)
        stats.append({"block": found})
    return hidden, jax.tree.map(lambda *parts: jnp.stack(parts), *stats)


class Scanned(NamedTuple):
    """What differs between the repeats of a group that are run: leaves [U, ...], or None."""

    params: Params
    units: jax.Array
    """Which repeats they are."""
    real: jax.Array | None = None
    """[U, P]; where False, the block at that place of the pattern is the identity."""
    caches: Any = None
    loads: Any = None


def _run_group(
    group: BlockGroup, train: TrainConfig, scanned: Scanned, x_BTD: jax.Array, inputs: BlockInputs
) -> tuple[jax.Array, Any]:
    """`run_units` on all repeats of a group, whose parameters may be a tuple of segments."""
    if not isinstance(scanned.params, tuple):
        return run_units(group, train, scanned, x_BTD, inputs)
    outs, begin = [], 0
    for params in scanned.params:
        end = begin + len(jax.tree.leaves(params)[0])
        others = jax.tree.map(lambda a: a[begin:end], scanned._replace(params=None))  # noqa: B023
        segment = others._replace(params=params)
        x_BTD, out = run_units(group, train, segment, x_BTD, inputs)
        outs.append(out)
        begin = end
    return x_BTD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)


def run_units(
    group: BlockGroup, train: TrainConfig, scanned: Scanned, x_BTD: jax.Array, inputs: BlockInputs
) -> tuple[jax.Array, Any]:
    """Run some repeats of a group, one after another; also (caches, statistics), [U, ...] each."""

    def block(spec, x_BTD, layer_params, layer, inputs, cache):
        if inputs.keys is not None:
            inputs = inputs._replace(keys=fold_rows(inputs.keys, layer))
        return DecoderBlock(spec).apply({"params": layer_params}, x_BTD, inputs, cache)

    attention = group.unit[0].model.attention
    run = _rematerialised(block, train, attention, unrolled=train.unroll_layers)

    def unit(x_BTD, scanned):
        out_caches, out_stats = {}, {}
        for place, spec in enumerate(group.unit):
            name = f"block{place}"
            layer = group.layer_index(scanned.units, place)
            cache = None if scanned.caches is None else scanned.caches[name]
            own = inputs if scanned.loads is None else inputs._replace(load=scanned.loads[name])
            y_BTD, out_caches[name], out_stats[name] = run(
                spec, x_BTD, scanned.params[name], layer, own, cache
            )
            if scanned.real is None:
                x_BTD = y_BTD
                continue
            real = scanned.real[place]
            x_BTD = jnp.where(real, y_BTD, x_BTD)
            out_stats[name] = jax.tree.map(
                lambda total, real=real: jnp.where(real, total, 0.0), out_stats[name]
            )
        return x_BTD, (out_caches, out_stats)

    unroll = len(scanned.units) if train.unroll_layers else 1
    return jax.lax.scan(unit, x_BTD, scanned, unroll=unroll)


def _rematerialised(
    block: Any, train: TrainConfig, attention: AttentionConfig, *, unrolled: bool
) -> Any:
    """The block under the rematerialisation that train.remat asks for."""
    if train.remat == "none":
        return block
    policy = None
    if train.remat == "selective":
        # cuDNN's backward pass reads an output of its own, which is what the projection behind
        # it reads.
        keeps_output = attention.backend == "cudnn" and not all_mesh_axes("seq")
        policy = _selective_policy(train, keeps_output)
    # Inside a scan common-subexpression elimination can't undo the recomputation.
    return jax.checkpoint(block, policy=policy, prevent_cse=unrolled, static_argnums=(0,))


def _selective_policy(train: TrainConfig, attention_keeps_output: bool) -> Any:
    """Keep the named tensors, offload others to host; everything else is recomputed."""
    saved = set(train.remat_save)
    if attention_keeps_output:
        saved.discard("attention_out")
    if train.remat_offload:
        names = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(saved),
            names_which_can_be_offloaded=list(train.remat_offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        names = policies.save_only_these_names(*saved)
    if "attention_out" not in train.remat_save:
        return names

    def policy(prim, *args, **params):
        # cuDNN attention's own residuals (output and log-sum-exp), or backward runs it again.
        if "dot_product_attention_fwd" in str(prim):
            return True
        return names(prim, *args, **params)

    return policy
