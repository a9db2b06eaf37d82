"""Plans of Llama 3 8B on one host of H200, against closed formulas and textbook volumes."""

import dataclasses
import math

import pytest

from mtjax.config import MeshConfig, validate
from mtjax.planner.memory import estimate_memory
from mtjax.planner.program import build_step
from mtjax.planner.report import make_plan
from mtjax.planning.liveness import peak_temporaries
from mtjax.planning.targets import parse_target
from mtjax.recipes import load_recipe

pytestmark = pytest.mark.slow

H200 = parse_target("h200:1x8")
RECIPE = load_recipe("llama3_8b")[0]
LAYERS, EMBED, VOCAB, SEQ, ROWS, MICROBATCHES = 32, 4096, 128256, 8192, 512, 32
PARAMS = 8_030_261_248
BF16 = 2


def on_mesh(**sizes):
    return validate(dataclasses.replace(RECIPE, mesh=MeshConfig(**sizes)))


@pytest.fixture(
    scope="module",
    params=[
        {"fsdp": 8},
        pytest.param({"tensor": 8}, marks=pytest.mark.nightly),
        {"fsdp": 4, "tensor": 2},
    ],
    ids=str,
)
def planned(request, h200_mesh):
    """(config, compiled step, plan) of a mesh."""
    config = on_mesh(**request.param)
    step = build_step(config, H200)
    return config, step, make_plan(step, H200)


def test_the_parts_of_memory_sum_to_the_compiled_total(planned):
    _, step, plan = planned
    assert sum(plan.memory.parts.values()) == pytest.approx(plan.memory.total_bytes, rel=0.01)
    assert plan.memory.total_bytes == step.program.memory.total_bytes
    assert step.compute_bytes == pytest.approx(2 * PARAMS / 8, rel=0.001)
    # Masters and two moments in float32, over eight devices; norms are on each.
    state = plan.memory.parts["parameters"] + plan.memory.parts["optimizer state"]
    assert state == pytest.approx(12 * PARAMS / 8, rel=0.001)
    assert plan.memory.fits


def test_a_closed_formula_comes_within_a_tenth(planned):
    config, _, plan = planned
    estimate = sum(estimate_memory(config).values())
    assert estimate == pytest.approx(plan.memory.total_bytes, rel=0.1)


def test_lifetimes_explain_the_temporaries(planned):
    _, step, plan = planned
    peak = peak_temporaries(step.program.hlo)
    assert peak.num_bytes == pytest.approx(step.program.memory.temp_bytes, rel=0.03)
    # The input of each block, saved for its backward pass, is the largest.
    saved = LAYERS * ROWS * SEQ * EMBED * BF16 / MICROBATCHES / 8
    assert plan.memory.largest[0].num_bytes == pytest.approx(saved)


def test_traffic_has_the_textbook_volume(planned):
    config, step, _ = planned
    fsdp, tensor = config.mesh.fsdp, config.mesh.tensor
    summary = step.program.summary
    if fsdp > 1:
        # ZeRO-3: gather in forward and backward, scatter gradients, for each microbatch.
        weights = 3 * PARAMS * BF16 / tensor * MICROBATCHES * (fsdp - 1) / fsdp
        assert summary.wire_bytes("fsdp") == pytest.approx(weights, rel=0.05)
    if tensor > 1:
        # Sequence parallelism with full recomputation: per block 4 gathers and 4 scatters, and
        # 2 gathers and 1 scatter more when it runs again; 2 and 2 around embedding and head.
        tokens = ROWS * SEQ / fsdp
        passes = 11 * LAYERS + 4
        volume = passes * tokens * EMBED * BF16 * (tensor - 1) / tensor
        assert summary.wire_bytes("tensor") == pytest.approx(volume, rel=0.05)


def test_the_program_does_the_asked_products_and_no_others(planned):
    _, step, plan = planned
    assert plan.compute.warnings == ()
    done = sum(gemm.flops for gemm in step.program.summary.all_gemms)
    assert done == pytest.approx(plan.compute.asked_flops, rel=0.01)
    assert plan.compute.model_flops == pytest.approx(51.4704e9 * ROWS * SEQ / 8, rel=1e-5)
    assert set(plan.compute.by_dtype) <= {"bf16", "tf32"}
    assert plan.compute.by_dtype["bf16"] > 0.999 * plan.compute.hardware_flops


def test_the_time_is_the_sum_of_its_parts_and_above_the_compute_bound(planned):
    plan = planned[2]
    parts = sum(plan.time.kernels_s.values()) + sum(plan.time.exposed_s.values())
    assert parts == pytest.approx(plan.time.step_s)
    assert plan.time.step_s > plan.compute.hardware_flops / 989e12
    assert plan.time.mfu == pytest.approx(plan.compute.model_flops / plan.time.step_s / 989e12)
    assert math.isclose(plan.time.tokens_per_s * plan.time.step_s, ROWS * SEQ)
