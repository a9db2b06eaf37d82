"""Memory of a train step by closed formula: a check on compiled plans, and what prunes a search.

Weights, gradients and optimizer follow Megatron's count (18 bytes per parameter with AdamW, or
6 + 12/d with the optimizer split over d), saved activations Korthikanti et al. 2022. What one block
and the loss hold while they work is counted in whole arrays of our own step.
"""

from mtjax.config import Config
from mtjax.config.model import ModelConfig
from mtjax.parallel.schedule import Schedule, make_schedule
from mtjax.parallel.stages import stage_layout
from mtjax.planning.flops import count_expert_params, count_mtp_params, count_params

_COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MOMENT_BYTES = {"adamw": 8, "lion": 4, "muon": 4, "sgd": 4, "adafactor": 0}
"""float32 moments per parameter; those of Adafactor are rows and columns only."""


def estimate_memory(config: Config) -> dict[str, float]:
    """Bytes per device by part, largest moment of the step. The mesh must be resolved."""
    mesh = config.mesh
    shards = mesh.fsdp * mesh.pipeline * mesh.context * mesh.expert * mesh.tensor
    local = padded_params(config.model) / shards
    # In a pipeline every stage uses the modules of multi-token prediction, and adds up gradients.
    used = local + count_mtp_params(config.model) * (mesh.pipeline - 1) / shards
    compute = _COMPUTE_BYTES[config.compute_dtype]
    stored = 4 + _MOMENT_BYTES[config.optimizer.name]
    blocks = local - _table_params(config.model) / shards
    kept = len(config.quantize.kept_layers(config.model.num_layers))
    quantized = blocks * (1 - kept / config.model.num_layers) if config.quantized else 0.0
    # Tiles along each of two sums.
    rounded = quantized * (2 if config.precision == "mxfp8" else 1)
    return {
        "parameters and optimizer": stored * local / mesh.data,
        "weights in the compute dtype": compute * (used - quantized) + rounded,
        "gradients": 4 * used,
        "gradients of one microbatch": compute * blocks,
        "saved activations": _saved_bytes(config) * saved_layers(config),
        "working set": max(_block_bytes(config), _loss_bytes(config)),
    }


def saved_layers(config: Config) -> int:
    """Blocks times microbatches whose activations a device keeps at the same time."""
    schedule = pipeline_schedule(config)
    if schedule is None:
        return config.model.num_layers + config.model.mtp.depth
    layout = stage_layout(config.model, config.pipeline, config.mesh.pipeline)
    # All chunks of all stages have the same places, with a layer or without.
    chunk = sum(run.real_VSUP[0, 0].size for run in layout.runs.values())
    return schedule.num_slots * chunk


def pipeline_schedule(config: Config) -> Schedule | None:
    """The table that the stages of a pipeline follow; None without a pipeline."""
    if config.mesh.pipeline == 1:
        return None
    pipeline = config.pipeline
    return make_schedule(
        pipeline.schedule, config.mesh.pipeline, config.train.microbatches, pipeline.chunks
    )


def padded_params(model: ModelConfig) -> int:
    """Parameters in training: with the rows that pad the vocabulary, and multi-token prediction."""
    tables = 1 if model.tied_embeddings else 2
    padding = tables * (model.padded_vocab_size - model.vocab_size) * model.embed_dim
    return count_params(model) + padding + count_mtp_params(model)


def _table_params(model: ModelConfig) -> int:
    tables = 1 if model.tied_embeddings else 2
    return tables * model.padded_vocab_size * model.embed_dim


def _tokens(config: Config) -> float:
    """Tokens that pass through a device's layers at a time."""
    train, mesh = config.train, config.mesh
    replicas = mesh.data * mesh.fsdp * mesh.context * mesh.expert
    return train.batch_size * train.seq_len / train.microbatches / replicas


def _saved_bytes(config: Config) -> float:
    """What one block keeps for its backward pass: always its input, 2sbh/t bytes in bf16."""
    model, train, tensor = config.model, config.train, config.mesh.tensor
    heads = _projected_width(model)
    gates = 2 if model.gated else 1
    mla = model.attention.mla
    compute = _COMPUTE_BYTES[config.compute_dtype]
    heads_out = model.attention.num_heads * model.value_dim
    sizes = {
        "qkv": heads,
        # Held whole by each device of the axis tensor.
        "latent": (mla.kv_rank + mla.q_rank) * tensor,
        "attention_out": heads_out,
        "ffn_in": gates * model.ffn_dim,
        # Inputs of all products, one byte each.
        "quantized": (2 * model.embed_dim * tensor + heads_out + model.ffn_dim) / compute,
        "block_out": 2 * model.embed_dim,
    }
    if train.remat == "full":
        kept = 0.0
    elif train.remat == "selective":
        kept = sum(sizes.get(name, 0) for name in train.remat_save)
    else:
        # Nothing is recomputed: also the inputs of all four products, gathered.
        inputs = sizes.pop("quantized")
        if not config.quantized:
            inputs = model.ffn_dim + 2 * model.embed_dim * tensor
        kept = sum(sizes.values()) + inputs
    per_token = (model.embed_dim + kept) / tensor
    saved = _tokens(config) * per_token * compute
    return saved + (_score_bytes(config) / 2 if train.remat == "none" else 0.0)


def _block_bytes(config: Config) -> float:
    """A block's backward pass, beside the float32 gradient of the output table that waits."""
    model, mesh = config.model, config.mesh
    tokens, compute = _tokens(config), _COMPUTE_BYTES[config.compute_dtype]
    heads = _projected_width(model)
    # Gate, up, their product and two cotangents; block input, normed input and two cotangents.
    mlp = tokens * (5 * model.ffn_dim / mesh.tensor + 4 * model.embed_dim)
    if model.moe.num_experts:
        mlp = _experts_elements(config)
    # Input and cotangent, each with a transpose, and the input gradients of query, key and value.
    attention = tokens * (7 * model.embed_dim + 2 * heads / mesh.tensor)
    table = 4 * model.padded_vocab_size * model.embed_dim / mesh.tensor / mesh.pipeline
    attention += _exchanged_elements(config)
    working = max(compute * mlp, compute * attention + _score_bytes(config))
    return working + compute * _gathered_elements(config) + table


def _score_bytes(config: Config) -> float:
    """Attention weights of one block where XLA computes them: float32 and rounded, and cotangents.

    None where "auto" takes cuDNN, which it does not for latent attention.
    """
    model, mesh = config.model, config.mesh
    attention = model.attention
    if attention.backend != "xla" and not attention.mla.kv_rank:
        return 0.0
    keys = config.train.seq_len
    if attention.exchange == "ring":
        keys //= mesh.context
    pairs = _tokens(config) * keys * attention.num_heads / mesh.tensor
    return 2 * (4 + _COMPUTE_BYTES[config.compute_dtype]) * pairs


def _projected_width(model: ModelConfig) -> int:
    """Elements of a token's queries, keys and values, all heads together."""
    queries, kv = model.attention.num_heads, model.num_kv_heads
    return (queries + kv) * model.head_dim + kv * model.value_dim


def _exchanged_elements(config: Config) -> float:
    """What the exchange between shards of a sequence adds to a backward pass of attention."""
    model, mesh = config.model, config.mesh
    if mesh.context == 1:
        return 0.0
    kv_width = model.num_kv_heads * (model.head_dim + model.value_dim)
    kv = _tokens(config) * kv_width / mesh.tensor
    queries = _tokens(config) * model.attention.num_heads * model.head_dim / mesh.tensor
    exchange = model.attention.exchange
    if exchange == "allgather":
        return 2 * mesh.context * kv
    if exchange == "ulysses":
        # Query, output and its cotangent, keys and values, on both sides of the all-to-alls.
        return 3 * queries + 2 * kv
    # In float32, two elements each: the query gradient, and those of keys and values; two chunks
    # of query, output and its cotangent stacked; keys, values and gradients that travel.
    return 2 * (queries + 2 * kv) + 3 * queries + 4 * kv


def _experts_elements(config: Config) -> float:
    """As the feed-forward part of `_block_bytes`, for the tokens that a device's experts take."""
    model, mesh = config.model, config.mesh
    moe, tokens = model.moe, _tokens(config)
    taken = tokens * moe.top_k * moe.buffer_factor / mesh.tensor
    # Of each taken token also the dispatched and the returned value, with their cotangents. Whole
    # sequences meet, as at the dense part.
    gathered = 4 * tokens * mesh.context * model.embed_dim
    return taken * (5 * model.expert_dim + 4 * model.embed_dim) + gathered


def _gathered_elements(config: Config) -> float:
    """Weights of one block, gathered over fsdp, and their gradients before they are scattered."""
    model, mesh = config.model, config.mesh
    layers = model.num_layers + model.mtp.depth
    experts = count_expert_params(model) / layers
    dense = (padded_params(model) - _table_params(model)) / layers - experts
    gathered = dense / mesh.tensor if mesh.fsdp * mesh.context * mesh.expert > 1 else 0.0
    if mesh.fsdp > 1:
        gathered += experts / (mesh.expert * mesh.context * mesh.tensor)
    return 2 * gathered


def _loss_bytes(config: Config) -> float:
    """The loss: table and its float32 gradient, one chunk of logits twice, two hidden states."""
    model, train, mesh = config.model, config.train, config.mesh
    tokens, compute = _tokens(config), _COMPUTE_BYTES[config.compute_dtype]
    local = train.seq_len / mesh.context
    chunk = tokens / local * min(train.loss_chunk, local)
    vocab = model.padded_vocab_size / mesh.tensor / mesh.pipeline
    logits = 2 * compute * chunk * vocab
    return (4 + compute) * vocab * model.embed_dim + logits + 2 * compute * tokens * model.embed_dim
