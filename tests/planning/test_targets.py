"""GPU facts, target names and the peaks that MFU refers to."""

import jax.numpy as jnp
import pytest

from mtjax.planning.targets import GPUS, find_gpu, parse_target, peak_flops, target_config_text


def test_a_target_names_a_gpu_and_the_shape_of_the_cluster():
    target = parse_target("H200:32x8")
    assert (target.gpu.name, target.hosts, target.gpus_per_host) == ("h200", 32, 8)
    assert target.num_devices == 256
    assert str(target) == "h200:32x8"
    assert str(parse_target("b200")) == "b200:1x1"
    assert str(parse_target("a100:4")) == "a100:1x4"


def test_an_unknown_gpu_suggests_the_closest_name():
    with pytest.raises(ValueError, match=r"got GPU 'h20'.*did you mean h200\?"):
        parse_target("h20:1x8")


@pytest.mark.parametrize("text", ["h200:", "h200:8x", "h200:0x8", "h200:axb", "h200:1x2x4"])
def test_a_malformed_size_says_what_to_write(text):
    with pytest.raises(ValueError, match="write for example h200:1x8"):
        parse_target(text)


@pytest.mark.parametrize(
    ("kind", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H200", "float16", 989),
        ("NVIDIA H200", "float8_e4m3fn", 1979),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA B200", "float8_e5m2", 4500),
    ],
)
def test_peaks_are_the_dense_rates_of_the_data_sheets(kind, dtype, tflops):
    assert peak_flops(kind, dtype) == tflops * 1e12


def test_dtypes_may_be_given_as_jax_objects():
    assert peak_flops("NVIDIA H200", jnp.bfloat16) == 989e12
    assert peak_flops("NVIDIA H200", jnp.dtype("bfloat16")) == 989e12
    assert peak_flops("NVIDIA H200", jnp.float32) == 67e12


@pytest.mark.parametrize(
    ("kind", "dtype"), [("cpu", "bfloat16"), ("NVIDIA A100-SXM4-80GB", "float8_e4m3fn")]
)
def test_an_unknown_peak_is_none_and_not_a_guess(kind, dtype):
    assert peak_flops(kind, dtype) is None


def test_every_gpu_is_found_by_the_kind_jax_reports():
    for gpu in GPUS.values():
        assert find_gpu(gpu.device_kind) is gpu


def test_fp32_peaks_follow_from_lanes_and_clock():
    # Two FLOPs per lane and cycle; the H100 and H200 data sheets round at a boost of 1.98 GHz.
    for gpu in GPUS.values():
        derived = 2 * gpu.num_sms * gpu.fp32_lanes_per_sm * gpu.clock_ghz * 1e9
        assert derived == pytest.approx(gpu.peak_fp32, rel=0.01)


def test_the_target_text_names_the_facts():
    text = target_config_text(GPUS["h200"])
    assert "device_memory_size: 151397597184" in text
    assert "core_count: 132" in text
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
