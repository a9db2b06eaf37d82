"""In which number formats a model is computed."""

from typing import Literal, get_args

from mtjax.config.check import config_class, require

ComputeDtype = Literal["bf16", "fp32", "fp16"]
QuantizedPrecision = Literal["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "int8"]
Precision = Literal[ComputeDtype, QuantizedPrecision]
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
    compute: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype of everything else, and of what products return. fp32 is for comparing layouts:
    it takes out of the comparison that bf16 rounds sums over devices."""

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


def compute_dtype_name(precision: Precision, quantize: QuantizeConfig) -> ComputeDtype:
    """The dtype of activations: what `precision` names, or that of the quantised recipes."""
    if precision == "bf16" or precision == "fp32" or precision == "fp16":
        return precision
    return quantize.compute
