"""The GPUs we plan for: their facts, peak rates, and the text XLA needs to compile without one.

Sources: NVIDIA data sheets (A100 80GB SXM, H100 SXM, H200 SXM, HGX B200; dense rates, without
structured sparsity) and, for what a driver reports (memory, clock, cache), the target descriptions
that ship with XLA. Importing this module imports no jax.
"""

import difflib
import re
from dataclasses import dataclass

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
HALF_DTYPES = ("bfloat16", "float16")

CUDA_RUNTIME = "13.0.0"
"""CUDA runtime assumed. Without one XLA gives cuBLAS f16 in place of fp8 products, and no error."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Facts of one GPU model. Rates are per GPU, dense, in units per second."""

    name: str
    """Short name in targets, such as h200."""
    device_kind: str
    """What jax reports as device_kind, such as NVIDIA H200."""
    compute_capability: tuple[int, int]
    """Major and minor CUDA compute capability."""
    num_sms: int
    """Streaming multiprocessors."""
    fp32_lanes_per_sm: int
    """Single-precision lanes of one SM."""
    memory_bytes: int
    """Device memory the driver reports; a process sees a little less."""
    memory_bandwidth: float
    """Device memory, bytes per second."""
    l2_bytes: int
    """Level-2 cache."""
    shared_memory_per_sm_bytes: int
    """Shared memory of one SM."""
    shared_memory_per_block_bytes: int
    """Largest shared memory one block may opt in to."""
    clock_ghz: float
    """Boost clock."""
    peak_bf16: float
    """FLOP/s of bf16 and fp16 matrix products."""
    peak_fp8: float | None
    """FLOP/s of fp8 matrix products; None where there are none."""
    peak_tf32: float
    """FLOP/s of float32 matrix products on tensor cores, inputs rounded to tf32."""
    peak_fp32: float
    """FLOP/s of true float32 arithmetic."""
    nvlink_bandwidth: float
    """Bytes per second one GPU sends over NVLink, one direction."""
    network_bandwidth: float
    """Bytes per second one GPU sends to other hosts: one network card per GPU."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            device_kind="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            num_sms=108,
            fp32_lanes_per_sm=64,
            memory_bytes=85_100_068_864,
            memory_bandwidth=2.039e12,
            l2_bytes=40 * 2**20,
            shared_memory_per_sm_bytes=164 * 2**10,
            shared_memory_per_block_bytes=163 * 2**10,
            clock_ghz=1.41,
            peak_bf16=312e12,
            peak_fp8=None,
            peak_tf32=156e12,
            peak_fp32=19.5e12,
            nvlink_bandwidth=300e9,
            network_bandwidth=25e9,
        ),
        Gpu(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            num_sms=132,
            fp32_lanes_per_sm=128,
            memory_bytes=84_942_979_072,
            memory_bandwidth=3.352e12,
            l2_bytes=50 * 2**20,
            shared_memory_per_sm_bytes=228 * 2**10,
            shared_memory_per_block_bytes=227 * 2**10,
            clock_ghz=1.98,
            peak_bf16=989e12,
            peak_fp8=1979e12,
            peak_tf32=494e12,
            peak_fp32=67e12,
            nvlink_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        Gpu(
            name="h200",
            device_kind="NVIDIA H200",
            compute_capability=(9, 0),
            num_sms=132,
            fp32_lanes_per_sm=128,
            memory_bytes=151_397_597_184,
            memory_bandwidth=4.8e12,
            l2_bytes=50 * 2**20,
            shared_memory_per_sm_bytes=228 * 2**10,
            shared_memory_per_block_bytes=227 * 2**10,
            clock_ghz=1.98,
            peak_bf16=989e12,
            peak_fp8=1979e12,
            peak_tf32=494e12,
            peak_fp32=67e12,
            nvlink_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        Gpu(
            name="b200",
            device_kind="NVIDIA B200",
            compute_capability=(10, 0),
            num_sms=148,
            fp32_lanes_per_sm=128,
            memory_bytes=191_514_411_008,
            memory_bandwidth=7.672e12,
            l2_bytes=132_644_864,
            shared_memory_per_sm_bytes=228 * 2**10,
            shared_memory_per_block_bytes=227 * 2**10,
            clock_ghz=1.965,
            peak_bf16=2250e12,
            peak_fp8=4500e12,
            peak_tf32=1125e12,
            peak_fp32=75e12,
            nvlink_bandwidth=900e9,
            network_bandwidth=50e9,
        ),
    )
}
"""GPU models by short name."""


@dataclass(frozen=True)
class Target:
    """A cluster to plan for: `hosts` machines with `gpus_per_host` GPUs each."""

    gpu: Gpu
    hosts: int = 1
    gpus_per_host: int = 1

    @property
    def num_devices(self) -> int:
        """GPUs of the whole cluster."""
        return self.hosts * self.gpus_per_host

    def __str__(self) -> str:
        return f"{self.gpu.name}:{self.hosts}x{self.gpus_per_host}"


def parse_target(text: str) -> Target:
    """Reads "gpu:hosts x gpus per host", such as h200:32x8; "h200:8" is one host, "h200" one GPU.

    Raises:
        ValueError: unknown GPU (the closest name is given), or a malformed or empty size.
    """
    name, colon, size = text.strip().lower().partition(":")
    if name not in GPUS:
        close = difflib.get_close_matches(name, GPUS, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}?" if close else "take one of them"
        raise ValueError(
            f"target: got GPU {name!r} in {text!r}, expected one of {', '.join(GPUS)}; {hint}"
        )
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", size)
    hosts, gpus = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if colon and (hosts < 1 or gpus < 1):
        raise ValueError(
            f"target: got size {size!r} in {text!r}, expected <hosts>x<GPUs per host>, both at "
            f"least 1; write for example {name}:1x8"
        )
    return Target(GPUS[name], hosts, gpus) if colon else Target(GPUS[name])


def find_gpu(device_kind: str) -> Gpu | None:
    """The GPU a jax device_kind names, or None. Variants count as their chip (H100 NVL as H100)."""
    words = re.split(r"[^a-z0-9]+", device_kind.lower())
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def peak_flops(device_kind: str, dtype: object = "bfloat16") -> float | None:
    """Dense peak FLOP/s of matrix products in `dtype`, as MFU is reported against.

    Args:
        device_kind: `jax.Device.device_kind`, or a short name of GPUS.
        dtype: name of a dtype or anything with a `name` or `dtype`, such as jnp.bfloat16.

    Returns None for an unknown device or dtype, or where the device lacks it: MFU is then n/a.
    """
    gpu = find_gpu(device_kind)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = str(name or getattr(dtype, "dtype", dtype))
    if gpu is None:
        return None
    peaks = dict.fromkeys(HALF_DTYPES, gpu.peak_bf16) | dict.fromkeys(FP8_DTYPES, gpu.peak_fp8)
    return (peaks | {"tf32": gpu.peak_tf32, "float32": gpu.peak_fp32}).get(name)


def target_config_text(gpu: Gpu) -> str:
    """XLA's GpuTargetConfigProto in text form; only fields that jax 0.10.2 to 0.12 all know."""
    major, minor = gpu.compute_capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_sm_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.num_sms}
  fpus_per_core: {gpu.fp32_lanes_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  runtime_version: "{CUDA_RUNTIME}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.device_kind}"
"""
