"""Start a model from one with more or with fewer experts.

Growing by a factor m makes m copies of each expert and of its column of the router, with noise that
lets them part (He et al. 2024, arXiv 2410.07524). Pruning keeps, in each layer, the experts that
most tokens choose (Lu et al. 2024, arXiv 2402.14800, compare it with other choices).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.config.check import require, require_defaults
from mtjax.config.moe import MoeConfig
from mtjax.layers.init import normal
from mtjax.parallel.stack import Params
from mtjax.sharding import make_mesh
from mtjax.training import routers
from mtjax.training.feed import Feed
from mtjax.training.state import Setup, make_setup
from mtjax.training.step import StepInput, abstract_batch, evaluation_sums
from mtjax.training.upcycle import open_model, require_run

NAME = "checkpoint.resize_from"
KEPT = (
    "ffn_dim",
    "shared_ffn_dim",
    "shared_gate",
    "first_dense",
    "every",
    "router",
    "router_bias",
    "renormalize",
    "score_bias",
)
"""Settings of experts that stay as they were; the others may change with the number."""


class Source(NamedTuple):
    """The checkpoint that a model is resized from, in the folder of its run; the config with its
    experts, on a mesh that they fit, and what comes of these."""

    folder: str
    step: int
    config: Config
    mesh: Mesh
    setup: Setup


def open_source(config: Config, mesh: Mesh) -> Source:
    """The newest checkpoint of checkpoint.resize_from, once it is known to fit. Reads no array.

    Raises:
        ValueError: there is none, or its experts can't become those of `config`.
        CheckpointMismatch: the models differ in more than their experts.
    """
    folder = config.checkpoint.resize_from
    require_run(NAME, folder)
    reader = open_model(folder, config)
    step = reader.latest_step()
    assert step is not None
    moe = _experts_of(reader.saved_config(step), folder)
    _check_experts(moe, config)
    if config.model.moe.num_experts < moe.num_experts:
        condition = f"there are fewer experts than in {NAME}, so none is copied"
        require_defaults(config.checkpoint, "checkpoint", ["resize_noise"], condition)
    # Fewer experts than devices that share them: until they are resized, expert is a second fsdp,
    # and so is the pipeline, whose stages would each see a part of the layers only.
    sizes = config.mesh
    shards = sizes.fsdp * sizes.expert * sizes.pipeline
    whole = dataclasses.replace(sizes, fsdp=shards, expert=1, pipeline=1)
    model = dataclasses.replace(config.model, moe=moe)
    before = dataclasses.replace(config, model=model, mesh=whole)
    mesh = make_mesh(whole, mesh.devices.reshape(-1))
    setup = make_setup(before, mesh)
    open_model(folder, before).check_params(step, setup.abstract.params)
    return Source(folder, step, before, mesh, setup)


def _experts_of(saved: Mapping[str, Any], folder: str) -> MoeConfig:
    """The settings of experts in a saved config."""
    try:
        return MoeConfig(**saved["model"]["moe"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{NAME}: got {folder}, whose settings of experts this version can't read ({error}); "
            "take a run of this version"
        ) from error


def _check_experts(source: MoeConfig, config: Config) -> None:
    moe = config.model.moe
    before, after = source.num_experts, moe.num_experts
    require(
        before > 0,
        NAME,
        config.checkpoint.resize_from,
        "a run with experts",
        "start from a dense one with checkpoint.upcycle_from",
    )
    require(
        before != after,
        "model.moe.num_experts",
        after,
        f"another number than in {NAME} ({before})",
        "change it; a run of the same model goes on by checkpoint.resume",
    )
    require(
        after < before or after % before == 0,
        "model.moe.num_experts",
        after,
        f"a multiple of the {before} in {NAME}, or fewer",
        f"take {before * round(after / before)}",
    )
    for name in KEPT:
        was = getattr(source, name)
        fix = "only the number of experts and how tokens reach them may change"
        require(
            getattr(moe, name) == was,
            f"model.moe.{name}",
            getattr(moe, name),
            f"{was!r}, as in {NAME}",
            fix,
        )


def resized(
    config: Config, mesh: Mesh, setup: Setup, source: Source, feed: Feed
) -> tuple[Params, str]:
    """Parameters of `config`'s model from those of `source`, and a report with losses on the next
    checkpoint.resize_batches of `feed`, which stays where it is.
    """
    reader = open_model(source.folder, source.config)
    params = reader.restore_params(source.setup.abstract.params, source.step)
    batches = _next_batches(feed, config.checkpoint.resize_batches)
    before, loads = _measure(source.config, source.mesh, source.setup, params, batches)
    chosen = jax.tree.map(lambda load: choose(load, config.model.moe.num_experts), loads)
    key = jax.random.key(config.train.seed)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.params)
    with jax.set_mesh(mesh):
        resize = jax.jit(
            lambda params: with_chosen(params, chosen, config.checkpoint.resize_noise, key),
            out_shardings=shardings,
        )
        params = resize(params)
    after, _ = _measure(config, mesh, setup, params, batches)
    num_before, num_after = (c.model.moe.num_experts for c in (source.config, config))
    count = f"{len(batches)} batch{'es' if len(batches) > 1 else ''}"
    lines = [
        f"experts: {num_before} -> {num_after} in each layer, from step {source.step} of "
        f"{source.folder}",
        f"loss over {count}: {before:.4f} nats/token before, {after:.4f} after",
    ]
    if num_after < num_before:
        lines += _describe(loads, chosen)
    return params, "\n  ".join(lines)


def choose(load_UE: np.ndarray, num: int) -> np.ndarray:
    """Which old expert each of `num` new ones is made of, int [U, num], for each of U layers.

    More than before: equal numbers of copies, side by side. Fewer: those with the largest load, in
    their old order; of equals, the first.
    """
    old = load_UE.shape[1]
    if num > old:
        return np.tile(np.repeat(np.arange(old), num // old), (len(load_UE), 1))
    order = np.argsort(-load_UE, axis=1, kind="stable")
    return np.sort(order[:, :num], axis=1)


def with_chosen(params: Params, chosen: Any, noise: float, key: jax.Array) -> Params:
    """Parameters whose new experts are `chosen` old ones, int [U, E] for each block with experts.

    Where experts were copied, matrices of experts and routers get normal noise of `noise` times
    their root mean square.
    """
    blocks = dict(params["blocks"])
    for number, (group, units) in enumerate(chosen.items()):
        blocks[group] = dict(blocks[group])
        for place, (name, index) in enumerate(units.items()):
            if index is None:
                continue
            own = jax.random.fold_in(jax.random.fold_in(key, number), place)
            block = blocks[group][name]
            moe = _take(block["moe"], index, noise, own)
            blocks[group][name] = block | {"moe": moe}
    return params | {"blocks": blocks}


def _take(moe: Params, index_UE: np.ndarray, noise: float, key: jax.Array) -> Params:
    copies = len(set(index_UE[0])) < index_UE.shape[1]
    router = {name: (leaf, -1) for name, leaf in moe["router"].items()}
    own = {n: (leaf, 1) for n, leaf in moe.items() if n not in ("router", "shared", "shared_gate")}
    taken: dict[str, Any] = {}
    for number, (name, (leaf, dim)) in enumerate((own | router).items()):
        shape = [1] * leaf.ndim
        shape[0], shape[dim] = index_UE.shape
        new = jnp.take_along_axis(leaf, jnp.asarray(index_UE).reshape(shape), axis=dim)
        if copies and noise and leaf.ndim > 2 and not name.endswith("bias"):
            dims = tuple(range(1, leaf.ndim))
            scale = noise * jnp.sqrt(jnp.mean(jnp.square(leaf), axis=dims, keepdims=True))
            new += scale * normal(1.0)(jax.random.fold_in(key, number), new.shape, new.dtype)
        taken[name] = new
    return moe | {n: taken[n] for n in own} | {"router": {n: taken[n] for n in router}}


def _next_batches(feed: Feed, num: int) -> list[StepInput]:
    """Up to `num` batches; the stream is put back."""
    start = feed.loader.get_state()
    batches: list[StepInput] = []
    for _ in range(num):
        try:
            batches.append(feed.next()[0])
        except StopIteration:
            break
    feed.loader.set_state(start)
    return batches


def _measure(
    config: Config, mesh: Mesh, setup: Setup, params: Params, batches: list[StepInput]
) -> tuple[float, Any]:
    """Mean loss of the batches, in evaluation, and the load of each layer's experts [U, E]."""

    def sums(params: Params, batch: StepInput) -> Any:
        found = evaluation_sums(config, setup, mesh, params, batch)
        return found.cross_entropy, jnp.sum(batch.weights), routers.loads(found.router)

    layout = jax.tree.map(lambda leaf: leaf.sharding, abstract_batch(config, mesh))
    with jax.set_mesh(mesh):
        run = jax.jit(sums)
        found = [jax.device_get(run(params, jax.device_put(b, layout))) for b in batches]
    loss, weight, loads = jax.tree.map(lambda *parts: sum(parts), *found)
    return float(loss / weight), loads


def _describe(loads: Any, chosen: Any) -> list[str]:
    """What was kept, a line per layer."""
    lines = []
    for load_UE, index_UE in zip(jax.tree.leaves(loads), jax.tree.leaves(chosen), strict=True):
        for load_E, index_E in zip(load_UE, index_UE, strict=True):
            share = load_E[index_E].sum() / load_E.sum()
            lines.append(f"kept {' '.join(map(str, index_E))}, which had {share:.0%} of the tokens")
    return lines
