"""The tiny Hugging Face models that goldens are made of: one of each family and feature."""

from dataclasses import dataclass
from typing import Any

VOCAB = 128

LINEAR_LAYOUT = "torch Linear: [out, in]"
CONV1D_LAYOUT = "Conv1D: attention and MLP matrices are [in, out]; embeddings [rows, embed]"


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One golden: the config class and arguments, and what to switch off to see it matter."""

    config_class: str
    config: dict[str, Any]
    # Config overrides that each must change the logits; proves that the feature is exercised.
    ablations: tuple[dict[str, Any], ...]
    param_layout: str = LINEAR_LAYOUT
    # Gemma multiplies by (1 + w), so its norm weights are centred on zero.
    norm_center: float = 1.0
    # Endings of the names of parameters and buffers that, set to zero, must change the logits too.
    zeroed: tuple[str, ...] = ()


LLAMA_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SMALL_SHAPE = {**LLAMA_SHAPE, "hidden_size": 32, "intermediate_size": 40, "head_dim": 8}
# The norms of latents have an epsilon of 1e-6 in transformers, whatever rms_norm_eps says.
LATENT_SHAPE = {
    **{k: v for k, v in SMALL_SHAPE.items() if k != "head_dim"},
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
# The ramp runs from frequency 0.83 to 1.83 of four.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 0.75,
    "beta_slow": 0.075,
    "truncate": False,
}
ROUTER_BIAS = "e_score_correction_bias"

GOLDENS = {
    # Wavelengths at theta 1e4, head dim 16: 6.3, 19.9, 62.8, ... tokens. With an original length
    # of 32 these are one kept, one interpolated and six scaled frequencies: every branch.
    "llama": Golden(
        config_class="LlamaConfig",
        config=dict(
            **LLAMA_SHAPE,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        ablations=({"rope_parameters": PLAIN_ROPE}, {"rms_norm_eps": 1e-1}),
    ),
    "llama_linear_rope": Golden(
        config_class="LlamaConfig",
        config=dict(
            **{**LLAMA_SHAPE, "num_hidden_layers": 1},
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        ablations=({"rope_parameters": PLAIN_ROPE},),
    ),
    "mistral_yarn": Golden(
        config_class="MistralConfig",
        config=dict(
            **{**LLAMA_SHAPE, "num_hidden_layers": 1},
            tie_word_embeddings=False,
            sliding_window=None,
            rope_parameters=YARN_ROPE,
        ),
        ablations=({"rope_parameters": PLAIN_ROPE},),
    ),
    "qwen3": Golden(
        config_class="Qwen3Config",
        # 4 heads of 16 on an embedding of 48: the head dim is not embed / heads.
        config=dict(
            **{**LLAMA_SHAPE, "hidden_size": 48, "num_hidden_layers": 3, "rms_norm_eps": 1e-6},
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
        ablations=({"rope_parameters": PLAIN_ROPE},),
    ),
    "gpt2": Golden(
        config_class="GPT2Config",
        config={
            "vocab_size": VOCAB,
            "n_positions": 32,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        ablations=({"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-1}),
        param_layout=CONV1D_LAYOUT,
    ),
    "gemma2": Golden(
        config_class="Gemma2Config",
        config={
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "rope_parameters": PLAIN_ROPE,
        },
        ablations=(
            {"sliding_window": 64},
            {"query_pre_attn_scalar": 16},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"hidden_activation": "gelu"},
        ),
        norm_center=0.0,
    ),
    "mixtral": Golden(
        config_class="MixtralConfig",
        config=dict(
            **SMALL_SHAPE,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            rope_parameters=PLAIN_ROPE,
        ),
        ablations=({"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}),
    ),
    # Weights of the chosen experts as they are, a gated shared expert, every second layer dense.
    "qwen2_moe": Golden(
        config_class="Qwen2MoeConfig",
        config=dict(
            **SMALL_SHAPE,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            tie_word_embeddings=False,
            rope_parameters=PLAIN_ROPE,
        ),
        ablations=({"norm_topk_prob": True},),
    ),
    "qwen3_moe": Golden(
        config_class="Qwen3MoeConfig",
        config=dict(
            **SMALL_SHAPE,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            rope_parameters=PLAIN_ROPE,
        ),
        ablations=({"norm_topk_prob": False}, {"num_experts_per_tok": 2}),
    ),
    # The router of DeepSeek-V3 without its attention: sigmoid scores, groups, bias, scale, a
    # shared expert, the first layer dense.
    "dots1": Golden(
        config_class="Dots1Config",
        config=dict(
            **{**SMALL_SHAPE, "num_hidden_layers": 3},
            moe_intermediate_size=20,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            tie_word_embeddings=False,
            rope_parameters=PLAIN_ROPE,
        ),
        ablations=(
            {"norm_topk_prob": False},
            {"topk_group": 4},
            {"routed_scaling_factor": 1.0},
            {"num_experts_per_tok": 2},
        ),
        zeroed=(ROUTER_BIAS,),
    ),
    # Attention sinks, windows in every second layer, biases of experts and router, SwiGLU clamped
    # (at values that occur here), YaRN whose ramp keeps its fractional ends.
    "gpt_oss": Golden(
        config_class="GptOssConfig",
        config=dict(
            **{**SMALL_SHAPE, "intermediate_size": 20},
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=5,
            swiglu_limit=1.0,
            tie_word_embeddings=False,
            pad_token_id=0,
            rope_parameters=GPT_OSS_ROPE,
        ),
        ablations=(
            {"sliding_window": 64},
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 3},
            {"rope_parameters": PLAIN_ROPE},
            {"rope_parameters": {**GPT_OSS_ROPE, "truncate": True}},
        ),
        zeroed=(
            "sinks",
            "router.bias",
            "gate_up_proj_bias",
            "down_proj_bias",
            "q_proj.bias",
            "o_proj.bias",
        ),
    ),
    # DeepSeek's mscale and mscale_all_dim are equal, so that the first drops out: not here.
    "deepseek_v3": Golden(
        config_class="DeepseekV3Config",
        config=dict(
            **LATENT_SHAPE,
            q_lora_rank=24,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            num_mtp_layers=0,
            rope_parameters={**YARN_ROPE, "mscale": 1.5, "mscale_all_dim": 0.8},
        ),
        ablations=(
            {"norm_topk_prob": False},
            {"topk_group": 4},
            {"routed_scaling_factor": 1.0},
            {"rope_interleave": False},
            {"rope_parameters": PLAIN_ROPE},
            {"rope_parameters": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.8}},
            {"rope_parameters": {**YARN_ROPE, "mscale": 1.5}},
        ),
        zeroed=(ROUTER_BIAS,),
    ),
    # Two modules behind one layer. They are part of the loss, not of the logits.
    "deepseek_v3_mtp": Golden(
        config_class="DeepseekV3Config",
        config=dict(
            **{**LATENT_SHAPE, "num_hidden_layers": 1, "first_k_dense_replace": 0},
            q_lora_rank=24,
            routed_scaling_factor=2.5,
            num_mtp_layers=2,
            rope_parameters=PLAIN_ROPE,
        ),
        ablations=({"routed_scaling_factor": 1.0},),
        zeroed=(ROUTER_BIAS,),
    ),
    # V2-Lite has no latent of queries, V2 has groups: both here.
    "deepseek_v2": Golden(
        config_class="DeepseekV2Config",
        config=dict(
            **LATENT_SHAPE,
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            norm_topk_prob=False,
            routed_scaling_factor=3.0,
            rope_parameters={**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        ablations=(
            {"topk_method": "greedy"},
            {"routed_scaling_factor": 1.0},
            {"rope_parameters": PLAIN_ROPE},
            {"rope_parameters": YARN_ROPE},
        ),
    ),
}
