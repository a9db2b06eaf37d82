"""GPU records, and those a user describes in TOML."""

import pytest

from mtjax.planning.gpus import GPUS, load_gpu
from mtjax.planning.targets import parse_target

PEAKS = {  # data sheets: dense bf16 TFLOP/s, memory GB/s, NVLink GB/s per direction, domain
    "a100-40": (312, 1555, 300, 8),
    "a100": (312, 2039, 300, 8),
    "h100": (989, 3352, 450, 8),
    "h200": (989, 4800, 450, 8),
    "b200": (2250, 7672, 900, 8),
    "gb200": (2500, 7928, 900, 72),
    "b300": (2250, 7936, 900, 8),
}


def test_the_records_hold_the_data_sheets():
    assert {
        name: (
            round(gpu.peak_bf16 / 1e12),
            round(gpu.memory_bandwidth / 1e9),
            round(gpu.nvlink_bandwidth / 1e9),
            gpu.nvlink_domain,
        )
        for name, gpu in GPUS.items()
    } == PEAKS


@pytest.mark.parametrize(
    ("target", "domain"), [("h200:4x8", 8), ("h200:4x4", 4), ("gb200:36x4", 72), ("gb200:2x4", 8)]
)
def test_a_domain_ends_at_the_host_or_at_the_rack(target, domain):
    assert parse_target(target).nvlink_domain == domain


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_compiles_a_product(name, h200_mesh):
    import jax
    import jax.numpy as jnp

    from mtjax.planning.compile import compile_for

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    program = compile_for(f"{name}:2x4", lambda x: x @ x, x)
    assert program.summary.gemm_flops == 2 * 256**3


def toml(tmp_path, text):
    path = tmp_path / "gpu.toml"
    path.write_text(text)
    return str(path)


def test_a_toml_file_changes_fields_of_a_record(tmp_path):
    path = toml(tmp_path, 'base = "h100"\nname = "slow"\nnetwork_bandwidth = 12500000000\n')
    target = parse_target(f"{path}:4x8")
    assert target.gpu.network_bandwidth == 12.5e9 and target.num_devices == 32
    assert target.gpu.peak_bf16 == GPUS["h100"].peak_bf16 and str(target) == "slow:4x8"


def test_a_toml_file_may_describe_a_gpu_alone(tmp_path):
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(GPUS["b200"]).items()
    }
    text = "\n".join(f"{k} = {v!r}" for k, v in fields.items())
    assert load_gpu(toml(tmp_path, text)) == GPUS["b200"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "h101"', "base: got 'h101'"),
        ('base = "h100"\nnetwork_bandwith = 1e9', "did you mean network_bandwidth"),
        ('base = "h100"\nnum_sms = 1.5', "expected a positive integer"),
        ('base = "h100"\nnum_sms = "many"', "expected a positive integer"),
        ('base = "h100"\nname = 3', "expected a text"),
        ('base = "h100"\nmemory_bandwidth = -1', "expected a positive number"),
        ('base = "h100"\ncompute_capability = [9]', "two integers"),
        ('name = "alone"', "missing"),
        ("name = ", "can't read"),
    ],
)
def test_a_wrong_toml_file_is_named_with_the_fix(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"gpu\.toml") as error:
        load_gpu(toml(tmp_path, text))
    assert message in str(error.value)
