"""What the network is. Every field changes the mathematics of the model, none its layout."""

import dataclasses
import math
from dataclasses import field
from typing import Literal

from mtjax.config.check import config_class, require, require_defaults
from mtjax.config.mla import MlaConfig
from mtjax.config.moe import Dispatcher, MoeConfig
from mtjax.config.mtp import MtpConfig

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Activation = Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "gelu_exact", "relu2"]
AttentionBackend = Literal["auto", "xla", "cudnn"]
Exchange = Literal["ring", "allgather", "ulysses"]

GATED_ACTIVATIONS = ("swiglu", "clamped_swiglu", "geglu")


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_positions",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
"""Which fields each scaling reads; setting another is an error."""


@config_class("model.rope")
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split layout."""

    theta: float = 10_000.0
    """Base of the geometric series of wavelengths."""
    scaling: RopeScaling = "none"
    """How the frequencies are stretched for contexts longer than those trained on."""
    factor: float = 1.0
    """Ratio of the new context length to the original one; 1 unless scaling is set."""
    original_max_positions: int = 8192
    """Context length, in tokens, of the original training (llama3 and yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_positions / this are divided by the factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_positions / this are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this in the original context are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by the factor."""
    mscale: float = 1.0
    """yarn: cos and sin are multiplied by m(mscale) / m(mscale_all_dim), where m(c) is
    0.1 c ln(factor) + 1."""
    mscale_all_dim: float = 0.0
    """yarn: query-key products are multiplied by m(mscale_all_dim)^2, also those of dims that don't
    rotate (DeepSeek-V2)."""
    truncate: bool = True
    """yarn: widen the range between the two to whole dimensions; GPT-OSS does not."""

    def __post_init__(self) -> None:
        require(self.theta > 0, "model.rope.theta", self.theta, "a positive number", "try 10000")
        read = _ROPE_FIELDS[self.scaling]
        others = {name for names in _ROPE_FIELDS.values() for name in names} - set(read)
        condition = f"model.rope.scaling is {self.scaling!r}"
        require_defaults(self, "model.rope", sorted(others), condition)
        if self.scaling != "none":
            fix = "raise it, or set model.rope.scaling to none"
            require(self.factor > 1, "model.rope.factor", self.factor, "more than 1", fix)
        original = self.original_max_positions
        require(
            original > 0,
            "model.rope.original_max_positions",
            original,
            "a positive number of tokens",
            "take the context length of the first training",
        )
        for more, less in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
            require(
                getattr(self, more) > getattr(self, less) > 0,
                f"model.rope.{more}",
                getattr(self, more),
                f"more than {less} ({getattr(self, less)}), which is positive",
                "change one of them",
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            require(value >= 0, f"model.rope.{name}", value, "at least 0", "0 tempers nothing")


@config_class("model.attention")
class AttentionConfig:
    """Softmax attention; fewer key/value heads than query heads make it grouped-query."""

    num_heads: int = 8
    """Query heads N."""
    num_kv_heads: int | None = None
    """Key and value heads K, a divisor of num_heads; None means num_heads, 1 is multi-query."""
    head_dim: int | None = None
    """Width H of a head; None means embed_dim / num_heads."""
    mla: MlaConfig = field(default_factory=MlaConfig)
    """Keys and values from a latent; it then says how wide heads are, and each has its own keys."""
    qkv_bias: bool = False
    """Add a bias to the query, key and value projections."""
    out_bias: bool = False
    """Add a bias to the output projection."""
    qk_norm: bool = False
    """RMS-normalise each query and key head before the rotation (Dehghani et al. 2023)."""
    windows: tuple[int, ...] = ()
    """Sliding windows in tokens, cycled over the layers; 0 is full attention, () full in all."""
    sinks: bool = False
    """Add a learned logit per query head to the softmax's denominator, so that a head may attend to
    nothing (GPT-OSS)."""
    logit_softcap: float | None = None
    """Squash attention logits to (-c, c) by c * tanh(logit / c) (Gemma 2)."""
    scale: float | None = None
    """Factor on query-key products; None means (width of a key head) ** -0.5."""
    dropout: float = 0.0
    """Share of attention weights zeroed in training, in [0, 1)."""
    backend: AttentionBackend = "auto"
    """Who computes it; auto takes cuDNN on GPU where it supports the features, else XLA."""
    exchange: Exchange = "ring"
    """How the shards of a sequence along mesh.context attend to each other. ring: keys and values
    travel from neighbour to neighbour while each computes (Liu et al. 2023, arXiv 2310.01889).
    allgather: every shard holds the keys and values of all. ulysses: two all-to-all exchange the
    sequence for heads and back (Jacobs et al. 2023, arXiv 2309.14509)."""

    def __post_init__(self) -> None:
        kv = self.num_kv_heads
        require(self.num_heads > 0, "model.attention.num_heads", self.num_heads, "> 0", "raise it")
        for name in ("head_dim", "logit_softcap", "scale"):
            value = getattr(self, name)
            require(
                value is None or value > 0,
                f"model.attention.{name}",
                value,
                "a positive number or None",
                "leave it out for the default",
            )
        require(
            kv is None or (kv > 0 and self.num_heads % kv == 0),
            "model.attention.num_kv_heads",
            kv,
            f"a divisor of num_heads ({self.num_heads})",
            "take one of "
            + ", ".join(str(d) for d in range(1, self.num_heads + 1) if self.num_heads % d == 0),
        )
        require(
            all(w >= 0 for w in self.windows),
            "model.attention.windows",
            self.windows,
            "window sizes of at least 0",
            "use 0 for full attention",
        )
        require(
            0 <= self.dropout < 1,
            "model.attention.dropout",
            self.dropout,
            "a share in [0, 1)",
            "0 turns it off",
        )
        if self.mla.kv_rank:
            direct = ("num_kv_heads", "head_dim", "qkv_bias", "qk_norm", "sinks")
            condition = f"model.attention.mla.kv_rank is {self.mla.kv_rank}"
            require_defaults(self, "model.attention", direct, condition)


@config_class("model")
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int = 512
    """Number of token ids V, unpadded; ids must be smaller."""
    vocab_multiple: int = 128
    """Embedding rows are padded to a multiple of this, whatever the mesh, so that they shard."""
    embed_dim: int = 256
    """Width D of the residual stream."""
    num_layers: int = 4
    """Number of transformer blocks L."""
    ffn_dim: int = 1024
    """Inner width F of the feed-forward part; with experts, of each one unless moe.ffn_dim says
    otherwise."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Experts in place of one feed-forward part."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    """Prediction of tokens beyond the next one."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention part of a block."""
    position: Literal["rope", "learned", "none"] = "rope"
    """How the model knows where a token stands."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Settings of the rotation, read when position is rope."""
    max_positions: int | None = None
    """Rows of the learned position table; required by position=learned, meaningless otherwise."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm with bias (Ba et al. 2016)."""
    norm_epsilon: float = 1e-5
    """Added to the mean square before the root."""
    norm_unit_offset: bool = False
    """Store scales as an offset from one, as Gemma does."""
    post_norm: bool = False
    """Normalise also the output of attention and feed-forward (Gemma 2)."""
    activation: Activation = "swiglu"
    """Feed-forward non-linearity; swiglu and geglu are gated; geglu and gelu use tanh.
    clamped_swiglu is (up + 1) gate sigmoid(1.702 gate) of clamped values (GPT-OSS)."""
    activation_clamp: float = 7.0
    """clamped_swiglu: gates are at most this, up-projections between this and its negative."""
    mlp_bias: bool = False
    """Add biases in the feed-forward part; with experts, in each of them."""
    parallel_residual: bool = False
    """Feed attention and feed-forward from the same residual (GPT-NeoX)."""
    tied_embeddings: bool = False
    """Use the embedding table as the output head."""
    embed_scale: bool = False
    """Multiply embeddings by sqrt(embed_dim) (Gemma)."""
    logit_softcap: float | None = None
    """Squash output logits to (-c, c) by c * tanh(logit / c)."""
    dropout: float = 0.0
    """Share of residual-branch outputs and embeddings zeroed in training, in [0, 1)."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 L)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "vocab_multiple", "embed_dim", "num_layers", "ffn_dim"):
            value = getattr(self, name)
            require(value > 0, f"model.{name}", value, "a positive integer", "raise it")
        windows = self.attention.windows
        require(
            len(windows) <= self.num_layers,
            "model.attention.windows",
            windows,
            f"at most model.num_layers ({self.num_layers}) of them",
            "leave out those that no layer has",
        )
        for name in ("norm_epsilon", "init_std"):
            value = getattr(self, name)
            require(value > 0, f"model.{name}", value, "a positive number", "raise it")
        attention = self.attention
        require(
            attention.head_dim is not None
            or attention.mla.kv_rank > 0
            or self.embed_dim % attention.num_heads == 0,
            "model.embed_dim",
            self.embed_dim,
            f"a multiple of attention.num_heads ({attention.num_heads})",
            "or set attention.head_dim",
        )
        require(
            self.position == "rope" or not attention.mla.kv_rank,
            "model.position",
            self.position,
            "'rope' with model.attention.mla, part of whose heads rotates",
            "use rope or drop the latent",
        )
        require(
            self.position != "rope" or self.rope_dim % 2 == 0,
            "model.attention.head_dim",
            self.head_dim,
            "an even number while position is 'rope'",
            "change head_dim or position",
        )
        require(
            (self.max_positions is not None) == (self.position == "learned"),
            "model.max_positions",
            self.max_positions,
            "a number exactly when model.position is 'learned'",
            "set both or neither",
        )
        if self.position != "rope":
            condition = f"model.position is {self.position!r}"
            require_defaults(self.rope, "model.rope", None, condition)
        require(
            not self.norm_unit_offset or self.norm == "rmsnorm",
            "model.norm_unit_offset",
            self.norm_unit_offset,
            "False with layernorm",
            "use norm rmsnorm",
        )
        require(
            not (self.parallel_residual and self.post_norm),
            "model.post_norm",
            self.post_norm,
            "False with parallel_residual",
            "choose one",
        )
        require(
            not self.mtp.depth or self.position != "learned",
            "model.mtp.depth",
            self.mtp.depth,
            "0 with learned positions, which embeddings of later tokens would carry",
            "use model.position rope",
        )
        require(
            self.activation_clamp > 0,
            "model.activation_clamp",
            self.activation_clamp,
            "a positive number",
            "GPT-OSS takes 7",
        )
        if self.activation != "clamped_swiglu":
            condition = f"model.activation is {self.activation!r}"
            require_defaults(self, "model", ["activation_clamp"], condition)
        self._check_experts()
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "in [0, 1)", "0 is off")
        cap = self.logit_softcap
        require(
            cap is None or cap > 0, "model.logit_softcap", cap, "a positive number", "None is off"
        )

    def _check_experts(self) -> None:
        moe = self.moe
        if not moe.num_experts:
            return
        with_experts = sum(moe.has_experts(layer) for layer in range(self.num_layers))
        require(
            with_experts > 0,
            "model.moe.first_dense and model.moe.every",
            f"{moe.first_dense} and {moe.every}",
            f"numbers that leave experts in some of {self.num_layers} layers",
            "lower one of them",
        )
        require(
            moe.ffn_dim is None or with_experts < self.num_layers,
            "model.moe.ffn_dim",
            moe.ffn_dim,
            "None where every layer has experts, which then have model.ffn_dim",
            "set model.ffn_dim in its place",
        )

    @property
    def head_dim(self) -> int:
        """Width H of a query or key head."""
        attention = self.attention
        if attention.mla.kv_rank:
            return attention.mla.nope_dim + attention.mla.rope_dim
        return attention.head_dim or self.embed_dim // attention.num_heads

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.attention.mla.value_dim or self.head_dim

    @property
    def rope_dim(self) -> int:
        """Part of a head that rotates."""
        return self.attention.mla.rope_dim or self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads K."""
        return self.attention.num_kv_heads or self.attention.num_heads

    def with_attention(self, backend: AttentionBackend) -> "ModelConfig":
        """The same model with its attention computed by `backend`."""
        attention = dataclasses.replace(self.attention, backend=backend)
        return dataclasses.replace(self, attention=attention)

    def with_exchange(self, exchange: Exchange) -> "ModelConfig":
        """The same model with the shards of a sequence attending to each other by `exchange`."""
        attention = dataclasses.replace(self.attention, exchange=exchange)
        return dataclasses.replace(self, attention=attention)

    def with_dispatcher(self, dispatcher: Dispatcher) -> "ModelConfig":
        """The same model with its tokens sent to experts by `dispatcher`; as it is if dense."""
        if not self.moe.num_experts:
            return self
        defaults = MoeConfig()
        moe = dataclasses.replace(
            self.moe,
            dispatcher=dispatcher,
            capacity_factor=defaults.capacity_factor,
            drop_policy=defaults.drop_policy,
            allow_expanded_products=defaults.allow_expanded_products,
        )
        return dataclasses.replace(self, moe=moe)

    @property
    def random_in_training(self) -> bool:
        """Whether layers do in training what they don't in evaluation, told by keys: dropout,
        noise, and sinkhorn's choice of experts."""
        rate = max(self.dropout, self.attention.dropout, self.moe.router_noise)
        return rate > 0 or self.moe.router == "sinkhorn"

    @property
    def expert_dim(self) -> int:
        """Inner width F of one routed expert."""
        return self.moe.ffn_dim or self.ffn_dim

    def with_vocab_shard(self, num_shards: int) -> "ModelConfig":
        """The same model with tables of one of `num_shards` pieces of the padded vocabulary."""
        rows = self.padded_vocab_size // num_shards
        return dataclasses.replace(self, vocab_size=rows, vocab_multiple=rows)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part multiplies two projections."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def layer_runs(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of layers [first, stop), each repeating a pattern of `period` layers: the dense ones
        at the bottom, by their windows, then the others, by windows and experts."""
        windows = len(self.attention.windows) or 1
        dense = min(self.moe.first_dense, self.num_layers)
        runs = (
            (0, dense, windows),
            (dense, self.num_layers, math.lcm(windows, self.moe.every)),
        )
        return tuple(
            (first, stop, min(period, stop - first)) for first, stop, period in runs if stop > first
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer, in tokens; 0 is full attention."""
        pattern = self.attention.windows or (0,)
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))
