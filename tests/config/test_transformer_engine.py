"""Products by TransformerEngine: what does not fit is refused before anything is compiled."""

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

TE = QuantizeConfig(backend="te")
FP8 = Config(precision="fp8", quantize=TE)


def changed(**fields):
    return dataclasses.replace(FP8, **fields)


def with_model(**fields):
    return dataclasses.replace(FP8.model, **fields)


EXPERTS = with_model(moe=MoeConfig(num_experts=4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed(precision="fp8_rowwise"),
            "quantize.backend: got 'te', expected xla with precision fp8_rowwise; .* use fp8",
        ),
        (
            changed(model=EXPERTS),
            "got 'te', expected xla with roles ffn_in, ffn_out of a model with experts; leave",
        ),
        (
            changed(model=with_model(ffn_dim=1000)),
            "quantize.backend te: model.ffn_dim per device: got 1000, expected a multiple of 16",
        ),
        (
            changed(train=TrainConfig(seq_len=24, batch_size=2), mesh=MeshConfig(data=2, tensor=2)),
            "tokens of a microbatch per device: got 12, expected a multiple of 16",
        ),
    ],
)
def test_what_does_not_fit_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_it_is_for_gpus_that_multiply_8_bits_and_for_comparisons_on_cpu(monkeypatch):
    of_attention = dataclasses.replace(TE, roles=("qkv", "attention_out"))
    for config in (
        FP8,
        changed(quantize=of_attention, model=EXPERTS),
        changed(precision="fp8_delayed"),
    ):
        validate(config)
        monkeypatch.delenv("NVTE_JAX_CUSTOM_CALLS", raising=False)
        assert resolve_backends(config, "gpu", (9, 0)).quantize.backend == "te"
        with pytest.raises(ValueError, match=r"capability \(8, 0\), which"):
            resolve_backends(config, "gpu", (8, 0))
        with pytest.raises(ValueError, match="got 'te', expected xla on platform 'cpu'"):
            resolve_backends(config, "cpu")
        monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
        assert resolve_backends(config, "cpu").quantize.backend == "te"
