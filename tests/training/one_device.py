"""A tiny model's step on one device, compiled once per config for all tests of a session."""

import functools

import jax
import numpy as np

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    resolve_backends,
)
from mtjax.sharding import make_mesh
from mtjax.training.state import init_state, make_setup
from mtjax.training.step import Limits, StepInput, make_train_step

VOCAB, ROWS, SEQ = 64, 4, 8
FAST = {"xla_backend_optimization_level": 0}
"""LLVM's passes take most of a compilation, and what is tested here is decided before them."""

BASE = Config(
    model=ModelConfig(
        vocab_size=VOCAB,
        embed_dim=16,
        num_layers=1,
        ffn_dim=32,
        attention=AttentionConfig(num_heads=2),
    ),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(seq_len=SEQ, batch_size=ROWS),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    precision="fp32",
)
OPEN = Limits(np.float32(np.inf), np.float32(np.inf))


def make_batch(microbatches=1, weights=None, active=None):
    """The same random rows, however they are cut."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    weights = np.ones((ROWS, SEQ), np.float32) if weights is None else weights

    def cut(x):
        return x.reshape(microbatches, ROWS // microbatches, *x.shape[1:])

    return StepInput(
        tokens=cut(ids[:, :-1]),
        labels=cut(ids[:, 1:]),
        weights=cut(weights.astype(np.float32)),
        positions=cut(np.tile(np.arange(SEQ, dtype=np.int32), (ROWS, 1))),
        segments=None,
        rows=cut(np.arange(ROWS, dtype=np.int32)),
        active=active,
    )


@functools.cache
def _prepare(config):
    config = resolve_backends(config, "cpu")
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    setup = make_setup(config, mesh)
    traced = []
    step = make_train_step(config, mesh, setup)

    def counted(*args):
        traced.append(args)
        return step(*args)

    jitted = jax.jit(counted, compiler_options=FAST)
    with jax.set_mesh(mesh):
        first = jax.jit(lambda: init_state(config, setup.optimizer), compiler_options=FAST)()

    def run(state, batch, limits=OPEN):
        with jax.set_mesh(mesh):
            state, metrics = jitted(state, batch, limits)
        return jax.device_get((state, metrics))

    return jax.device_get(first), run, traced


def start(config):
    """First state and the step: (state, batch, limits) -> (state, metrics), all on the host."""
    return _prepare(config)[:2]


def num_traces(config):
    """How often the step of `config` was traced since the session began."""
    return len(_prepare(config)[2])


def same(a, b):
    """Whether two trees hold the same bits."""
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))
