"""What products by TransformerEngine ask of a run."""

import os

from mtjax.config.check import require
from mtjax.config.mesh import MeshConfig
from mtjax.config.model import ModelConfig
from mtjax.config.precision import Precision, QuantizeConfig, Role
from mtjax.config.training import TrainConfig

_ENTRIES = 16
"""cuBLASLt multiplies 8-bit floats along sums of a multiple of as many entries. Each dim of a
product is summed over in one of the three directions."""


def check_transformer_engine(
    model: ModelConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    precision: Precision,
    quantize: QuantizeConfig,
) -> None:
    """Check a run with quantize.backend "te"; an axis of -1 (the rest) counts as 1.

    Raises:
        ValueError: saying what was got, what was expected, and how to fix it.
    """
    require(
        precision in ("fp8", "fp8_delayed"),
        "quantize.backend",
        "te",
        f"xla with precision {precision}",
        "TransformerEngine multiplies operands of one scale each: use fp8 or fp8_delayed, or drop "
        "the option",
    )
    of_experts = sorted({"ffn_in", "ffn_out"}.intersection(quantize.roles))
    require(
        not (model.moe.num_experts and of_experts),
        "quantize.backend",
        "te",
        f"xla with roles {', '.join(of_experts)} of a model with experts",
        "leave quantize.roles at qkv and attention_out, or drop the option",
    )
    for name, size in _summed_sizes(model, train, mesh, quantize.roles).items():
        require(
            size % _ENTRIES == 0,
            f"quantize.backend te: {name}",
            size,
            f"a multiple of {_ENTRIES}",
            "change it, split it over fewer devices, or drop the option",
        )


def _summed_sizes(
    model: ModelConfig, train: TrainConfig, mesh: MeshConfig, roles: tuple[Role, ...]
) -> dict[str, int]:
    """What products sum over, forward or backward, and how many entries of it one device has."""
    axes = {name: max(size, 1) for name, size in mesh.sizes.items()}
    tensor, mla, heads = axes["tensor"], model.attention.mla, model.attention.num_heads
    rows = train.batch_size // train.microbatches // (axes["data"] * axes["fsdp"] * axes["expert"])
    sizes = {
        "model.embed_dim": model.embed_dim,
        "tokens of a microbatch per device": rows * train.seq_len // (axes["context"] * tensor),
    }
    if {"ffn_in", "ffn_out"}.intersection(roles):
        sizes["model.ffn_dim per device"] = model.ffn_dim // tensor
    if {"qkv", "attention_out"}.intersection(roles):
        sizes["width of value heads per device"] = heads * model.value_dim // tensor
    if "qkv" not in roles:
        return sizes
    sizes["width of query heads per device"] = heads * model.head_dim // tensor
    if not mla.kv_rank:
        width = model.num_kv_heads * model.head_dim
        return sizes | {"width of key heads per device": width // tensor}
    return sizes | {
        "width of keys without position per device": heads * mla.nope_dim // tensor,
        "model.attention.mla.kv_rank": mla.kv_rank,
        "model.attention.mla.q_rank": mla.q_rank,
        "model.attention.mla.rope_dim": mla.rope_dim,
    }


def check_transformer_engine_on(platform: str) -> None:
    """Check that TransformerEngine has kernels for these devices, or is to do without.

    Raises:
        ValueError: it does not.
    """
    require(
        platform in ("gpu", "cuda")
        or os.environ.get("NVTE_JAX_CUSTOM_CALLS", "").lower() == "false",
        "quantize.backend",
        "te",
        f"xla on platform {platform!r}",
        "TransformerEngine's kernels run on NVIDIA GPUs; with NVTE_JAX_CUSTOM_CALLS=false in the "
        "environment it computes in JAX, to compare",
    )
