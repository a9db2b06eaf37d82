"""Which products quantised operands run in, and what these ask of model and mesh."""

import dataclasses
from typing import TYPE_CHECKING

from mtjax.config.check import require

if TYPE_CHECKING:
    from mtjax.config import Config

BLACKWELL = (10, 0)
"""Compute capability of the first GPUs with products of tiles and their scales."""
FIRST_WITH_F8 = (8, 9)
"""Of the first with products of 8-bit floats: Ada."""
TILE = 32
"""Values under one scale of MXFP8."""


def resolve_products(
    config: "Config", on_gpu: bool, compute_capability: tuple[int, int] | None
) -> "Config":
    """The config with its `quantize.backend`, for devices of which this is known.

    Raises:
        ValueError: they would compute its products in another format, or can't cut its tiles.
    """
    if not config.quantized:
        return config
    blackwell = on_gpu and (compute_capability or (0, 0)) >= BLACKWELL
    _check_format(config, on_gpu, blackwell)
    require(
        compute_capability is None
        or compute_capability >= FIRST_WITH_F8
        or not config.precision.startswith("fp8"),
        "precision",
        config.precision,
        f"another one on a GPU of compute capability {compute_capability}, which multiplies no "
        f"8-bit floats: those of {FIRST_WITH_F8} and later do",
        "use bf16 or int8",
    )
    backend = config.quantize.backend
    if backend == "auto":
        backend = "scaled_matmul" if blackwell and config.precision == "mxfp8" else "xla"
    quantize = dataclasses.replace(config.quantize, backend=backend)
    config = dataclasses.replace(config, quantize=quantize)
    if backend == "scaled_matmul":
        _check_dispatcher(config, on_gpu)
        _check_tiles(config)
    return config


def _check_format(config: "Config", on_gpu: bool, blackwell: bool) -> None:
    """Refuse formats whose products these devices would compute in another one."""
    advice = {
        "fp8_block": "a kernel for products of 128-wide tiles, which mtjax does not have yet",
        "nvfp4": "Blackwell tensor cores, for which mtjax has no product yet",
    }
    if not blackwell:
        advice["mxfp8"] = "a GPU of compute capability 10.0 or more (Blackwell), such as b200"
    elif config.quantize.backend == "xla":
        advice["mxfp8"] = "quantize.backend scaled_matmul, or auto"
    require(
        not on_gpu or config.precision not in advice,
        "precision",
        config.precision,
        f"another one on this GPU: it takes {advice.get(config.precision)}; on CPU it is emulated",
        "use fp8 or fp8_rowwise",
    )


def _check_dispatcher(config: "Config", on_gpu: bool) -> None:
    moe = config.model.moe
    require(
        not (on_gpu and moe.num_experts) or moe.dispatcher == "capacity",
        "model.moe.dispatcher",
        moe.dispatcher,
        f"capacity with precision {config.precision} on GPU, whose products take experts of equal "
        "numbers of tokens",
        "set model.moe.dispatcher to capacity, or use precision fp8",
    )


def _check_tiles(config: "Config") -> None:
    """Every dim that a product sums over is cut into whole tiles, none of them over devices."""
    for name, size, axes in _summed(config):
        parts = TILE
        for axis in axes:
            parts *= max(config.mesh.sizes[axis], 1)
        over = "".join(f" x mesh.{axis}" for axis in axes)
        require(
            size % parts == 0,
            name,
            size,
            f"a multiple of {TILE}{over} ({parts}) with precision {config.precision}, whose "
            f"products take whole tiles of {TILE} values of what they sum over",
            "change it, shrink the axes, or use precision fp8",
        )


def _summed(config: "Config") -> list[tuple[str, int, tuple[str, ...]]]:
    """Names and sizes of the dims that products sum over, forward or backward, and the mesh axes
    that split them."""
    model, roles = config.model, config.quantize.roles
    mla, moe = model.attention.mla, model.moe
    shards = ("fsdp", "expert", "context")
    dims = [
        ("train.seq_len", config.train.seq_len, ("context", "tensor")),
        ("model.embed_dim", model.embed_dim, shards),
    ]
    if {"qkv", "attention_out"} & set(roles):
        if mla.kv_rank:
            dims += [
                (f"model.attention.mla.{name}", getattr(mla, name), ())
                for name in ("nope_dim", "rope_dim", "value_dim")
            ]
        else:
            dims.append(("model.attention.head_dim", model.head_dim, ()))
    if "qkv" in roles:
        ranks = [("kv_rank", mla.kv_rank), ("q_rank", mla.q_rank)]
        dims += [(f"model.attention.mla.{name}", rank, shards) for name, rank in ranks if rank]
    if {"ffn_in", "ffn_out"} & set(roles):
        if not all(map(moe.has_experts, range(model.num_layers))):
            dims.append(("model.ffn_dim", model.ffn_dim, ("tensor",)))
        if moe.num_experts:
            dims.append(("model.moe.ffn_dim", model.expert_dim, ()))
        if moe.shared_ffn_dim:
            dims.append(("model.moe.shared_ffn_dim", moe.shared_ffn_dim, ("tensor",)))
    return dims
