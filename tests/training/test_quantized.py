"""Training on quantised products learns what bf16 learns: a short form of
benchmarks/precision_curves.py."""

import pytest

from tests.training.runs import run, tiny

STEPS = 80


@pytest.mark.slow
def test_fp8_learns_as_bf16_does(tmp_path):
    """From a uniform guess, 5.55 nats per byte, to below 3.1, which single bytes give."""
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
