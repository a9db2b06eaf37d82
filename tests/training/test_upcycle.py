"""A model with experts begins as the dense one that it was made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.checkpoint.manifest import CheckpointMismatch
from mtjax.config import AttentionConfig, ModelConfig, MoeConfig, TrainConfig, validate
from mtjax.config.mesh import MeshConfig
from mtjax.operation.metrics import read_metrics
from mtjax.parallel.stack import forward, init_params
from mtjax.sharding import unbox
from mtjax.training import loop
from mtjax.training.loop import Trainer
from mtjax.training.upcycle import with_experts
from tests.training.runs import on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")

EXPERTS = {"model__moe__num_experts": 4, "model__moe__capacity_factor": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"every": 2}, {"first_dense": 1, "router": "sigmoid"}])
def test_hidden_states_are_those_of_the_dense_model(settings):
    """Windows of two layers and experts in some: the layers are grouped in another way."""
    dense = ModelConfig(
        vocab_size=60,
        embed_dim=16,
        num_layers=5,
        ffn_dim=24,
        attention=AttentionConfig(num_heads=2, windows=(3, 0), backend="xla"),
        init_std=0.4,
    )
    model = dataclasses.replace(
        dense, moe=MoeConfig(num_experts=4, capacity_factor=4.0, **settings)
    )
    params, fresh = (
        unbox(jax.jit(init_params, static_argnums=0)(m, jax.random.key(i)))
        for i, m in enumerate((dense, model))
    )
    grown = with_experts(model, params, fresh)
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, 60)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    ours, theirs = (
        jax.jit(lambda p, m=m: forward(m, TrainConfig(), p, tokens, positions)[0])(p)
        for m, p in ((model, grown), (dense, params))
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_the_loss_of_the_dense_run_on_any_mesh(tmp_path, monkeypatch):
    dense = run(tiny(tmp_path / "dense", train__steps=3, model__dropout=0.0), monkeypatch)
    config = tiny(
        tmp_path / "experts",
        train__steps=1,
        model__dropout=0.0,
        checkpoint__upcycle_from=str(tmp_path / "dense"),
        mesh=MeshConfig(expert=2),
        # Too slow to move the weights: the loss at the end is that of the copies.
        optimizer__learning_rate=1e-12,
        **EXPERTS,
    )
    Trainer(validate(config)).run()
    before = [r for r in dense.metrics if "eval/loss" in r][-1]["eval/loss"]
    records = read_metrics(tmp_path / "experts" / "metrics.jsonl")
    after = [r for r in records if "eval/loss" in r][-1]["eval/loss"]
    assert after == pytest.approx(before, rel=1e-5)
    assert before < np.log(257) - 0.05, "the dense run had learnt something"


@pytest.mark.slow
def test_another_dense_model_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)
    run(tiny(tmp_path / "dense", train__steps=1))
    config = tiny(
        tmp_path / "experts",
        train__steps=1,
        model__norm_epsilon=1e-3,
        checkpoint__upcycle_from=str(tmp_path / "dense"),
        **EXPERTS,
    )
    with pytest.raises(CheckpointMismatch, match=r"(?s)norm_epsilon: .*accept the change with"):
        Trainer(config).run()
    allowed = dataclasses.replace(config.checkpoint, allow_changes=("model.norm_epsilon",))
    assert run(dataclasses.replace(config, checkpoint=allowed)).step == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "empty for a dense model"),
        (EXPERTS | {"model__moe__shared_ffn_dim": 8}, "no shared one"),
        (EXPERTS | {"model__moe__renormalize": False}, "add up to 1"),
        (EXPERTS | {"model__moe__routed_scale": 2.0}, "add up to 1"),
    ],
)
def test_experts_that_are_no_copies_of_a_dense_part_are_refused(tmp_path, settings, message):
    config = tiny(tmp_path, checkpoint__upcycle_from="runs/dense", **settings)
    with pytest.raises(ValueError, match=message):
        validate(config)
