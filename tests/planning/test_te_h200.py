"""Train steps with products by TransformerEngine, compiled for H200: where it is installed."""

import sys

import pytest

from mtjax.config import Config, DataConfig, ModelConfig, QuantizeConfig, TrainConfig, validate
from mtjax.config import on_layout as config_on_layout
from mtjax.config.mesh import parse_layout
from mtjax.planner.program import build_step
from mtjax.planning.targets import parse_target
from mtjax.precision import te
from tests.planning.test_precision_h200 import (
    EMBED,
    FFN,
    GROUPED,
    KERNELS,
    LAYERS,
    ROWS,
    SEQ,
    assert_what_is_gathered_has_8_bits,
)
from tests.precision import stand_in


@pytest.fixture
def hopper(monkeypatch, h200_mesh):
    """TransformerEngine, told that it runs on a Hopper GPU."""
    te.library.cache_clear()
    monkeypatch.delenv("NVTE_JAX_CUSTOM_CALLS", raising=False)
    stand_in.skip_without_the_real_one()
    name = "get_device_compute_capability"
    for module in [m for n, m in sys.modules.items() if n.startswith("transformer_engine")]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda gpu_id=0: 90)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "layout", "target"),
    [
        ("fp8", "data=1", "h200:1x1"),
        ("fp8", "fsdp=2,tensor=4", "h200:1x8"),
        ("fp8_delayed", "fsdp=2,tensor=4", "h200:1x8"),
        ("fp8", "data=2,pipeline=2,tensor=2,microbatches=4", "h200:1x8"),
    ],
)
def test_every_product_of_the_layers_is_a_call_of_it(hopper, precision, layout, target):
    config = Config(
        model=ModelConfig(
            vocab_size=1024, embed_dim=EMBED, ffn_dim=FFN, num_layers=LAYERS, attention=GROUPED
        ),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(seq_len=SEQ, batch_size=ROWS),
        precision=precision,
        quantize=QuantizeConfig(backend="te"),
    )
    config = validate(config_on_layout(config, parse_layout(layout)))
    summary = build_step(config, parse_target(target)).program.summary
    assert not [g for g in summary.all_gemms if "DecoderBlock" in g.op_name]
    calls = [c for c in summary.custom_calls if c.target == "te_gemm_v2_ffi"]
    flops, formats = 0, set()
    for call in calls:
        lhs, _, rhs, *_ = call.operands
        assert lhs.dims[1] == rhs.dims[1]
        flops += call.executions * 2 * lhs.dims[0] * rhs.dims[0] * lhs.dims[1]
        formats.add((lhs.dtype, rhs.dtype))
    e4m3, e5m2 = "f8e4m3fn", "f8e5m2"
    assert formats == {(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)}
    devices = parse_target(target).num_devices
    if "pipeline" not in layout:  # idle ticks of a stage compute as well
        assert flops == 3 * 2 * ROWS * SEQ // devices * LAYERS * KERNELS
    if devices > 1:
        assert_what_is_gathered_has_8_bits(summary)
