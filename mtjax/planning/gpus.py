"""Facts of the GPUs we plan for, one record each.

Sources: NVIDIA data sheets (A100 SXM, H100 SXM, H200 SXM, HGX B200, GB200 NVL72, HGX B300; dense
rates, without structured sparsity) and, for what a driver reports (memory, clock, cache), the
target descriptions that ship with XLA. Importing this module imports no jax.
"""

import difflib
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


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
    peak_fp4: float | None
    """FLOP/s of fp4 matrix products; None where there are none."""
    peak_int8: float
    """Operations per second of int8 matrix products."""
    peak_tf32: float
    """FLOP/s of float32 matrix products on tensor cores, inputs rounded to tf32."""
    peak_fp32: float
    """FLOP/s of true float32 arithmetic."""
    nvlink_bandwidth: float
    """Bytes per second one GPU sends over NVLink, one direction."""
    nvlink_domain: int
    """GPUs that reach each other over NVLink: those of one host, or of a rack."""
    max_gpus_per_host: int
    """Largest number of GPUs that one host is built with."""
    network_bandwidth: float
    """Bytes per second one GPU sends beyond its NVLink domain: one network card per GPU."""


HOPPER = Gpu(
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
    peak_fp4=None,
    peak_int8=1979e12,
    peak_tf32=494e12,
    peak_fp32=67e12,
    nvlink_bandwidth=450e9,
    nvlink_domain=8,
    max_gpus_per_host=8,
    network_bandwidth=50e9,
)
AMPERE = replace(
    HOPPER,
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
    peak_int8=624e12,
    peak_tf32=156e12,
    peak_fp32=19.5e12,
    nvlink_bandwidth=300e9,
    network_bandwidth=25e9,
)
BLACKWELL = replace(
    HOPPER,
    name="b200",
    device_kind="NVIDIA B200",
    compute_capability=(10, 0),
    num_sms=148,
    memory_bytes=191_514_411_008,
    memory_bandwidth=7.672e12,
    l2_bytes=132_644_864,
    clock_ghz=1.965,
    peak_bf16=2250e12,
    peak_fp8=4500e12,
    peak_fp4=9000e12,
    peak_int8=4500e12,
    peak_tf32=1125e12,
    peak_fp32=75e12,
    nvlink_bandwidth=900e9,
)

GPUS = {
    gpu.name: gpu
    for gpu in (
        replace(
            AMPERE,
            name="a100-40",
            device_kind="NVIDIA A100-SXM4-40GB",
            memory_bytes=42_331_013_120,
            memory_bandwidth=1.555e12,
        ),
        AMPERE,
        HOPPER,
        replace(
            HOPPER,
            name="h200",
            device_kind="NVIDIA H200",
            memory_bytes=151_397_597_184,
            memory_bandwidth=4.8e12,
        ),
        BLACKWELL,
        replace(
            BLACKWELL,
            name="gb200",
            device_kind="NVIDIA GB200",
            num_sms=152,
            memory_bytes=197_897_748_480,
            memory_bandwidth=7.928e12,
            l2_bytes=135_528_448,
            clock_ghz=2.062,
            peak_bf16=2500e12,
            peak_fp8=5000e12,
            peak_fp4=10000e12,
            peak_int8=5000e12,
            peak_tf32=1250e12,
            peak_fp32=80e12,
            nvlink_domain=72,
            max_gpus_per_host=4,
        ),
        replace(
            BLACKWELL,
            name="b300",
            device_kind="NVIDIA B300",
            compute_capability=(10, 3),
            num_sms=158,
            memory_bytes=297_021_865_984,
            memory_bandwidth=7.936e12,
            l2_bytes=135_528_448,
            peak_fp4=13500e12,
            peak_fp32=79.5e12,  # from lanes and clock
            peak_int8=187.5e12,
            network_bandwidth=100e9,
        ),
    )
}
"""GPU models by short name."""


def load_gpu(path: str | Path) -> Gpu:
    """A GPU from a TOML file: fields of Gpu, and `base`, the short name of the model to start from.

    Raises:
        ValueError: no such file, not TOML, an unknown or missing field, or a value of another type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"target: can't read {str(path)!r} as a GPU in TOML ({error}); see docs/plan.md"
        ) from error
    base_name = values.pop("base", None)
    if base_name is not None and base_name not in GPUS:
        raise ValueError(f"{path}: base: got {base_name!r}, expected one of {', '.join(GPUS)}")
    base = GPUS.get(base_name)
    known = [f.name for f in fields(Gpu)]
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"fields are {', '.join(known)}"
            raise ValueError(f"{path}: got field {name!r}, expected a field of a GPU; {hint}")
        values[name] = _checked(path, name, value)
    if base is not None:
        return replace(base, **values)
    missing = [name for name in known if name not in values]
    if missing:
        raise ValueError(
            f"{path}: {', '.join(missing)} missing; give them, or base = one of {', '.join(GPUS)}"
        )
    return Gpu(**values)


def _checked(path: str | Path, name: str, value: Any) -> Any:
    """The value of a field, in the type of the H100's record."""
    if name == "compute_capability":
        if isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value):
            return tuple(value)
        raise ValueError(f"{path}: {name}: got {value!r}, expected two integers such as [9, 0]")
    example = 1.0 if name.startswith("peak_") else getattr(HOPPER, name)
    if isinstance(example, str):
        if isinstance(value, str):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        if isinstance(example, float):
            return float(value)
        if value == int(value):
            return int(value)
    kind = {str: "a text", int: "a positive integer", float: "a positive number"}[type(example)]
    raise ValueError(f"{path}: {name}: got {value!r}, expected {kind}")
