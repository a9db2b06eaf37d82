"""Optimizers against hand-written updates in numpy."""

import dataclasses

import jax
import numpy as np
import pytest

from mtjax.config import (
    AttentionConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from mtjax.parallel.stack import abstract_params
from mtjax.sharding import unbox
from mtjax.training.optimizer import decay_mask, make_optimizer

MODEL = ModelConfig(
    vocab_size=100,
    embed_dim=16,
    num_layers=3,
    ffn_dim=24,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, qkv_bias=True, out_bias=True),
    mlp_bias=True,
    norm="layernorm",
)
CONSTANT = ScheduleConfig(name="constant")
FAST = {"xla_backend_optimization_level": 0}


def draw(shapes, seed):
    """A tree of normal numbers of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


def run(steps=3, model=MODEL, **settings):
    """Names -> (initial value, gradients of each step, final value)."""
    config = OptimizerConfig(schedule=CONSTANT, learning_rate=0.01, **settings)
    boxes = abstract_params(model)
    optimizer = make_optimizer(config, 100, boxes)
    first = params = draw(unbox(boxes), 0)
    gradients = [draw(first, step + 1) for step in range(steps)]
    state = jax.jit(optimizer.init, compiler_options=FAST)(params)
    update = jax.jit(optimizer.update, compiler_options=FAST)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
    flat = [named(tree) for tree in (first, params, *gradients)]
    return {name: (flat[0][name], [g[name] for g in flat[2:]], flat[1][name]) for name in flat[0]}


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def decays(name):
    return name.endswith(("kernel", "embedding"))


def test_only_matrices_and_tables_decay():
    boxes = abstract_params(MODEL)
    mask = named(decay_mask(OptimizerConfig(), boxes))
    assert {name for name, on in mask.items() if on} == {n for n in mask if decays(n)}
    without = named(decay_mask(OptimizerConfig(decay_embeddings=False), boxes))
    assert {n for n in mask if mask[n] != without[n]} == {"embed.embedding", "head.kernel"}


def test_of_experts_the_matrices_decay_and_no_bias():
    """Stacked over layers and experts a bias has three dims, as a matrix over layers has."""
    moe = MoeConfig(num_experts=4, router_bias=True)
    attention = dataclasses.replace(MODEL.attention, sinks=True)
    model = dataclasses.replace(MODEL, moe=moe, attention=attention)
    mask = named(decay_mask(OptimizerConfig(), abstract_params(model)))
    of_experts = {name.rpartition(".moe.")[2] for name, on in mask.items() if on and "moe" in name}
    assert of_experts == {"router.kernel", "gate", "up", "down"}
    assert not any(on for name, on in mask.items() if name.endswith("sinks"))


def test_adamw_follows_loshchilov_and_hutter():
    for name, (p, gradients, final) in run(beta1=0.8, beta2=0.9, weight_decay=0.2).items():
        m = v = 0.0
        for t, g in enumerate(gradients, start=1):
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            direction = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
            p = p - 0.01 * (direction + 0.2 * decays(name) * p)
        np.testing.assert_allclose(final, p, atol=2e-6, err_msg=name)


def test_lion_moves_by_the_sign_of_the_interpolated_momentum():
    for name, (p, gradients, final) in run(name="lion", beta1=0.9, beta2=0.99).items():
        m = np.zeros_like(p)
        for g in gradients:
            p = p - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * decays(name) * p)
            m = 0.99 * m + 0.01 * g
        np.testing.assert_allclose(final, p, atol=2e-6, err_msg=name)


def test_sgd_adds_momentum():
    for name, (p, gradients, final) in run(name="sgd", momentum=0.7, weight_decay=0.0).items():
        m = np.zeros_like(p)
        for g in gradients:
            m = 0.7 * m + g
            p = p - 0.01 * m
        np.testing.assert_allclose(final, p, atol=2e-6, err_msg=name)


def test_adafactor_factors_each_layer_apart_and_clips_its_update():
    """Dims below 128 are not factored: the update is g / rms, clipped to a root mean square of 1.

    Of a stack, each layer has a root mean square of its own.
    """
    found = run(steps=1, name="adafactor", weight_decay=0.0)
    for name, (p, (g,), final) in found.items():
        direction = (final - p) / -0.01
        layers = direction if name.startswith("blocks") else direction[None]
        rms = np.sqrt(np.mean(layers.reshape(len(layers), -1) ** 2, axis=1))
        np.testing.assert_allclose(rms, 1.0, rtol=1e-3, err_msg=name)
        np.testing.assert_array_equal(np.sign(direction), np.sign(g), err_msg=name)


def test_adafactor_factors_the_second_moment_of_each_layer_of_a_stack():
    """Shazeer & Stern 2018, algorithm 4: at step 1, v = row mean * column mean / mean of g^2."""
    model = dataclasses.replace(MODEL, embed_dim=128, ffn_dim=136, num_layers=2)
    found = run(steps=1, model=model, name="adafactor", weight_decay=0.0)
    p, (g,), final = found["blocks.group0.block0.mlp.up.kernel"]
    assert p.shape == (2, 128, 136)
    for layer in range(2):
        square = g[layer] ** 2
        v = np.outer(square.mean(axis=1), square.mean(axis=0)) / square.mean()
        direction = g[layer] / np.sqrt(v)
        direction /= max(1.0, np.sqrt(np.mean(direction**2)))
        np.testing.assert_allclose((p - final)[layer] / 0.01, direction, atol=2e-4)


def test_muon_orthogonalises_each_matrix_and_leaves_the_rest_to_adam():
    found = run(steps=1, name="muon", weight_decay=0.0)
    p, _, final = found["blocks.group0.block0.mlp.down.kernel"]
    for layer in (final - p) / -0.01:
        singular = np.linalg.svd(layer, compute_uv=False)
        # Five Newton-Schulz steps bring singular values near 1, times 0.2 sqrt(larger dim).
        assert singular.max() / singular.min() < 2.0
        assert singular.mean() / (0.2 * np.sqrt(24)) == pytest.approx(1.0, abs=0.3)
    for name, shape in {
        "mlp.down": (24, 16),
        "attention.query": (16, 16),
        "attention.key": (16, 8),
        "attention.out": (16, 16),
    }.items():
        p, (g,), final = found[f"blocks.group0.block0.{name}.kernel"]
        for layer, gradient in zip((final - p) / -0.01, g, strict=True):
            u, _, v = np.linalg.svd(gradient.reshape(shape), full_matrices=False)
            polar, direction = u @ v, layer.reshape(shape)
            cosine = np.vdot(direction, polar) / np.linalg.norm(direction) / np.linalg.norm(polar)
            assert cosine > 0.95, f"{name}: one matrix of all heads, not one per head"
    for name in ("embed.embedding", "head.kernel", "head.norm.scale",
                 "blocks.group0.block0.mlp.up.bias"):  # fmt: skip
        p, (g,), final = found[name]
        # Adam's first step with Nesterov momentum: (b1 m + (1 - b1) g) / bias correction.
        direction = (final - p) / -0.01
        np.testing.assert_array_equal(np.sign(direction), np.sign(g), err_msg=name)
        np.testing.assert_allclose(np.abs(direction), np.abs(direction).mean(), rtol=1e-2)
