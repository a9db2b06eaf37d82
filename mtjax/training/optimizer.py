"""Optimizers and schedules, composed from optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mtjax.config.training import OptimizerConfig, ScheduleConfig
from mtjax.sharding import Boxed, is_boxed

Schedule = Callable[[jax.Array | int], jax.Array]

TABLES = ("vocab", "position")
"""Logical dims that mark a lookup or output table rather than a projection."""


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Learning rate as a function of the step, counted from 0.

    constant, linear and cosine as usual; wsd is warm-up, stable, then linear decay (Hu et al.
    2024, arXiv 2404.06395); inverse_sqrt is peak * sqrt(w / step) (Vaswani et al. 2017).
    """
    schedule, peak = config.schedule, config.learning_rate
    warmup, last = schedule.warmup_steps, schedule.decay_steps or total_steps
    after = _after_warmup(schedule, peak, max(last - warmup, 1))
    if warmup == 0:
        return after
    rise = optax.schedules.linear_schedule(schedule.warmup_init_ratio * peak, peak, warmup)
    return optax.schedules.join_schedules([rise, after], [warmup])


def _after_warmup(schedule: ScheduleConfig, peak: float, steps: int) -> Schedule:
    """The rate as a function of the steps since the end of the warm-up."""
    final = schedule.final_ratio
    if schedule.name == "linear":
        return optax.schedules.linear_schedule(peak, final * peak, steps)
    if schedule.name == "cosine":
        return optax.schedules.cosine_decay_schedule(peak, steps, alpha=final)
    if schedule.name == "wsd":
        fall = max(round(schedule.wsd_decay_ratio * (schedule.warmup_steps + steps)), 1)
        descent = optax.schedules.linear_schedule(peak, final * peak, fall)
        stable = optax.schedules.constant_schedule(peak)
        return optax.schedules.join_schedules([stable, descent], [max(steps - fall, 0)])
    if schedule.name == "inverse_sqrt":
        origin = max(schedule.warmup_steps, 1)
        return lambda step: peak * jnp.sqrt(origin / (origin + step))
    return optax.schedules.constant_schedule(peak)


def decay_mask(config: OptimizerConfig, boxes: Any) -> Any:
    """Which parameters decay: matrices and, if asked for, tables; never norms and biases."""

    def one(box: Boxed) -> bool:
        if any(name in TABLES for name in box.names):
            return config.decay_embeddings
        return _is_matrix(box)

    return jax.tree.map(one, boxes, is_leaf=is_boxed)


def _is_matrix(box: Boxed) -> bool:
    """Projection kernels: the only parameters that map to or from the embedding or a latent."""
    inner = {"embed", "latent"} & set(box.names)
    return bool(inner) and len(set(box.names) - {"layers", "experts"}) > 1


def make_optimizer(
    config: OptimizerConfig, total_steps: int, boxes: Any
) -> optax.GradientTransformation:
    """Update rule over the tree of parameters whose boxes (shapes and names) are given.

    Clipping by global norm is not part of it: the step does it, since it reports the norm.
    """
    rate = make_schedule(config, total_steps)
    return optax.chain(
        _direction(config, boxes),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(config, boxes)),
        optax.scale_by_learning_rate(rate),
    )


def _direction(config: OptimizerConfig, boxes: Any) -> optax.GradientTransformation:
    """The gradient turned into an unscaled update."""
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    if config.name == "adamw":
        return adam
    if config.name == "lion":
        return optax.scale_by_lion(config.beta1, config.beta2)
    if config.name == "sgd":
        return optax.trace(config.momentum) if config.momentum else optax.identity()
    if config.name == "adafactor":
        return _per_layer(
            optax.chain(
                optax.scale_by_factored_rms(decay_rate=config.beta2_decay),
                optax.clip_by_block_rms(1.0),
            )
        )
    # At rate 1 it returns the negative direction; the schedule comes after the weight decay.
    muon = optax.contrib.muon(
        1.0,
        beta=config.momentum,
        eps=config.epsilon,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=jax.tree.map(_muon_dims, boxes, is_leaf=is_boxed),
        consistent_rms=0.2,  # updates as large as AdamW's (Liu et al. 2025, arXiv 2502.16982)
    )
    return optax.chain(muon, optax.scale(-1.0))


def _muon_dims(box: Boxed) -> Any:
    """Input and output dims of a projection; None for tables, norms and biases.

    Stacked layers and experts are matrices of their own.
    """
    if not _is_matrix(box) or any(name in TABLES for name in box.names):
        return None
    dims = [i for i, name in enumerate(box.names) if name not in ("layers", "experts")]
    inner = box.names.index("embed" if "embed" in box.names else "latent")
    others = tuple(i for i in dims if i != inner)
    reads = inner == dims[0]
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=(inner,) if reads else others,
        output_axis=others if reads else (inner,),
    )


def _per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `inner` to each layer of the stacks apart, as if they were not stacked."""

    def over(name: str, f: Callable) -> Callable:
        return f if name in ("embed", "head") else jax.vmap(f)

    def init(params: Any) -> Any:
        return {name: over(name, inner.init)(tree) for name, tree in _by_stack(params).items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        out, new_state = {}, {}
        for name, tree in _by_stack(updates).items():
            update_one = over(name, inner.update)
            out[name], new_state[name] = update_one(tree, state[name], _by_stack(params)[name])
        return _from_stacks(out), new_state

    return optax.GradientTransformation(init, update)


def _by_stack(params: Any) -> dict[str, Any]:
    """Group trees by name, beside the other parts: each group has its own number of layers."""
    return params["blocks"] | {name: tree for name, tree in params.items() if name != "blocks"}


def _from_stacks(trees: dict[str, Any]) -> Any:
    blocks = {name: tree for name, tree in trees.items() if name.startswith("group")}
    return {name: tree for name, tree in trees.items() if name not in blocks} | {"blocks": blocks}
