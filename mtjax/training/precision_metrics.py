"""What rounding does to the operands of each role, as metrics of a step."""

from typing import Any

import jax
import jax.numpy as jnp

from mtjax.config import Config
from mtjax.precision.quantize import scale_of
from mtjax.precision.recipe import RECIPES
from mtjax.precision.statistics import Statistics, read
from mtjax.sharding import is_boxed
from mtjax.training.delayed import Delayed, delayed_scales
from mtjax.training.quantized import QUANTIZED_PARTS

OPERANDS = ("x", "w", "g")


def precision_metrics(
    config: Config, boxes: Any, records: Any, delayed: Delayed | None
) -> dict[str, jax.Array]:
    """Largest value and scale over the kernels of a role, mean underflow and saturation ratios.

    `records` as from `mtjax.training.step.differentiate`, `delayed` is that of the step.
    """
    recipe = RECIPES[config.precision]
    formats = [spec.format for spec in (recipe.x, recipe.w, recipe.g)]
    scales = delayed_scales(config, boxes, delayed)
    by_role: dict[str, list[tuple[Statistics, jax.Array]]] = {}

    def one(box: Any, record: Any, known: Any) -> None:
        if record is None:
            return
        found = read(record)
        scale = jnp.stack([scale_of(found.amax[:, i], f) for i, f in enumerate(formats)], axis=-1)
        if known is not None:
            scale = scale.at[:, ::2].set(known)
        by_role.setdefault(box.product.role, []).append((found, scale))

    for part in QUANTIZED_PARTS:
        if part in boxes:
            jax.tree.map(one, boxes[part], records[part], scales[part], is_leaf=is_boxed)
    metrics = {}
    for role, kernels in by_role.items():
        found, scale = jax.tree.map(lambda *parts: jnp.concatenate(parts), *kernels)
        reported = found.amax > 0  # layers that are kept in the compute dtype report nothing
        for i, operand in enumerate(OPERANDS):
            prefix, layers = f"quantize/{role}_{operand}", reported[:, i]
            metrics[f"{prefix}_amax"] = jnp.max(found.amax[:, i])
            metrics[f"{prefix}_scale"] = jnp.max(scale[:, i], where=layers, initial=0.0)
            metrics[f"{prefix}_underflow"] = jnp.mean(found.underflow[:, i], where=layers)
            metrics[f"{prefix}_saturation"] = jnp.mean(found.saturation[:, i], where=layers)
    return metrics
