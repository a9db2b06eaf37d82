"""Parameters and model FLOPs of a decoder by closed formula, without building it.

Convention of every FLOP/s and MFU we print: forward plus backward (backward is twice forward),
causal attention counted by the area under the diagonal or inside the window, unembedding counted;
embedding lookup, norms, rotations and recomputation not counted; the vocabulary unpadded.
"""

from mtjax.config.model import ModelConfig

CONVENTION = (
    "forward + backward, causal attention halved, unembedding counted, "
    "embedding lookup and recomputation not"
)
"""The convention in words, printed beside each MFU."""


def count_params(model: ModelConfig) -> int:
    """Trainable parameters, with the vocabulary unpadded and a tied head counted once."""
    embed = model.vocab_size * model.embed_dim * (1 if model.tied_embeddings else 2)
    positions = (model.max_positions or 0) * model.embed_dim
    return embed + positions + _norm_params(model) + model.num_layers * _block_params(model)


def _norm_params(model: ModelConfig) -> int:
    """Parameters of one norm over the embedding: a scale, and a bias with layernorm."""
    return model.embed_dim * (2 if model.norm == "layernorm" else 1)


def _block_params(model: ModelConfig) -> int:
    """Parameters of one block, which are the same in all layers."""
    attention = model.attention
    heads = attention.num_heads + 2 * model.num_kv_heads
    biases = heads * model.head_dim * attention.qkv_bias + model.embed_dim * attention.out_bias
    if model.mlp_bias:
        biases += (2 if model.gated else 1) * model.ffn_dim + model.embed_dim
    # Query and key norms are always RMSNorm over one head, shared by the heads.
    qk_norms = 2 * model.head_dim if attention.qk_norm else 0
    norms = (4 if model.post_norm else 2) * _norm_params(model)
    return _block_matrix_params(model) + biases + qk_norms + norms


def _block_matrix_params(model: ModelConfig) -> int:
    """Entries of the matrices of one block, each of which multiplies every token once."""
    heads = 2 * model.attention.num_heads + 2 * model.num_kv_heads
    mlp_matrices = 3 if model.gated else 2
    return model.embed_dim * (heads * model.head_dim + mlp_matrices * model.ffn_dim)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Model FLOPs per token of one training step at `seq_len` tokens, forward and backward."""
    if seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len}, expected at least 1; give the tokens per row")
    matrices = model.num_layers * _block_matrix_params(model) + model.vocab_size * model.embed_dim
    area = sum(attention_area(seq_len, window) for window in model.windows)
    # Queries times keys, and weights times values: 2 FLOPs per head dim each.
    attention = 4 * area * model.attention.num_heads * model.head_dim / seq_len
    return 3 * (2 * matrices + attention)


def attention_area(seq_len: int, window: int = 0) -> float:
    """Query-key pairs of one causal sequence: T^2/2, or T*W - W^2/2 with a window of W < T."""
    window = min(window, seq_len) or seq_len
    return seq_len * window - window**2 / 2
