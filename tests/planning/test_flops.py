"""Parameter counts and model FLOPs against published numbers."""

import dataclasses

import jax
import pytest

from mtjax.config.mla import MlaConfig
from mtjax.config.model import AttentionConfig, ModelConfig
from mtjax.config.moe import MoeConfig
from mtjax.config.mtp import MtpConfig
from mtjax.models.presets import deepseek_v3
from mtjax.parallel.stack import abstract_params
from mtjax.planning.flops import (
    attention_area,
    count_active_params,
    count_mtp_params,
    count_params,
    flops_per_token,
)
from mtjax.sharding import unbox


def _decoder(vocab, embed, layers, ffn, heads, kv=None, head_dim=None, qk_norm=False, **kwargs):
    attention = AttentionConfig(
        num_heads=heads, num_kv_heads=kv, head_dim=head_dim, qk_norm=qk_norm
    )
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        num_layers=layers,
        ffn_dim=ffn,
        attention=attention,
        **kwargs,
    )


def _gpt(vocab, embed, layers, heads, positions):
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        num_layers=layers,
        ffn_dim=4 * embed,
        attention=AttentionConfig(num_heads=heads, qkv_bias=True, out_bias=True),
        position="learned",
        max_positions=positions,
        norm="layernorm",
        activation="gelu",
        mlp_bias=True,
        tied_embeddings=True,
    )


MODELS = {
    "llama2-7b": (_decoder(32000, 4096, 32, 11008, 32), 6_738_415_616),
    "llama3-8b": (_decoder(128256, 4096, 32, 14336, 32, 8), 8_030_261_248),
    "llama3-70b": (_decoder(128256, 8192, 80, 28672, 64, 8), 70_553_706_496),
    "mistral-7b": (_decoder(32000, 4096, 32, 14336, 32, 8), 7_241_732_096),
    "qwen3-0.6b": (
        _decoder(151936, 1024, 28, 3072, 16, 8, 128, qk_norm=True, tied_embeddings=True),
        596_049_920,
    ),
    "gpt2": (_gpt(50257, 768, 12, 12, 1024), 124_439_808),
    "mixtral-8x7b": (
        _decoder(32000, 4096, 32, 14336, 32, 8, moe=MoeConfig(num_experts=8)),
        46_702_792_704,
    ),
    "qwen3-30b-a3b": (
        _decoder(151936, 2048, 48, 768, 32, 4, 128, True, moe=MoeConfig(num_experts=128, top_k=8)),
        30_532_122_624,
    ),
}


def test_sinks_and_biases_of_experts_and_routers_are_counted_as_built():
    """GPT-OSS-like; a token uses no more matrices than without them."""
    plain = _decoder(128, 32, 3, 80, 4, moe=MoeConfig(num_experts=8, top_k=3))
    model = dataclasses.replace(
        plain,
        moe=dataclasses.replace(plain.moe, router_bias=True, shared_ffn_dim=24, first_dense=1),
        attention=dataclasses.replace(plain.attention, sinks=True),
        mlp_bias=True,
    )
    leaves = jax.tree.leaves(unbox(abstract_params(model)))
    assert count_params(model) == sum(leaf.size for leaf in leaves)
    expert = 3 * 32 * 80 + 2 * 80 + 32
    assert count_active_params(model) == count_params(model) - 2 * 5 * expert


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_those_of_the_published_checkpoints(name):
    model, published = MODELS[name]
    assert count_params(model) == published


@pytest.mark.parametrize(
    ("embed", "layers", "heads", "billions"),
    [(2304, 24, 24, 1.7), (12288, 80, 96, 145.6), (25600, 128, 160, 1008.0)],
)
def test_gpt_counts_follow_the_formula_of_narayanan_2021(embed, layers, heads, billions):
    vocab, seq = 51200, 2048
    formula = 12 * layers * embed**2 + 13 * layers * embed + (vocab + seq) * embed
    # The paper leaves out the last layer norm.
    assert count_params(_gpt(vocab, embed, layers, heads, seq)) == formula + 2 * embed
    assert round(formula / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "seq_len", "gflops"),
    [
        ("llama2-7b", 4096, 42.8637),
        ("llama3-8b", 8192, 51.4704),
        ("mixtral-8x7b", 4096, 79.7065),
    ],
)
def test_flops_per_token_are_the_reference_values(name, seq_len, gflops):
    assert round(flops_per_token(MODELS[name][0], seq_len) / 1e9, 4) == gflops


def test_deepseek_v3_without_its_second_token_has_the_reference_value():
    model = dataclasses.replace(deepseek_v3(), mtp=MtpConfig())
    assert round(flops_per_token(model, 4096) / 1e9, 4) == 249.8121


def test_modules_of_multi_token_prediction_are_counted_as_built():
    moe = MoeConfig(num_experts=8, top_k=3, router="sigmoid", score_bias=True)
    model = _decoder(128, 32, 2, 24, 4, moe=moe, mtp=MtpConfig(depth=2))
    shapes = unbox(abstract_params(model))
    assert count_mtp_params(model) == sum(leaf.size for leaf in jax.tree.leaves(shapes["mtp"]))
    assert count_params(model) == sum(
        leaf.size for name in ("embed", "blocks", "head") for leaf in jax.tree.leaves(shapes[name])
    )


def test_a_window_replaces_the_triangle_by_its_band():
    # Query t sees min(t + 1/2, W) keys on average over its cell: 8 rows of 4, minus a triangle.
    assert attention_area(8) == 32
    assert attention_area(8, 4) == 8 * 4 - 4 * 4 / 2
    assert attention_area(8, 100) == attention_area(8, 8) == attention_area(8)


def test_alternating_windows_count_each_layer_by_its_own_area():
    full = _decoder(512, 64, 4, 128, 4)
    windows = AttentionConfig(num_heads=4, windows=(16, 0))
    mixed = ModelConfig(vocab_size=512, embed_dim=64, num_layers=4, ffn_dim=128, attention=windows)
    # Two of four layers lose 64*64/2 - (64*16 - 16*16/2) pairs, 4*N*H = 256 FLOPs each, times 3.
    saved = 3 * 2 * (2048 - 896) * 256 / 64
    assert flops_per_token(full, 64) - flops_per_token(mixed, 64) == saved


def test_a_sequence_without_tokens_is_an_error():
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        flops_per_token(_decoder(512, 64, 4, 128, 4), 0)


def test_the_active_parameters_of_mixtral_are_those_published():
    """12.88 billion: all but 6 of 8 experts in 32 layers."""
    active = count_active_params(MODELS["mixtral-8x7b"][0])
    assert active == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336
    assert round(active / 1e9, 2) == 12.88


def test_experts_shared_ones_and_dense_layers_are_counted_as_built():
    """DeepSeek-like: a dense layer, then experts with a gated shared one, and routing biases."""
    moe = MoeConfig(
        num_experts=8,
        top_k=3,
        ffn_dim=24,
        shared_ffn_dim=48,
        shared_gate=True,
        first_dense=1,
        router="sigmoid",
        score_bias=True,
    )
    model = _decoder(128, 32, 3, 80, 4, moe=moe)
    leaves = jax.tree.leaves(unbox(abstract_params(model)))
    assert count_params(model) == sum(leaf.size for leaf in leaves)
    dense, expert = 3 * 32 * 80, 3 * 32 * 24
    shared = 3 * 32 * 48 + 32
    used = 3 * 4 * 32 * 32 + dense + 2 * (3 * expert + shared) + 128 * 32
    attention = 6 * 16 * 32 * 3  # 6 * T * N * H in each layer
    assert flops_per_token(model, 16) == 6 * used + attention


@pytest.mark.parametrize("q_rank", [0, 20])
def test_latent_attention_is_counted_as_built(q_rank):
    mla = MlaConfig(kv_rank=10, q_rank=q_rank, nope_dim=6, rope_dim=4, value_dim=8)
    attention = AttentionConfig(num_heads=4, mla=mla)
    model = ModelConfig(vocab_size=128, embed_dim=32, num_layers=3, ffn_dim=80, attention=attention)
    leaves = jax.tree.leaves(unbox(abstract_params(model)))
    assert count_params(model) == sum(leaf.size for leaf in leaves)
    queries = 32 * 20 + 20 + 20 * 4 * 10 if q_rank else 32 * 4 * 10
    keys_and_values = 32 * (10 + 4) + 10 + 10 * 4 * (6 + 8)
    used = 3 * (queries + keys_and_values + 4 * 8 * 32 + 3 * 32 * 80) + 128 * 32
    # 3 * T * N * (widths of keys and values) in each layer.
    assert flops_per_token(model, 16) == 6 * used + 3 * 3 * 16 * 4 * (10 + 8)
