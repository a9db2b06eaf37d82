"""Start a model with experts from a dense one: every expert is a copy of its feed-forward part.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055). The weights of a token's experts add
up to 1, so the model begins as the dense one, whatever its fresh routers choose.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtjax.checkpoint.manager import Checkpointer
from mtjax.checkpoint.manifest import build_manifest
from mtjax.config import Config
from mtjax.config.check import require
from mtjax.config.checkpoint import CheckpointConfig
from mtjax.config.model import ModelConfig
from mtjax.config.moe import MoeConfig
from mtjax.models.decoder import block_groups
from mtjax.parallel.stack import Params
from mtjax.training.state import Setup, make_setup


def require_run(name: str, folder: str) -> None:
    """Refuse, before anything is compiled, a folder to start from that holds no checkpoint.

    Raises:
        ValueError: naming the option `name`.
    """
    saved = Path(folder) / "checkpoints"
    require(
        saved.is_dir() and Checkpointer(saved, CheckpointConfig(), {}).latest_step() is not None,
        name,
        folder,
        "the folder of a run that saved a checkpoint",
        "give its --run.directory",
    )


def check_source(config: Config, mesh: Mesh) -> None:
    """Check the run of checkpoint.upcycle_from before anything is compiled. Reads no array.

    Raises:
        ValueError: it has no checkpoint, or experts of its own, or feed-forward parts of another
            width.
        CheckpointMismatch: the models differ in more than experts.
    """
    name, folder = "checkpoint.upcycle_from", config.checkpoint.upcycle_from
    require_run(name, folder)
    dense = dataclasses.replace(config, model=_dense(config.model))
    reader = open_model(folder, dense)
    step = reader.latest_step()
    assert step is not None
    model = reader.saved_config(step).get("model", {})
    require(
        not model.get("moe", {}).get("num_experts"),
        name,
        folder,
        "the run of a dense model",
        "start from one with experts with checkpoint.resize_from",
    )
    require(
        model.get("ffn_dim") == config.model.ffn_dim,
        "model.ffn_dim",
        config.model.ffn_dim,
        f"{model.get('ffn_dim')}, as in {name}, whose feed-forward parts the experts copy",
        "set it so",
    )
    reader.check_params(step, make_setup(dense, mesh).abstract.params)


def open_model(folder: str, config: Config) -> Checkpointer:
    """To read, from the run in `folder`, the newest parameters of config's model, whose changes
    may be those that checkpoint.allow_changes names."""
    newest = CheckpointConfig(allow_changes=config.checkpoint.allow_changes)
    manifest = build_manifest(dataclasses.asdict(config), config.mesh.sizes)
    return Checkpointer(Path(folder) / "checkpoints", newest, manifest)


def _dense(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, moe=MoeConfig())


def upcycled(config: Config, mesh: Mesh, setup: Setup, fresh: Params) -> Params:
    """Parameters from the newest checkpoint in checkpoint.upcycle_from, routers from `fresh`.

    Raises:
        FileNotFoundError: no checkpoint there.
        CheckpointMismatch: it is not of the same model without experts.
    """
    dense = dataclasses.replace(config, model=_dense(config.model))
    abstract = make_setup(dense, mesh).abstract.params
    params = open_model(config.checkpoint.upcycle_from, dense).restore_params(abstract)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.params)
    with jax.set_mesh(mesh):
        grow = jax.jit(
            lambda params, fresh: with_experts(config.model, params, fresh),
            out_shardings=shardings,
        )
        return grow(params, fresh)


def with_experts(model: ModelConfig, dense: Params, fresh: Params) -> Params:
    """The parameters of `model` made of those of its dense twin, routers as in `fresh`."""
    twin = _dense(model)
    layers: list[Any] = [None] * model.num_layers
    for i, group in enumerate(block_groups(twin)):
        for position in range(len(group.unit)):
            stacked = dense["blocks"][f"group{i}"][f"block{position}"]
            for repeat in range(group.repeat):
                layer = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], stacked)
                layers[group.layer_index(repeat, position)] = layer
    blocks: dict[str, Any] = {}
    for i, group in enumerate(block_groups(model)):
        units = {}
        for position, spec in enumerate(group.unit):
            name = f"block{position}"
            own = [layers[group.layer_index(r, position)] for r in range(group.repeat)]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
            if spec.experts:
                router = fresh["blocks"][f"group{i}"][name]["moe"]["router"]
                stacked = _copies(model.moe.num_experts, stacked, router)
            units[name] = stacked
        blocks[f"group{i}"] = units
    return {**dense, "blocks": blocks}


def _copies(num_experts: int, block: Params, router: Params) -> Params:
    """A stacked block whose feed-forward part, [repeat, ...], became experts [repeat, E, ...]."""
    kernels = {
        name if leaf == "kernel" else f"{name}_{leaf}": jnp.repeat(x[:, None], num_experts, axis=1)
        for name, part in block["mlp"].items()
        for leaf, x in part.items()
    }
    others = {name: part for name, part in block.items() if name != "mlp"}
    return others | {"moe": {"router": router, **kernels}}
