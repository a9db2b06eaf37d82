"""In which number formats a model is computed."""

from typing import Literal, get_args

from mtjax.config.check import config_class, require, require_defaults

ComputeDtype = Literal["bf16", "fp32", "fp16"]
QuantizedPrecision = Literal[
    "fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "int8"
]
Precision = Literal[ComputeDtype, QuantizedPrecision]
ProductBackend = Literal["xla", "scaled_matmul", "te"]
Role = Literal["qkv", "attention_out", "ffn_in", "ffn_out"]

QUANTIZED: tuple[str, ...] = get_args(QuantizedPrecision)
ROLES: tuple[Role, ...] = get_args(Role)


@config_class("quantize")
class QuantizeConfig:
    """Which matrix products run in the format that `precision` names, when it names one of less
    than 16 bits. Router, norms, embedding, output head and attention's own products never do."""

    roles: tuple[Role, ...] = ROLES
    """qkv: projections into attention, from latents too; attention_out: the one out of it; ffn_in
    and ffn_out: those into and out of feed-forward parts and experts; ffn_in is also what joins
    hidden state and token in the modules of multi-token prediction."""
    first_bf16_layers: int = 0
    """Layers at the bottom whose products stay in the compute dtype."""
    last_bf16_layers: int = 0
    """Layers at the top whose products stay in the compute dtype; the modules of multi-token
    prediction are treated as the last layer."""
    bf16_layers: tuple[int, ...] = ()
    """Indices, from 0, of layers between them whose products stay in the compute dtype too."""
    backend: Literal["auto", ProductBackend] = "auto"
    """xla: products of XLA, which take no scale along the sum: formats with tiles are emulated.
    scaled_matmul: mxfp8 by jax.nn.scaled_matmul, which is cuDNN's product on Blackwell, and on CPU
    one of the rounded numbers. te: fp8 and fp8_delayed by TransformerEngine, which is installed
    apart, see docs/precision.md. auto: scaled_matmul for mxfp8 on GPU, else xla."""
    compute: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype of everything else, and of what products return. fp32 is for comparing layouts:
    it takes out of the comparison that bf16 rounds sums over devices."""
    amax_history: int = 16
    """Steps whose largest values give the next step's scales, with fp8_delayed."""
    statistics: bool = False
    """Write largest value, scale, underflow and saturation of each role to the metrics. On GPU it
    takes further reductions over everything that is rounded."""
    fallback_ratio: float = 0.0
    """Share of saturated values that is too much for a product, with fp8_delayed; 0: any is fine.
    """
    fallback_steps: int = 100
    """Steps in a row with too many of them, after which a layer joins `bf16_layers` for the rest of
    the run, and a message says so."""

    def __post_init__(self) -> None:
        require(
            len(self.roles) > 0 and len(set(self.roles)) == len(self.roles),
            "quantize.roles",
            self.roles,
            f"some of {', '.join(ROLES)}, each once",
            "to quantise nothing, set precision to bf16",
        )
        for name in ("first_bf16_layers", "last_bf16_layers"):
            value = getattr(self, name)
            require(value >= 0, f"quantize.{name}", value, "at least 0", "0 quantises all")
        require(
            self.amax_history >= 1,
            "quantize.amax_history",
            self.amax_history,
            "at least 1",
            "1 takes the scales of the step before",
        )
        if self.fallback_ratio == 0:
            condition = "quantize.fallback_ratio is 0"
            require_defaults(self, "quantize", ["fallback_steps"], condition)
        require(
            0 <= self.fallback_ratio < 1,
            "quantize.fallback_ratio",
            self.fallback_ratio,
            "a share of at least 0 and less than 1",
            "0 lets no layer fall back",
        )
        require(
            self.fallback_steps >= 1,
            "quantize.fallback_steps",
            self.fallback_steps,
            "at least 1",
            "1 acts on the first step",
        )

    def kept_layers(self, num_layers: int) -> frozenset[int]:
        """Layers of a model of `num_layers` whose products stay in the compute dtype."""
        first, last = self.first_bf16_layers, self.last_bf16_layers
        ends = {i for i in range(num_layers) if i < first or i >= num_layers - last}
        return frozenset(ends | set(self.bf16_layers))


def compute_dtype_name(precision: Precision, quantize: QuantizeConfig) -> ComputeDtype:
    """The dtype of activations: what `precision` names, or that of the quantised recipes."""
    if precision == "bf16" or precision == "fp32" or precision == "fp16":
        return precision
    return quantize.compute
