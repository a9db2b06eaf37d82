"""How far quantised products move loss and gradients from those in the compute dtype."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.config.check import require
from mtjax.config.data import SplitName
from mtjax.config.precision import QUANTIZED
from mtjax.parallel.stack import Params
from mtjax.training.feed import Feed
from mtjax.training.state import Setup
from mtjax.training.step import StepInput, loss_and_gradients


class Similarity(NamedTuple):
    """Two gradients of one parameter, or of all."""

    cosine: float
    norm_ratio: float
    """Of the second to the first."""


def similarity(first: Any, second: Any) -> Similarity:
    """Of two trees of float32 arrays, each taken as one vector."""
    pairs = list(zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    inner = sum(float(np.vdot(a, b)) for a, b in pairs)
    norms = [
        sum(float(np.vdot(leaf, leaf)) for leaf in side) ** 0.5 for side in zip(*pairs, strict=True)
    ]
    return Similarity(inner / max(norms[0] * norms[1], 1e-30), norms[1] / max(norms[0], 1e-30))


def check_comparable(config: Config) -> None:
    """Raises ValueError if the config quantises nothing."""
    require(
        config.quantized,
        "--compare-precision with precision",
        config.precision,
        f"one of {', '.join(QUANTIZED)}",
        "add --precision fp8",
    )


def compare_precision(
    config: Config, mesh: Mesh, setup: Setup, params: Params, split: SplitName
) -> str:
    """Loss and gradients of the first batch of a split, quantised and not, as a table."""
    batch, _ = Feed(config, mesh, split, config.train.batch_size).next()
    plain = config.unquantized
    (loss, gradients), (other_loss, others) = (
        _run(each, mesh, setup, params, batch) for each in (plain, config)
    )
    whole = similarity(gradients, others)
    by_name = {
        jax.tree_util.keystr(path, simple=True, separator="."): similarity(leaf, other)
        for (path, leaf), other in zip(
            jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(others), strict=True
        )
    }
    worst = min(by_name, key=lambda name: by_name[name].cosine)
    width = max(len(plain.precision), len(config.precision))
    return "\n".join(
        [
            f"  loss {plain.precision:<{width}}  {loss:.6f}",
            f"  loss {config.precision:<{width}}  {other_loss:.6f}  ({other_loss / loss - 1:+.3%})",
            f"  gradient cosine  {whole.cosine:.6f}, norm {whole.norm_ratio - 1:+.2%}",
            f"  lowest cosine    {by_name[worst].cosine:.6f}, {worst}",
        ]
    )


def _run(
    config: Config, mesh: Mesh, setup: Setup, params: Params, batch: StepInput
) -> tuple[float, Any]:
    def mean(params: Params, batch: StepInput) -> Any:
        per_token = 1.0 / jnp.maximum(jnp.sum(batch.weights), 1e-6)
        sums, gradients = loss_and_gradients(config, setup, mesh, params, batch, None, per_token)
        return sums.cross_entropy * per_token, gradients

    with jax.set_mesh(mesh):
        loss, gradients = jax.jit(mean)(params, batch)
    return float(loss), jax.device_get(gradients)
