"""The clusters we plan for, and the text XLA needs to compile for a GPU without one.

Importing this module imports no jax.
"""

import difflib
import re
from dataclasses import dataclass

from mtjax.planning.gpus import GPUS, Gpu, load_gpu

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
HALF_DTYPES = ("bfloat16", "float16")

CUDA_RUNTIME = "13.0.0"
"""CUDA runtime assumed. Without one XLA gives cuBLAS f16 in place of fp8 products, and no error."""

CUDNN = (9, 21)
"""cuDNN assumed. Without one XLA multiplies tiles with scales as wide numbers, and no error."""


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

    @property
    def nvlink_domain(self) -> int:
        """GPUs, numbered host by host, that reach each other over NVLink."""
        if self.gpu.nvlink_domain <= self.gpu.max_gpus_per_host:
            return self.gpus_per_host
        return min(self.gpu.nvlink_domain, self.num_devices)

    def __str__(self) -> str:
        return f"{self.gpu.name}:{self.hosts}x{self.gpus_per_host}"


def parse_target(text: str) -> Target:
    """Reads "gpu:hosts x gpus per host", such as h200:32x8; "h200:8" is one host, "h200" one GPU.

    In place of a GPU's name stands the path of a TOML file that describes one: my_gpu.toml:4x8.

    Raises:
        ValueError: unknown GPU (the closest name is given), or a malformed or empty size.
    """
    name, colon, size = text.strip().rpartition(":")
    if not colon:
        name, size = size, ""
    if name.endswith(".toml"):
        gpu = load_gpu(name)
    elif name.lower() in GPUS:
        gpu = GPUS[name.lower()]
    else:
        close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}?" if close else "take one of them"
        raise ValueError(
            f"target: got GPU {name!r} in {text!r}, expected one of {', '.join(GPUS)} or a TOML "
            f"file; {hint}"
        )
    match = re.fullmatch(r"(?:(\d+)[xX])?(\d+)", size)
    hosts, gpus = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if colon and (hosts < 1 or gpus < 1):
        raise ValueError(
            f"target: got size {size!r} in {text!r}, expected <hosts>x<GPUs per host>, both at "
            f"least 1; write for example {name}:1x8"
        )
    if gpus > gpu.max_gpus_per_host:
        most = gpu.max_gpus_per_host
        raise ValueError(
            f"target: got {gpus} GPUs per host in {text!r}, expected at most {most} for "
            f"{gpu.name}; write for example {name}:{max(1, hosts * gpus // most)}x{most}"
        )
    return Target(gpu, hosts, gpus) if colon else Target(gpu)


def find_gpu(device_kind: str) -> Gpu | None:
    """The GPU a jax device_kind names, or None. Variants count as their chip (H100 NVL as H100)."""
    if device_kind in GPUS:
        return GPUS[device_kind]
    exact = next((gpu for gpu in GPUS.values() if gpu.device_kind == device_kind), None)
    words = re.split(r"[^a-z0-9]+", device_kind.lower())
    return exact or next((gpu for name, gpu in GPUS.items() if name in words), None)


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
  dnn_version: "{CUDNN[0]}.{CUDNN[1]}.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
device_description_str: "{gpu.device_kind}"
"""
