"""Quantised precisions: what does not fit is refused before any device."""

import dataclasses

import pytest

from mtjax.config import (
    Config,
    MeshConfig,
    MoeConfig,
    QuantizeConfig,
    TrainConfig,
    resolve_backends,
    validate,
)

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


def test_compute_dtypes():
    assert FP8.compute_dtype == "bf16" and FP8.quantized
    assert changed(quantize=QuantizeConfig(compute="fp32")).compute_dtype == "fp32"
    assert Config(precision="fp16").compute_dtype == "fp16" and not Config().quantized
