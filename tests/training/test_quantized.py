"""Runs on quantised products: they learn what bf16 learns, and draw their samples in bf16."""

import pytest

from mtjax.config import MlaConfig
from mtjax.training import loop
from mtjax.training.sample import draw_sample
from mtjax.training.state import create_state, make_setup
from tests.training.runs import on_some_devices, run, tiny

STEPS = 80


@pytest.mark.slow
def test_fp8_learns_as_bf16_does(tmp_path, monkeypatch):
    """From a uniform guess, 5.55 nats per byte, to below 3.1, which single bytes give: a short form
    of benchmarks/precision_curves.py."""
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)
    losses = {}
    for precision in ("bf16", "fp8"):
        config = tiny(
            tmp_path / precision,
            precision=precision,
            model__embed_dim=64,
            model__ffn_dim=128,
            model__dropout=0.0,
            train__steps=STEPS,
            train__seq_len=64,
            train__batch_size=16,
            train__eval_batches=16,
            optimizer__schedule__warmup_steps=5,
            optimizer__schedule__decay_steps=STEPS,
        )
        losses[precision] = run(config).metrics[-1]["eval/loss"]
    assert losses["bf16"] < 3.0
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=5e-3)


def test_a_sample_reads_the_masters(tmp_path):
    """Decoding knows no rounded kernels, be they of experts, of latents or of some layers only."""
    config = tiny(
        tmp_path,
        precision="fp8",
        quantize__first_bf16_layers=1,
        model__num_layers=2,
        model__dropout=0.0,
        model__moe__num_experts=4,
        model__attention__mla=MlaConfig(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
        train__sample_tokens=2,
        train__sample_prompt="It is ",
    )
    config, mesh = on_some_devices(config)
    setup = make_setup(config, mesh)
    params = create_state(config, mesh, setup).params
    assert draw_sample(config, mesh, setup, params).startswith("It is ")
