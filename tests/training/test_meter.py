"""Speed and MFU as the loop reports them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from mtjax.config import Config
from mtjax.training import meter as meter_module
from mtjax.training.meter import Meter


def meter(kind: str, precision: str, monkeypatch):
    clock = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: next(clock))
    devices = np.array([SimpleNamespace(device_kind=kind)] * 8)
    mesh = SimpleNamespace(devices=devices, size=8)
    config = dataclasses.replace(Config(), precision=precision)
    return Meter(config, mesh, flops_per_token=51.4704e9, compile_s=3.0)


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989e12), ("fp16", 989e12)])
def test_mfu_is_model_flops_over_the_dense_peak_of_the_precision(precision, peak, monkeypatch):
    speed = meter("NVIDIA H200", precision, monkeypatch)
    for _ in range(2):
        speed.count(250_000)
    metrics = speed.read()
    # 500,000 tokens in 10 s on 8 devices.
    assert metrics["perf/tokens_per_s"] == pytest.approx(50_000)
    assert metrics["perf/step_time_s"] == pytest.approx(5.0)
    assert metrics["perf/mfu"] == pytest.approx(50_000 / 8 * 51.4704e9 / peak)
    assert metrics["perf/compile_s"] == 3.0


def test_time_of_evaluations_and_saves_does_not_count(monkeypatch):
    speed = meter("NVIDIA H200", "bf16", monkeypatch)
    speed.count(1000)
    speed.pause(5.0)
    assert speed.read()["perf/tokens_per_s"] == pytest.approx(200)


def test_an_unknown_device_has_no_mfu(monkeypatch):
    speed = meter("cpu", "fp32", monkeypatch)
    speed.count(1000)
    assert "perf/mfu" not in speed.read()
