"""Parameters and model FLOPs of a decoder by closed formula, without building it.

Convention of every FLOP/s and MFU we print: forward plus backward (backward is twice forward),
causal attention counted by the area under the diagonal or inside the window, unembedding counted;
embedding lookup, routers, norms, rotations and recomputation not counted; the vocabulary unpadded.
Of the experts, a token counts those it uses. The norms over latents and those of multi-token
prediction are counted, as Megatron-LM does: three millionths of DeepSeek-V3.
"""

from mtjax.config.model import ModelConfig

CONVENTION = (
    "forward + backward, causal attention halved, unembedding counted, "
    "embedding lookup, routers and recomputation not"
)
"""The convention in words, printed beside each MFU."""


def count_params(model: ModelConfig) -> int:
    """Parameters of the model, with the vocabulary unpadded and a tied head counted once.

    As published counts are: without the modules of multi-token prediction, which only train.
    """
    embed = model.vocab_size * model.embed_dim * (1 if model.tied_embeddings else 2)
    positions = (model.max_positions or 0) * model.embed_dim
    blocks = sum(_block_params(model, layer) for layer in range(model.num_layers))
    return embed + positions + _norm_params(model) + blocks


def count_active_params(model: ModelConfig) -> int:
    """Parameters that one token uses: all but the experts it is not sent to."""
    moe = model.moe
    if not moe.num_experts:
        return count_params(model)
    unused = (moe.num_experts - moe.top_k) * _mlp_params(model, model.expert_dim)
    return count_params(model) - _layers_with_experts(model) * unused


def count_expert_params(model: ModelConfig) -> int:
    """Parameters of all routed experts in training, with those of multi-token prediction."""
    layers = _layers_with_experts(model)
    layers += model.mtp.depth * model.moe.has_experts(model.num_layers - 1)
    return layers * model.moe.num_experts * _mlp_params(model, model.expert_dim)


def _layers_with_experts(model: ModelConfig) -> int:
    return sum(model.moe.has_experts(layer) for layer in range(model.num_layers))


def count_mtp_params(model: ModelConfig) -> int:
    """Parameters of all modules of multi-token prediction."""
    module = 2 * model.embed_dim**2 + 3 * _norm_params(model)
    return model.mtp.depth * (module + _block_params(model, model.num_layers - 1))


def _norm_params(model: ModelConfig) -> int:
    """Parameters of one norm over the embedding: a scale, and a bias with layernorm."""
    return model.embed_dim * (2 if model.norm == "layernorm" else 1)


def _block_params(model: ModelConfig, layer: int) -> int:
    """Parameters of one block."""
    attention, moe = model.attention, model.moe
    heads = attention.num_heads + 2 * model.num_kv_heads
    biases = heads * model.head_dim * attention.qkv_bias + model.embed_dim * attention.out_bias
    sinks = attention.num_heads * attention.sinks
    # Query and key norms are always RMSNorm over one head, shared by the heads.
    qk_norms = 2 * model.head_dim if attention.qk_norm else 0
    qk_norms += _latent_widths(model)
    norms = (4 if model.post_norm else 2) * _norm_params(model)
    params = _attention_matrix_params(model) + biases + sinks + qk_norms + norms
    if not moe.has_experts(layer):
        return params + _mlp_params(model, model.ffn_dim)
    params += moe.num_experts * _mlp_params(model, model.expert_dim)
    if moe.shared_ffn_dim:
        params += _mlp_params(model, moe.shared_ffn_dim) + model.embed_dim * moe.shared_gate
    # The router's matrix, and its biases.
    return params + moe.num_experts * (model.embed_dim + moe.score_bias + moe.router_bias)


def _block_matrix_params(model: ModelConfig, layer: int) -> int:
    """Entries of the matrices of one block that multiply a token, routers left out."""
    attention, moe = _attention_matrix_params(model), model.moe
    if not moe.has_experts(layer):
        return attention + _mlp_matrix_params(model, model.ffn_dim)
    experts = moe.top_k * _mlp_matrix_params(model, model.expert_dim)
    shared = _mlp_matrix_params(model, moe.shared_ffn_dim) + model.embed_dim * moe.shared_gate
    return attention + experts + shared


def _latent_widths(model: ModelConfig) -> int:
    """Entries of the norms over the latents of one layer; 0 without latent attention."""
    return model.attention.mla.kv_rank + model.attention.mla.q_rank


def _attention_matrix_params(model: ModelConfig) -> int:
    """Entries of the matrices of one attention part."""
    N, mla = model.attention.num_heads, model.attention.mla
    if not mla.kv_rank:
        return model.embed_dim * (2 * N + 2 * model.num_kv_heads) * model.head_dim
    queries = (mla.q_rank or model.embed_dim) * N * model.head_dim + model.embed_dim * mla.q_rank
    down = model.embed_dim * (mla.kv_rank + mla.rope_dim)
    up = mla.kv_rank * N * (mla.nope_dim + mla.value_dim)
    return queries + down + up + N * mla.value_dim * model.embed_dim


def _mlp_matrix_params(model: ModelConfig, ffn_dim: int) -> int:
    """Entries of the matrices of one feed-forward part of this inner width."""
    return model.embed_dim * (3 if model.gated else 2) * ffn_dim


def _mlp_params(model: ModelConfig, ffn_dim: int) -> int:
    """Parameters of one feed-forward part of this inner width."""
    biases = (2 if model.gated else 1) * ffn_dim + model.embed_dim if model.mlp_bias else 0
    return _mlp_matrix_params(model, ffn_dim) + biases


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Model FLOPs per token of one training step at `seq_len` tokens, forward and backward."""
    if seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len}, expected at least 1; give the tokens per row")
    layers = sum(_block_matrix_params(model, layer) for layer in range(model.num_layers))
    latents = model.num_layers * _latent_widths(model)
    head = model.vocab_size * model.embed_dim
    matrices = layers + latents + head
    area = sum(attention_area(seq_len, window) for window in model.windows)
    # A module is one more block, its input projection, and the output head again.
    last = _block_matrix_params(model, model.num_layers - 1) + _latent_widths(model)
    module = last + 2 * model.embed_dim**2 + 3 * model.embed_dim + head
    matrices += model.mtp.depth * module
    area += model.mtp.depth * attention_area(seq_len, model.windows[-1])
    # Queries times keys, and weights times values: 2 FLOPs per head dim each.
    widths = model.head_dim + model.value_dim
    attention = 2 * area * model.attention.num_heads * widths / seq_len
    return 3 * (2 * matrices + attention)


def attention_area(seq_len: int, window: int = 0) -> float:
    """Query-key pairs of one causal sequence: T^2/2, or T*W - W^2/2 with a window of W < T."""
    window = min(window, seq_len) or seq_len
    return seq_len * window - window**2 / 2
