"""Writes hf_<name>.npz: tiny random Hugging Face models with logits, loss and all gradients.

The goldens are the independent reference of our models and their Hugging Face adapters. They are
made once and committed; tests only read them, so torch and transformers are not needed to test.

    python tests/golden/make_hf_goldens.py [name ...]     # torch CPU, transformers >= 5

Reference: transformers with eager attention, float32, evaluation mode. Every parameter is drawn
from a fixed seed, norms and biases included (a norm weight of one or a bias of zero would hide a
missing multiplication), and rounded to float16 so that the file can store two bytes per value and
still be exact. Frequencies, windows and soft caps are scaled down so that each of them changes the
result at 24 tokens; `describe` prints that it does. A sliding window W means W keys, the query's
own included.

Keys of each file (read with `numpy.load(path)`, no pickle):
    config          JSON string, `config.to_dict()` of the Hugging Face config
    meta            JSON string: name, versions, seed, tied, absent_params (names that the tied
                    model leaves out), param_layout, loss
    input_ids       int32   [B=2, T=24]
    logits          float32 [B, T, V=128]
    loss            float32 [], mean over B*(T-1) of the cross-entropy of token t+1 given t; with
                    multi-token prediction, plus MTP_WEIGHT times the mean over its modules k of
                    the mean over B*(T-1-k) of that of token t+1+k
    param/<name>    float16 (exact in float32), name and layout as Hugging Face has them
                    buffers that a router adds to its scores included
    grad/<name>     float32, d loss / d param, same names and shapes; not of buffers
    balance         float32 [experts' layers], only with experts and a router that transformers
                    gives the logits of: its load-balancing loss, of each layer by itself
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
SEED = 20240607
BATCH, SEQ_LEN, VOCAB = 2, 24, 128
MAX_FILE_BYTES = 1_000_000
MTP_WEIGHT = 0.3

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


def build_model(golden: Golden, overrides: dict[str, Any] | None = None) -> torch.nn.Module:
    """The model in float32, evaluation mode, eager attention, parameters still arbitrary.

    What transformers would load as its modules of multi-token prediction is its part "mtp".
    """
    config = getattr(transformers, golden.config_class)(**{**golden.config, **(overrides or {})})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    if golden.config.get("num_mtp_layers"):
        model.mtp = MtpModel(model, golden.config["num_mtp_layers"])
    return model.eval()


def draw_params(model: torch.nn.Module, norm_center: float) -> dict[str, np.ndarray]:
    """float16 values for every distinct parameter (a tied head appears once, as the embedding)."""
    rng = np.random.default_rng(SEED)
    params = {}
    for name, param in model.named_parameters():
        shape = tuple(param.shape)
        noise = rng.standard_normal(shape)
        is_norm = len(shape) == 1 and name.endswith("weight")
        # 0.2 is 1.6/sqrt(64) for matrices: activations near one, attention far from uniform.
        value = norm_center + 0.3 * noise if is_norm else 0.2 * noise
        params[name] = value.astype(np.float16)
    for name, buffer in router_biases(model).items():
        params[name] = (0.2 * rng.standard_normal(tuple(buffer.shape))).astype(np.float16)
    return params


def router_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that routers add to scores, which transformers leaves at zero."""
    return {name: b for name, b in model.named_buffers() if name.endswith(ROUTER_BIAS)}


def load_params(model: torch.nn.Module, params: dict[str, np.ndarray]) -> None:
    """Copies the drawn values in; every parameter must be given."""
    with torch.no_grad():
        for name, param in [*model.named_parameters(), *router_biases(model).items()]:
            param.copy_(torch.from_numpy(params[name].astype(np.float32)))


def draw_ids() -> torch.Tensor:
    """int64 [B, T] uniform token ids."""
    return torch.from_numpy(np.random.default_rng(SEED + 1).integers(0, VOCAB, (BATCH, SEQ_LEN)))


def forward(model: torch.nn.Module, ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [B, T, V] and the mean next-token cross-entropy, [], in nats."""
    out = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    loss = cross_entropy(out.logits, ids_BT, 1)
    if hasattr(model, "mtp"):
        loss = loss + MTP_WEIGHT * mtp_loss(model, ids_BT, out.hidden_states[-1])
    return out.logits, loss


def cross_entropy(logits_BTV: torch.Tensor, ids_BT: torch.Tensor, places: int) -> torch.Tensor:
    """Mean over the positions that have a token so many places ahead."""
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-places].reshape(-1, VOCAB), ids_BT[:, places:].reshape(-1)
    )


def mtp_loss(model: torch.nn.Module, ids_BT: torch.Tensor, h_BTD: torch.Tensor) -> torch.Tensor:
    """Mean of the losses of the modules, each on the positions that have a target for it."""
    losses = []
    for k, layer in enumerate(model.mtp.layers, start=1):
        # Module k stands at the positions of the tokens it reads, k further than the first one's.
        ids, h_BTD = ids_BT[:, k:], h_BTD[:, : ids_BT.shape[1] - k]
        length = ids.shape[1]
        positions = torch.arange(k, k + length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        h_BTD = layer(
            inputs_embeds=model.get_input_embeddings()(ids),
            previous_hidden_state=h_BTD,
            position_embeddings=model.model.rotary_emb(h_BTD, position_ids=positions),
            attention_mask=mask,
            position_ids=positions,
            cache=None,
        )
        losses.append(cross_entropy(model.lm_head(h_BTD), ids, 1))
    return sum(losses) / len(losses)


def ablation_effects(golden: Golden, params, ids_BT, logits_BTV) -> dict[str, float]:
    """Largest change of a logit per ablation; raises when one has no visible effect."""
    effects = {}
    cases = [(", ".join(overrides), overrides, params) for overrides in golden.ablations]
    for name in golden.zeroed:
        without = {n: v * 0 if n.endswith(name) else v for n, v in params.items()}
        cases.append((name, {}, without))
    for what, overrides, values in cases:
        model = build_model(golden, overrides)
        load_params(model, values)
        with torch.no_grad():
            changed_BTV, _ = forward(model, ids_BT)
        effect = float((changed_BTV - logits_BTV).abs().max())
        # Exact instead of tanh gelu moves them by about 1e-3, everything else by more than 0.1.
        if effect < 1e-4:
            raise ValueError(f"{what} changes the logits by {effect:.1e} only: not exercised")
        effects[what] = effect
    return effects


def balance_losses(model: torch.nn.Module, ids_BT: torch.Tensor) -> dict[str, np.ndarray]:
    """transformers' load-balancing loss of each layer with experts; nothing for other models."""
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "load_balancing_loss_func"):
        return {}
    config = model.config
    with torch.no_grad():
        logits = model(input_ids=ids_BT, use_cache=False, output_router_logits=True).router_logits
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    losses = [
        module.load_balancing_loss_func((layer,), experts, config.num_experts_per_tok)
        for layer in logits
    ]
    return {"balance": np.array([float(x) for x in losses], np.float32)}


def make(name: str) -> None:
    """Writes hf_<name>.npz next to this file. ValueError if it is not a golden to rely on."""
    golden = GOLDENS[name]
    model = build_model(golden)
    params = draw_params(model, golden.norm_center)
    load_params(model, params)
    ids_BT = draw_ids()
    logits_BTV, loss = forward(model, ids_BT)
    loss.backward()
    grads = {n: p.grad.numpy().astype(np.float32) for n, p in model.named_parameters()}
    for param_name, grad in grads.items():
        if not np.isfinite(grad).all() or not np.abs(grad).max() > 0:
            raise ValueError(f"{name}: the gradient of {param_name} is zero or not finite")
    effects = ablation_effects(golden, params, ids_BT, logits_BTV.detach())
    meta = {
        "name": name,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "seed": SEED,
        "tied": bool(model.config.tie_word_embeddings),
        "absent_params": sorted(set(model.state_dict()) - set(params)),
        "param_layout": golden.param_layout,
        "loss": "mean over B*(T-1) of the next-token cross-entropy, nats",
    }
    path = HERE / f"hf_{name}.npz"
    np.savez_compressed(
        path,
        config=np.array(json.dumps(model.config.to_dict(), sort_keys=True)),
        meta=np.array(json.dumps(meta, sort_keys=True)),
        input_ids=ids_BT.numpy().astype(np.int32),
        logits=logits_BTV.detach().numpy(),
        loss=loss.detach().numpy(),
        **balance_losses(model, ids_BT),
        **{f"param/{n}": v for n, v in params.items()},
        **{f"grad/{n}": v for n, v in grads.items()},
    )
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.name}: got {path.stat().st_size} bytes, limit {MAX_FILE_BYTES}")
    describe(path, meta, loss.item(), sum(v.size for v in params.values()), effects)


def describe(path: Path, meta: dict, loss: float, num_params: int, effects: dict) -> None:
    """Prints what was written, and how much each ablation moves the logits."""
    print(f"{path.name}: {path.stat().st_size} bytes, {num_params} params, loss {loss:.6f}")
    print(f"  absent: {meta['absent_params']}")
    for what, effect in effects.items():
        print(f"  without {what}: logits move by {effect:.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for golden_name in sys.argv[1:] or GOLDENS:
        make(golden_name)
