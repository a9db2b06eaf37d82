"""Quantised precisions: what does not fit is refused before any device."""

import dataclasses

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    QuantizeConfig,
    TrainConfig,
    resolve_backends,
    validate,
)
from mtjax.planner.place import Place
from mtjax.planning.targets import parse_target

FP8 = Config(precision="fp8")


def changed(config=FP8, **fields):
    return dataclasses.replace(config, **fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(precision="fp9"), r"precision: got 'fp9', expected .*'?fp8"),
        (lambda: QuantizeConfig(roles=()), r"quantize.roles: got \(\), expected some of qkv"),
        (lambda: QuantizeConfig(roles=("qkv", "qkv")), "each once"),
        (lambda: QuantizeConfig(first_bf16_layers=-1), "at least 0"),
        (
            lambda: changed(Config(), quantize=QuantizeConfig(last_bf16_layers=1)),
            r"last_bf16_layers: got 1, expected the default \(0\), .* while precision is 'bf16'",
        ),
        (
            lambda: changed(quantize=QuantizeConfig(first_bf16_layers=2, last_bf16_layers=2)),
            "got 4, expected fewer than model.num_layers",
        ),
        (
            lambda: changed(
                quantize=QuantizeConfig(first_bf16_layers=1), mesh=MeshConfig(pipeline=2)
            ),
            "0 with a pipeline",
        ),
        (
            lambda: changed(quantize=QuantizeConfig(bf16_layers=(1, 9))),
            r"bf16_layers: got \(1, 9\), expected indices of layers, each once, from 0 to 3",
        ),
        (
            lambda: changed(quantize=QuantizeConfig(amax_history=4)),
            r"amax_history: got 4, expected the default \(16\), .* set precision to fp8_delayed",
        ),
        (
            lambda: changed(quantize=QuantizeConfig(fallback_ratio=0.1)),
            "fallback_ratio: got 0.1, .* set precision to fp8_delayed",
        ),
        (
            lambda: QuantizeConfig(fallback_steps=5),
            r"fallback_steps: got 5, expected the default .* quantize.fallback_ratio is 0",
        ),
        (
            lambda: changed(quantize=QuantizeConfig(bf16_layers=(0,), first_bf16_layers=1)),
            r"bf16_layers: got \(0,\), expected indices of layers, each once, from 1 to 3",
        ),
        (lambda: QuantizeConfig(fallback_ratio=1.0), "a share of at least 0 and less than 1"),
        (
            lambda: changed(
                precision="fp8_delayed",
                quantize=QuantizeConfig(fallback_ratio=0.1),
                mesh=MeshConfig(pipeline=2),
            ),
            "fallback_ratio: got 0.1, expected 0 with a pipeline",
        ),
        (
            lambda: changed(
                precision="mxfp8",
                model=dataclasses.replace(
                    FP8.model, moe=MoeConfig(num_experts=4, dispatcher="dropless")
                ),
            ),
            "got 'dropless', expected capacity or allgather with precision mxfp8",
        ),
        (
            lambda: changed(quantize=QuantizeConfig(backend="scaled_matmul")),
            "quantize.backend: got 'scaled_matmul', expected xla or auto with precision fp8;",
        ),
        (
            lambda: changed(
                Config(), train=TrainConfig(remat="selective", remat_save=("quantized",))
            ),
            "train.remat_save: got 'quantized'",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        validate(make())


@pytest.mark.parametrize("precision", ["fp8_block", "mxfp8", "nvfp4"])
def test_a_format_that_a_gpu_would_compute_in_another_is_refused_there(precision):
    config = validate(changed(precision=precision))
    resolve_backends(config, "cpu")
    with pytest.raises(ValueError, match=f"precision: got '{precision}', expected another one on"):
        resolve_backends(config, "gpu")


@pytest.mark.parametrize("precision", ["fp8", "fp8_delayed", "fp8_rowwise"])
def test_a_gpu_without_8_bit_floats_is_told_of_others(precision):
    config = validate(changed(precision=precision))
    resolve_backends(config, "gpu", (8, 9))
    with pytest.raises(ValueError, match=rf"got '{precision}', .* capability \(8, 0\), which"):
        resolve_backends(config, "gpu", (8, 0))
    resolve_backends(changed(config, precision="int8"), "gpu", (8, 0))


HOPPER, BLACKWELL = (9, 0), (10, 0)
TILED = changed(
    precision="mxfp8",
    model=ModelConfig(embed_dim=512, ffn_dim=1024, attention=AttentionConfig(num_heads=8)),
    train=TrainConfig(seq_len=512, batch_size=16),
)


def test_mxfp8_is_a_product_of_blackwell():
    for platform, expected in (
        (("gpu", BLACKWELL), "scaled_matmul"),
        (("gpu", (12, 0)), "scaled_matmul"),
        (("cpu",), "xla"),
    ):
        found = resolve_backends(validate(TILED), *platform)
        assert found.quantize.backend == expected
    for name, precision in (("h200", "mxfp8"), ("b200", "nvfp4"), ("b200", "fp8_block")):
        with pytest.raises(ValueError, match=f"precision: got '{precision}', expected another"):
            place = Place(parse_target(f"{name}:1x8"), 8, virtual=False)
            place.resolve(changed(TILED, precision=precision, mesh=MeshConfig(fsdp=8)))
    with pytest.raises(ValueError, match=r"compute capability 10.0 or more \(Blackwell\)"):
        resolve_backends(TILED, "gpu", HOPPER)
    emulated = changed(TILED, quantize=QuantizeConfig(backend="xla"))
    with pytest.raises(ValueError, match=r"it takes quantize\.backend scaled_matmul, or auto"):
        resolve_backends(emulated, "gpu", BLACKWELL)
    resolve_backends(changed(emulated, precision="fp8"), "gpu", BLACKWELL)


def with_model(attention=(), mla=(), moe=(), **settings):
    attention = dataclasses.replace(
        TILED.model.attention, mla=MlaConfig(**dict(mla)), **dict(attention)
    )
    return dataclasses.replace(
        TILED.model, attention=attention, moe=MoeConfig(**dict(moe)), **settings
    )


LATENT = {"kv_rank": 64, "nope_dim": 32, "rope_dim": 32, "value_dim": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": TrainConfig(seq_len=48, batch_size=16)},
         r"train.seq_len: got 48, expected a multiple of 32 x mesh.context x mesh.tensor \(32\)"),
        ({"mesh": MeshConfig(context=4, tensor=8, fsdp=2)}, r"seq_len: got 512, .*tensor \(1024\)"),
        ({"mesh": MeshConfig(fsdp=32), "train": TrainConfig(seq_len=512, batch_size=32)},
         r"embed_dim: got 512, .* 32 x mesh.fsdp x mesh.expert x mesh.context \(1024\)"),
        ({"model": with_model({"head_dim": 48})}, r"head_dim: got 48, expected .* 32 \(32\)"),
        ({"model": with_model(ffn_dim=992), "mesh": MeshConfig(tensor=2)},
         r"model.ffn_dim: got 992, .* 32 x mesh.tensor \(64\)"),
        ({"model": with_model(mla=LATENT | {"rope_dim": 16})}, "rope_dim: got 16"),
        ({"model": with_model(mla=LATENT | {"q_rank": 48})}, "q_rank: got 48"),
        ({"model": with_model(moe={"num_experts": 4, "ffn_dim": 72, "first_dense": 1})},
         "model.moe.ffn_dim: got 72"),
        ({"model": with_model(moe={"num_experts": 4, "shared_ffn_dim": 72})},
         "model.moe.shared_ffn_dim: got 72"),
        ({"model": with_model(moe={"num_experts": 4, "dispatcher": "allgather",
                                   "allow_expanded_products": True})},
         "model.moe.dispatcher: got 'allgather', expected capacity with precision mxfp8 on GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_into_tiles_on_the_devices_is_named(changes, message):
    config = validate(changed(TILED, **changes))
    resolve_backends(config, "cpu")
    with pytest.raises(ValueError, match=message):
        resolve_backends(config, "gpu", BLACKWELL)


def test_dims_that_no_quantised_product_sums_over_may_have_any_size():
    attention_only = QuantizeConfig(roles=("qkv", "attention_out"))
    model = with_model(ffn_dim=1000)
    config = validate(changed(TILED, model=model, quantize=attention_only))
    assert resolve_backends(config, "gpu", BLACKWELL).quantize.backend == "scaled_matmul"


def test_compute_dtypes():
    assert FP8.compute_dtype == "bf16" and FP8.quantized
    assert changed(quantize=QuantizeConfig(compute="fp32")).compute_dtype == "fp32"
    assert Config(precision="fp16").compute_dtype == "fp16" and not Config().quantized
