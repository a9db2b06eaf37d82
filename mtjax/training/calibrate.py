"""First scales of a run whose scales are delayed."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.training.delayed import Delayed, moved_on
from mtjax.training.feed import Feed
from mtjax.training.state import Setup, TrainState
from mtjax.training.step import StepInput, differentiate, dropout_key


def calibrated(
    config: Config, mesh: Mesh, setup: Setup, state: TrainState, feed: Feed
) -> TrainState:
    """The state with what the batch that comes next asks for, found without delay.

    Without this gradients would underflow until the scales reach them, one layer per step.
    """
    position = feed.loader.get_state()
    batch, _ = feed.next()
    feed.loader.set_state(position)

    def run(state: TrainState, batch: StepInput) -> Delayed:
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), setup.abstract.delayed)
        per_token = 1.0 / jnp.maximum(jnp.sum(batch.weights), 1e-6)
        key = dropout_key(config, state.step)
        parts = (config, setup, mesh, state.params, batch, key, per_token)
        return moved_on(config, nothing, differentiate(*parts)[2])

    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.delayed)
        return state._replace(delayed=jax.jit(run, out_shardings=shardings)(state, batch))
