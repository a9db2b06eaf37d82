"""Shapes of published models. Each function gives the unpadded, published architecture."""

import dataclasses

from mtjax.config.mla import MlaConfig
from mtjax.config.model import AttentionConfig, ModelConfig, RopeConfig
from mtjax.config.moe import MoeConfig
from mtjax.config.mtp import MtpConfig


def gpt2_124m(dropout: float = 0.0) -> ModelConfig:
    """GPT-2 small (Radford et al. 2019): 124,439,808 parameters."""
    return _gpt(layers=12, embed=768, heads=12, vocab=50257, positions=1024, dropout=dropout)


def gpt3_175b() -> ModelConfig:
    """GPT-3 175B (Brown et al. 2020, arXiv 2005.14165, table 2.1)."""
    return _gpt(layers=96, embed=12288, heads=96, vocab=50257, positions=2048, dropout=0.0)


def llama2_7b() -> ModelConfig:
    """Llama 2 7B (Touvron et al. 2023, arXiv 2307.09288): 6,738,415,616 parameters."""
    return _llama(layers=32, embed=4096, ffn=11008, heads=32, kv_heads=32, vocab=32000, theta=1e4)


def llama3_8b() -> ModelConfig:
    """Llama 3 8B (arXiv 2407.21783, table 3): 8,030,261,248 parameters."""
    return _llama(layers=32, embed=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, theta=5e5)


def llama3_70b() -> ModelConfig:
    """Llama 3 70B (arXiv 2407.21783, table 3): 70,553,706,496 parameters."""
    return _llama(layers=80, embed=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, theta=5e5)


def _gpt(
    *, layers: int, embed: int, heads: int, vocab: int, positions: int, dropout: float
) -> ModelConfig:
    """GPT-2 and GPT-3: LayerNorm, tanh GELU, learned positions, biases, tied embeddings."""
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        num_layers=layers,
        ffn_dim=4 * embed,
        attention=AttentionConfig(num_heads=heads, qkv_bias=True, out_bias=True, dropout=dropout),
        position="learned",
        max_positions=positions,
        norm="layernorm",
        activation="gelu",
        mlp_bias=True,
        tied_embeddings=True,
        dropout=dropout,
    )


def _llama(
    *, layers: int, embed: int, ffn: int, heads: int, kv_heads: int, vocab: int, theta: float
) -> ModelConfig:
    """Llama: RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases, untied."""
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        num_layers=layers,
        ffn_dim=ffn,
        attention=AttentionConfig(num_heads=heads, num_kv_heads=kv_heads),
        rope=RopeConfig(theta=theta),
    )


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B (Jiang et al. 2024, arXiv 2401.04088): 46,702,792,704 parameters."""
    return _mixtral(layers=32, embed=4096, ffn=14336, heads=32)


def mixtral_8x22b() -> ModelConfig:
    """Mixtral 8x22B (Mistral AI, April 2024): 140.6 B parameters, 39.2 B active."""
    return _mixtral(layers=56, embed=6144, ffn=16384, heads=48)


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B (arXiv 2505.09388, table 2): 30,532,122,624 parameters, 3.4 B active."""
    return ModelConfig(
        vocab_size=151936,
        embed_dim=2048,
        num_layers=48,
        ffn_dim=768,
        moe=MoeConfig(num_experts=128, top_k=8, balance_coefficient=1e-3, capacity_factor=1.5),
        attention=AttentionConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
        rope=RopeConfig(theta=1e6),
        norm_epsilon=1e-6,
    )


def deepseek_v2_lite() -> ModelConfig:
    """DeepSeek-V2-Lite (arXiv 2405.04434, appendix B): 15,706,484,224 parameters, 2.7 B active."""
    moe = MoeConfig(
        num_experts=64,
        top_k=6,
        ffn_dim=1408,
        shared_ffn_dim=2 * 1408,
        first_dense=1,
        renormalize=False,
        balance_coefficient=1e-3,
        balance_scope="sequence",
        capacity_factor=1.5,
    )
    return _deepseek(
        layers=27, embed=2048, ffn=10944, heads=16, vocab=102400, q_rank=0, mscale=0.707, moe=moe
    )


def deepseek_v2() -> ModelConfig:
    """DeepSeek-V2 (arXiv 2405.04434, section 3.1.2): 235,741,434,880 parameters, 21.4 B active."""
    moe = MoeConfig(
        num_experts=160,
        top_k=6,
        ffn_dim=1536,
        shared_ffn_dim=2 * 1536,
        first_dense=1,
        renormalize=False,
        routed_scale=16.0,
        num_groups=8,
        top_groups=3,
        balance_coefficient=3e-3,
        balance_scope="sequence",
        device_groups=8,
        device_balance_coefficient=0.05,
        capacity_factor=1.5,
    )
    return _deepseek(
        layers=60, embed=5120, ffn=12288, heads=128, vocab=102400, q_rank=1536, mscale=0.707,
        moe=moe,
    )  # fmt: skip


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3 (arXiv 2412.19437, section 4.2): 671,026,419,200 parameters, 37.5 B active; and
    11.6 B of multi-token prediction."""
    moe = MoeConfig(
        num_experts=256,
        top_k=8,
        ffn_dim=2048,
        shared_ffn_dim=2048,
        first_dense=3,
        router="sigmoid",
        routed_scale=2.5,
        num_groups=8,
        top_groups=4,
        score_bias=True,
        bias_update_rate=1e-3,
        balance_coefficient=1e-4,
        balance_scope="sequence",
        capacity_factor=1.5,
    )
    dense = _deepseek(
        layers=61, embed=7168, ffn=18432, heads=128, vocab=129280, q_rank=1536, mscale=1.0, moe=moe
    )
    return dataclasses.replace(dense, mtp=MtpConfig(depth=1, coefficient=0.3))


def _deepseek(
    *,
    layers: int,
    embed: int,
    ffn: int,
    heads: int,
    vocab: int,
    q_rank: int,
    mscale: float,
    moe: MoeConfig,
) -> ModelConfig:
    """DeepSeek-V2 and V3: latent attention, experts above the first layers, YaRN from 4096 tokens
    to 163840, all weights of standard deviation 0.006 at the start."""
    mla = MlaConfig(kv_rank=512, q_rank=q_rank, nope_dim=128, rope_dim=64, value_dim=128)
    return ModelConfig(
        vocab_size=vocab,
        embed_dim=embed,
        num_layers=layers,
        ffn_dim=ffn,
        moe=moe,
        attention=AttentionConfig(num_heads=heads, mla=mla),
        rope=RopeConfig(
            scaling="yarn",
            factor=40.0,
            original_max_positions=4096,
            mscale=mscale,
            mscale_all_dim=mscale,
        ),
        norm_epsilon=1e-6,
        init_std=0.006,
    )


def without_yarn(model: ModelConfig) -> ModelConfig:
    """The model as it is trained before its context is extended."""
    return dataclasses.replace(model, rope=RopeConfig(theta=model.rope.theta))


def gpt_oss_20b() -> ModelConfig:
    """gpt-oss-20b (OpenAI 2025, arXiv 2508.10925): 20,914,757,184 parameters, 3.6 B active."""
    return ModelConfig(
        vocab_size=201088,
        embed_dim=2880,
        num_layers=24,
        ffn_dim=2880,
        moe=MoeConfig(
            num_experts=32,
            top_k=4,
            router="softmax_after_topk",
            router_bias=True,
            balance_coefficient=1e-3,
            capacity_factor=1.5,
        ),
        attention=AttentionConfig(
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            qkv_bias=True,
            out_bias=True,
            sinks=True,
            windows=(128, 0),
        ),
        rope=RopeConfig(
            theta=150_000.0,
            scaling="yarn",
            factor=32.0,
            original_max_positions=4096,
            truncate=False,
        ),
        activation="clamped_swiglu",
        mlp_bias=True,
    )


def _mixtral(*, layers: int, embed: int, ffn: int, heads: int) -> ModelConfig:
    """Mixtral: Llama with 8 experts, of which a token uses 2, and balanced loads."""
    dense = _llama(
        layers=layers, embed=embed, ffn=ffn, heads=heads, kv_heads=8, vocab=32000, theta=1e6
    )
    return dataclasses.replace(
        dense, moe=MoeConfig(num_experts=8, top_k=2, balance_coefficient=0.01)
    )
