"""Latent attention against its equations in float64, and what a config may combine it with."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    RopeConfig,
    resolve_backends,
    validate,
)
from mtjax.config.training import OptimizerConfig
from mtjax.layers.attention import BlockInputs, Cache, cache_shapes
from mtjax.layers.mla import LatentAttention
from mtjax.layers.rope import product_factor, rope_frequencies, rope_table
from mtjax.parallel.stack import abstract_params
from mtjax.sharding import unbox
from mtjax.training.optimizer import _muon_dims, decay_mask

B, T, D, N = 2, 7, 12, 3
MLA = MlaConfig(kv_rank=5, q_rank=8, nope_dim=3, rope_dim=4, value_dim=6)
YARN = RopeConfig(
    scaling="yarn", factor=8.0, original_max_positions=16, mscale=1.2, mscale_all_dim=0.9
)
MODEL = ModelConfig(
    embed_dim=D,
    num_layers=1,
    ffn_dim=8,
    attention=AttentionConfig(num_heads=N, mla=MLA, backend="xla"),
    rope=YARN,
    init_std=0.5,
)


def without_query_latent(model):
    attention = dataclasses.replace(model.attention, mla=dataclasses.replace(MLA, q_rank=0))
    return dataclasses.replace(model, attention=attention)


def setup(model):
    """Layer, random parameters (norms included), inputs and what the layer reads beside them."""
    layer = LatentAttention(model, window=0)
    read = BlockInputs(rope_table(model.rope, 4, jnp.tile(jnp.arange(T), (B, 1))), None, None)
    x_BTD = jax.random.normal(jax.random.key(0), (B, T, D))
    shapes = jax.eval_shape(lambda: unbox(layer.init(jax.random.key(1), x_BTD, read, None)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    return layer, params, x_BTD, read


def by_hand(model, params, x_BTD):
    """Equations 37 to 47 of the paper, one query at a time."""
    params, x_BTD = jax.tree.map(np.float64, (params["params"], np.asarray(x_BTD)))
    frequencies, temper = rope_frequencies(model.rope, 4)

    def rotate(pair, position):
        a, b = np.split(pair, 2)
        cos, sin = (temper * f(position * frequencies) for f in (np.cos, np.sin))
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    def norm(x, name):
        x = x / np.sqrt(np.mean(x**2) + model.norm_epsilon)
        return x * params[f"{name}_norm"]["scale"]

    m = 0.1 * 0.9 * math.log(8.0) + 1
    scale = m**2 / math.sqrt(3 + 4)
    out = np.zeros((B, T, D))
    for b in range(B):
        latents = [norm(x @ params["kv_down"]["kernel"], "kv") for x in x_BTD[b]]
        shared = [rotate(x @ params["key_rope"]["kernel"], t) for t, x in enumerate(x_BTD[b])]
        for t, x in enumerate(x_BTD[b]):
            if "query_down" in params:
                x = norm(x @ params["query_down"]["kernel"], "query")
            for n in range(N):
                q = x @ params["query"]["kernel"][:, n]
                q[3:] = rotate(q[3:], t)
                keys = [
                    np.concatenate([latents[s] @ params["key"][:, n], shared[s]])
                    for s in range(t + 1)
                ]
                weights = np.exp([scale * q @ k for k in keys])
                weights /= weights.sum()
                value = sum(w * (latents[s] @ params["value"][:, n]) for s, w in enumerate(weights))
                out[b, t] += value @ params["out"]["kernel"][n]
    return out


@pytest.mark.parametrize("model", [MODEL, without_query_latent(MODEL)], ids=["V3", "V2-Lite"])
def test_heads_are_those_of_the_equations(model):
    layer, params, x_BTD, read = setup(model)
    got, cache = layer.apply(params, x_BTD, read, None)
    expected = by_hand(model, params, x_BTD)
    assert cache is None
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_the_cache_holds_the_latent_alone_and_gives_the_same_heads():
    layer, params, x_BTD, read = setup(MODEL)
    expected, _ = layer.apply(params, x_BTD, read, None)
    # 5 + 4 numbers of a token, where keys and values of 3 heads have 3 * (7 + 6).
    keys, values = (jnp.zeros((B, T + 3, *shape)) for shape in cache_shapes(MODEL))
    assert keys.shape[2:] == (1, 5) and values.shape[2:] == (1, 4)
    cache, parts = Cache(keys, values, jnp.int32(0)), []
    for first, last in ((0, 4), (4, 5), (5, T)):
        part = read._replace(rope=read.rope[:, :, first:last])
        out, cache = layer.apply(params, x_BTD[:, first:last], part, cache)
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, rtol=2e-5, atol=2e-5)


def test_yarn_as_deepseek_has_it_tempers_products_and_not_the_rotation():
    """Both m of DeepSeek-V3 are 0.1 ln 40 + 1: they cancel in cos and sin."""
    rope = RopeConfig(
        scaling="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert rope_frequencies(rope, 64)[1] == 1.0
    assert product_factor(rope) == pytest.approx(1.3688879454**2, abs=1e-9)
    assert product_factor(dataclasses.replace(rope, mscale_all_dim=0.0)) == 1.0
    assert product_factor(RopeConfig()) == 1.0


def test_projections_from_a_latent_decay_and_are_matrices_to_muon():
    boxes = abstract_params(MODEL)["blocks"]["group0"]["block0"]["attention"]
    mask = decay_mask(OptimizerConfig(), boxes)
    assert {name for name, on in mask.items() if on is True} == {"key", "value"}
    assert mask["query"]["kernel"] and not mask["kv_norm"]["scale"]
    # [layers, R, N, H]: from the latent to all heads.
    dims = _muon_dims(boxes["key"])
    assert (dims.reduction_axis, dims.output_axis) == ((1,), (2, 3))


@pytest.mark.parametrize(
    ("attention", "model", "message"),
    [
        ({"num_kv_heads": 1}, {}, r"attention\.num_kv_heads: .*kv_rank is 5"),
        ({"head_dim": 8}, {}, r"attention\.head_dim"),
        ({"qk_norm": True}, {}, r"attention\.qk_norm"),
        ({"qkv_bias": True}, {}, r"attention\.qkv_bias"),
        ({}, {"position": "none", "rope": RopeConfig()}, r"model\.position: got 'none'"),
    ],
)
def test_what_a_latent_excludes_is_refused_by_name(attention, model, message):
    with pytest.raises(ValueError, match=message):
        changed = dataclasses.replace(MODEL.attention, **attention)
        dataclasses.replace(MODEL, attention=changed, **model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_rank": 0, "q_rank": 0, "nope_dim": 0, "rope_dim": 0}, "value_dim.* kv_rank is 0"),
        ({"rope_dim": 0}, r"mla\.rope_dim: got 0"),
        ({"rope_dim": 3}, "an even number"),
        ({"q_rank": -1}, r"mla\.q_rank: got -1"),
    ],
)
def test_sizes_that_make_no_latent_attention_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MLA, **fields)


def test_mscale_is_yarns_alone():
    with pytest.raises(ValueError, match=r"model\.rope\.mscale_all_dim"):
        RopeConfig(mscale_all_dim=1.0)


def test_latents_that_do_not_divide_are_refused_before_any_device():
    config = Config(model=dataclasses.replace(MODEL, embed_dim=16), mesh=MeshConfig(fsdp=4))
    with pytest.raises(ValueError, match=r"model\.attention\.mla\.kv_rank: got 5"):
        validate(config)


@pytest.mark.parametrize(("nope", "message"), [(128, "head_dim 192"), (64, "values of width 64")])
def test_on_gpu_auto_takes_xla_and_cudnn_is_refused(nope, message):
    """Keys of 192; then of 128, which cuDNN could take, with other values."""
    mla = MlaConfig(kv_rank=512, nope_dim=nope, rope_dim=64, value_dim=64)
    model = dataclasses.replace(MODEL, attention=AttentionConfig(num_heads=2, mla=mla))
    config = Config(model=model)
    assert resolve_backends(config, "gpu").model.attention.backend == "xla"
    forced = dataclasses.replace(config, model=model.with_attention("cudnn"))
    with pytest.raises(ValueError, match=message):
        resolve_backends(forced, "gpu")
