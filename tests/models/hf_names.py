"""Hugging Face names and layouts of our parameters, for comparison with the goldens."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mtjax.config import (
    AttentionConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    RopeConfig,
)
from mtjax.models.decoder import block_groups


def model_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Our config of a Hugging Face one."""
    if config["model_type"] == "gpt2":
        return ModelConfig(
            vocab_size=config["vocab_size"],
            embed_dim=config["n_embd"],
            num_layers=config["n_layer"],
            ffn_dim=4 * config["n_embd"],
            attention=AttentionConfig(
                num_heads=config["n_head"], qkv_bias=True, out_bias=True, backend="xla"
            ),
            position="learned",
            max_positions=config["n_positions"],
            norm="layernorm",
            norm_epsilon=config["layer_norm_epsilon"],
            activation="gelu",
            mlp_bias=True,
            tied_embeddings=True,
        )
    gemma, oss = (config["model_type"] == kind for kind in ("gemma2", "gpt_oss"))
    biased = config.get("qkv_bias", False) or config.get("attention_bias", False)
    moe, ffn_dim = _moe(config)
    mla = _mla(config)
    modules = config.get("num_nextn_predict_layers", 0)
    return ModelConfig(
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        ffn_dim=ffn_dim,
        moe=moe,
        mtp=MtpConfig(depth=modules),
        attention=AttentionConfig(
            num_heads=config["num_attention_heads"],
            num_kv_heads=None if mla.kv_rank else config["num_key_value_heads"],
            head_dim=None if mla.kv_rank else config["head_dim"],
            mla=mla,
            qk_norm=config["model_type"] in ("qwen3", "qwen3_moe", "dots1"),
            qkv_bias=biased,
            out_bias=oss,
            sinks=oss,
            windows=(config["sliding_window"], 0) if gemma or oss else (),
            logit_softcap=config.get("attn_logit_softcapping"),
            scale=config["query_pre_attn_scalar"] ** -0.5 if gemma else None,
            backend="xla",
        ),
        rope=_rope(config["rope_parameters"]),
        norm_epsilon=config["rms_norm_eps"],
        norm_unit_offset=gemma,
        post_norm=gemma,
        activation="geglu" if gemma else "clamped_swiglu" if oss else "swiglu",
        activation_clamp=config.get("swiglu_limit", 7.0),
        mlp_bias=oss,
        tied_embeddings=config["tie_word_embeddings"],
        embed_scale=gemma,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def _moe(config: dict[str, Any]) -> tuple[MoeConfig, int]:
    """Experts, with room for every token, and the model's feed-forward width."""
    kind, ffn_dim = config["model_type"], config["intermediate_size"]
    kinds = ("mixtral", "qwen2_moe", "qwen3_moe", "dots1", "deepseek_v2", "deepseek_v3", "gpt_oss")
    if kind not in kinds:
        return MoeConfig(), ffn_dim
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(config[name] for name in names if name in config)
    common: dict[str, Any] = {
        "num_experts": experts,
        "top_k": config["num_experts_per_tok"],
        "renormalize": config.get("norm_topk_prob", True),
        "capacity_factor": float(experts),
    }
    if kind == "mixtral":
        return MoeConfig(**common), ffn_dim
    if kind == "gpt_oss":
        return MoeConfig(router="softmax_after_topk", router_bias=True, **common), ffn_dim
    width = config["moe_intermediate_size"]
    if kind == "qwen3_moe":
        return MoeConfig(**common), width
    if kind == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        every = config["decoder_sparse_step"]
        return (
            MoeConfig(
                ffn_dim=width, shared_ffn_dim=shared, shared_gate=True, every=every, **common
            ),
            ffn_dim,
        )
    first_dense = config["first_k_dense_replace"]
    moe = MoeConfig(
        ffn_dim=width if first_dense else None,
        shared_ffn_dim=width * config["n_shared_experts"],
        first_dense=first_dense,
        router="softmax" if kind == "deepseek_v2" else "sigmoid",
        score_bias=kind != "deepseek_v2",
        num_groups=config["n_group"],
        top_groups=config["topk_group"],
        routed_scale=config["routed_scaling_factor"],
        **common,
    )
    return moe, ffn_dim if first_dense else width


def _mla(config: dict[str, Any]) -> MlaConfig:
    if "kv_lora_rank" not in config:
        return MlaConfig()
    return MlaConfig(
        kv_rank=config["kv_lora_rank"],
        q_rank=config["q_lora_rank"] or 0,
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )


def _rope(rope: dict[str, Any]) -> RopeConfig:
    kind = rope["rope_type"]
    if kind == "default":
        return RopeConfig(theta=rope["rope_theta"])
    names = ("factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
    return RopeConfig(
        theta=rope["rope_theta"],
        scaling=kind,
        original_max_positions=rope.get("original_max_position_embeddings", 8192),
        **{name: rope[name] for name in names if name in rope},
    )


Leaf = tuple[str, Callable[[np.ndarray], np.ndarray]]


def hf_tree(model: ModelConfig, hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """Tensors under Hugging Face names (weights or gradients), as our tree."""
    leaves = _gpt2_leaves if hf["model_type"] == "gpt2" else _llama_leaves
    top, dense = leaves(model, hf)
    with_experts = _with_experts(model, hf, dense)
    blocks: dict[str, Any] = {}
    for i, group in enumerate(block_groups(model)):
        units = {}
        for position, spec in enumerate(group.unit):
            block = with_experts if spec.experts else dense
            layers = [group.layer_index(r, position) for r in range(group.repeat)]
            per_layer = [
                {path: convert(tensors[name.format(layer)]) for path, (name, convert) in
                 block.items()}
                for layer in layers
            ]  # fmt: skip
            stacked = {path: np.stack([p[path] for p in per_layer]) for path in block}
            units[f"block{position}"] = _nest(stacked)
        blocks[f"group{i}"] = units
    flat = {path: convert(tensors[name]) for path, (name, convert) in top.items()}
    tree = _nest(flat) | {"blocks": blocks}
    if model.mtp.depth:
        tree["mtp"] = _mtp_tree(model, with_experts, tensors)
    return tree


def _mtp_tree(model: ModelConfig, block: dict[str, Leaf], tensors: dict[str, np.ndarray]) -> Any:
    module, D = "mtp.layers.{}.", model.embed_dim
    leaves: dict[str, Leaf] = {
        "embedding_norm.scale": (module + "enorm.weight", _same),
        "hidden_norm.scale": (module + "hnorm.weight", _same),
        "norm.scale": (module + "post_norm.weight", _same),
        # [D, 2D], the embedding first.
        "embedding.kernel": (module + "eh_proj.weight", lambda x: x[:, :D].T),
        "hidden.kernel": (module + "eh_proj.weight", lambda x: x[:, D:].T),
    }
    for path, (name, convert) in block.items():
        name = name.replace("model.layers.{}.", module + "mtp_block.")
        leaves[f"block.{path}"] = (name, convert)
    depths = range(model.mtp.depth)
    return _nest(
        {
            path: np.stack([convert(tensors[name.format(k)]) for k in depths])
            for path, (name, convert) in leaves.items()
        }
    )


def _nest(flat: dict[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.T


def _llama_leaves(model: ModelConfig, hf: dict[str, Any]) -> tuple[dict, dict]:
    H, D = model.head_dim, model.embed_dim

    def to_heads(x: np.ndarray) -> np.ndarray:  # [N*H, D] -> [D, N, H]
        return x.T.reshape(D, -1, H)

    attn, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    block: dict[str, Leaf] = {
        "attention.query.kernel": (attn + "q_proj.weight", to_heads),
        "attention.key.kernel": (attn + "k_proj.weight", to_heads),
        "attention.value.kernel": (attn + "v_proj.weight", to_heads),
        "attention.out.kernel": (
            attn + "o_proj.weight",
            lambda x: x.T.reshape(-1, model.value_dim, D),
        ),
        "mlp.gate.kernel": (mlp + "gate_proj.weight", _transposed),
        "mlp.up.kernel": (mlp + "up_proj.weight", _transposed),
        "mlp.down.kernel": (mlp + "down_proj.weight", _transposed),
        "attention_norm.scale": ("model.layers.{}.input_layernorm.weight", _same),
    }
    post = "model.layers.{}.post_attention_layernorm.weight"
    if model.post_norm:
        block["attention_post_norm.scale"] = (post, _same)
        ffn = "model.layers.{}.%s_feedforward_layernorm.weight"
        block["mlp_norm.scale"] = (ffn % "pre", _same)
        block["mlp_post_norm.scale"] = (ffn % "post", _same)
    else:
        block["mlp_norm.scale"] = (post, _same)
    if model.attention.qk_norm:
        block["attention.query_norm.scale"] = (attn + "q_norm.weight", _same)
        block["attention.key_norm.scale"] = (attn + "k_norm.weight", _same)
    if model.attention.mla.kv_rank:
        for part in ("query", "key", "value"):
            del block[f"attention.{part}.kernel"]
        block |= _latent_leaves(model, attn)
    if model.attention.qkv_bias:
        for part in ("query", "key", "value"):
            bias = f"{attn}{part[0]}_proj.bias"
            block[f"attention.{part}.bias"] = (bias, lambda x: x.reshape(-1, H))
    if model.attention.out_bias:
        block["attention.out.bias"] = (attn + "o_proj.bias", _same)
    if model.attention.sinks:
        block["attention.sinks"] = (attn + "sinks", _same)
    top: dict[str, Leaf] = {
        "embed.embedding": ("model.embed_tokens.weight", _same),
        "head.norm.scale": ("model.norm.weight", _same),
    }
    if not model.tied_embeddings:
        top["head.kernel"] = ("lm_head.weight", _same)
    return top, block


def _latent_leaves(model: ModelConfig, attn: str) -> dict[str, Leaf]:
    """DeepSeek rotates pairs (2i, 2i + 1) where we rotate (i, i + H/2)."""
    mla, N = model.attention.mla, model.attention.num_heads
    halves = np.concatenate([np.arange(0, mla.rope_dim, 2), np.arange(1, mla.rope_dim, 2)])

    def to_query(x: np.ndarray) -> np.ndarray:  # [N * (nope + rope), R] -> [R, N, nope + rope]
        heads = x.T.reshape(-1, N, model.head_dim)
        nope, rope = np.split(heads, (mla.nope_dim,), axis=-1)
        return np.concatenate([nope, rope[..., halves]], axis=-1)

    def from_latent(x: np.ndarray, part: int) -> np.ndarray:  # [N * (nope + value), R]
        heads = x.T.reshape(-1, N, mla.nope_dim + mla.value_dim)
        return np.split(heads, (mla.nope_dim,), axis=-1)[part]

    down = attn + "kv_a_proj_with_mqa.weight"
    query = "q_b_proj" if mla.q_rank else "q_proj"
    leaves: dict[str, Leaf] = {
        "attention.query.kernel": (f"{attn}{query}.weight", to_query),
        "attention.kv_down.kernel": (down, lambda x: x[: mla.kv_rank].T),
        "attention.kv_norm.scale": (attn + "kv_a_layernorm.weight", _same),
        "attention.key_rope.kernel": (down, lambda x: x[mla.kv_rank :][halves].T),
        "attention.key": (attn + "kv_b_proj.weight", lambda x: from_latent(x, 0)),
        "attention.value": (attn + "kv_b_proj.weight", lambda x: from_latent(x, 1)),
    }
    if mla.q_rank:
        leaves["attention.query_down.kernel"] = (attn + "q_a_proj.weight", _transposed)
        leaves["attention.query_norm.scale"] = (attn + "q_a_layernorm.weight", _same)
    return leaves


def _with_experts(
    model: ModelConfig, hf: dict[str, Any], dense: dict[str, Leaf]
) -> dict[str, Leaf]:
    """Leaves of a block with experts: transformers fuses gate and up, [E, 2F, D]."""
    F, mlp = model.expert_dim, "model.layers.{}.mlp."
    if hf["model_type"] == "gpt_oss":
        return _gpt_oss_experts(dense)
    fused = mlp + "experts.gate_up_proj"

    def swapped(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x, 1, 2)

    block = {path: leaf for path, leaf in dense.items() if not path.startswith("mlp.")} | {
        "moe.router.kernel": (mlp + "gate.weight", _transposed),
        "moe.gate": (fused, lambda x: swapped(x[:, :F])),
        "moe.up": (fused, lambda x: swapped(x[:, F:])),
        "moe.down": (mlp + "experts.down_proj", swapped),
    }
    if model.moe.score_bias:
        block["moe.router.bias"] = (mlp + "gate.e_score_correction_bias", _same)
    if model.moe.shared_ffn_dim:
        shared = mlp + ("shared_expert" if hf["model_type"] == "qwen2_moe" else "shared_experts")
        for part in ("gate", "up", "down"):
            block[f"moe.shared.{part}.kernel"] = (f"{shared}.{part}_proj.weight", _transposed)
    if model.moe.shared_gate:
        block["moe.shared_gate.kernel"] = (mlp + "shared_expert_gate.weight", _transposed)
    return block


def _gpt_oss_experts(dense: dict[str, Leaf]) -> dict[str, Leaf]:
    """Leaves of a block of GPT-OSS: gate and up alternate in [E, D, 2F], and all have biases."""
    mlp = "model.layers.{}.mlp."
    block = {path: leaf for path, leaf in dense.items() if not path.startswith("mlp.")} | {
        "moe.router.kernel": (mlp + "router.weight", _transposed),
        "moe.router.logit_bias": (mlp + "router.bias", _same),
    }
    for kind in ("", "_bias"):
        fused = f"{mlp}experts.gate_up_proj{kind}"
        block[f"moe.gate{kind}"] = (fused, lambda x: x[..., ::2])
        block[f"moe.up{kind}"] = (fused, lambda x: x[..., 1::2])
        block[f"moe.down{kind}"] = (f"{mlp}experts.down_proj{kind}", _same)
    return block


def _gpt2_leaves(model: ModelConfig, hf: dict[str, Any]) -> tuple[dict, dict]:
    H, D = model.head_dim, model.embed_dim
    h = "transformer.h.{}."
    block: dict[str, Leaf] = {
        "attention.out.kernel": (h + "attn.c_proj.weight", lambda x: x.reshape(-1, H, D)),
        "attention.out.bias": (h + "attn.c_proj.bias", _same),
    }
    for i, part in enumerate(("query", "key", "value")):
        # Conv1D holds the three projections side by side: [D, 3*N*H].
        block[f"attention.{part}.kernel"] = (
            h + "attn.c_attn.weight",
            lambda x, i=i: np.split(x, 3, axis=1)[i].reshape(D, -1, H),
        )
        block[f"attention.{part}.bias"] = (
            h + "attn.c_attn.bias",
            lambda x, i=i: np.split(x, 3)[i].reshape(-1, H),
        )
    for ours, theirs in (("up", "c_fc"), ("down", "c_proj")):
        block[f"mlp.{ours}.kernel"] = (h + f"mlp.{theirs}.weight", _same)
        block[f"mlp.{ours}.bias"] = (h + f"mlp.{theirs}.bias", _same)
    top: dict[str, Leaf] = {
        "embed.embedding": ("transformer.wte.weight", _same),
        "embed.position": ("transformer.wpe.weight", _same),
    }
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        block[f"attention_norm.{ours}"] = (h + f"ln_1.{theirs}", _same)
        block[f"mlp_norm.{ours}"] = (h + f"ln_2.{theirs}", _same)
        top[f"head.norm.{ours}"] = (f"transformer.ln_f.{theirs}", _same)
    return top, block


def load_golden(path: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The Hugging Face config of a golden file, and its arrays."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(str(arrays["config"])), arrays
