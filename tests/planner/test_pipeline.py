"""Plans of layouts with a pipeline."""

import dataclasses
import resource
import time

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PipelineConfig,
    TrainConfig,
    validate,
)
from mtjax.planner.memory import estimate_memory, saved_layers
from mtjax.planner.page import to_html
from mtjax.planner.program import build_step, compile_step_for
from mtjax.planner.report import make_plan
from mtjax.planner.text import to_text
from mtjax.planning.targets import parse_target
from mtjax.recipes import load_recipe

H200 = parse_target("h200:1x8")
LAYERS, EMBED, SEQ, STAGES, TENSOR, MICROBATCHES = 10, 256, 512, 4, 2, 64
CONFIG = validate(
    Config(
        model=ModelConfig(
            vocab_size=1024,
            embed_dim=EMBED,
            num_layers=LAYERS,
            ffn_dim=1024,
            attention=AttentionConfig(num_heads=8, head_dim=32),
        ),
        mesh=MeshConfig(pipeline=STAGES, tensor=TENSOR),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(
            seq_len=SEQ, batch_size=MICROBATCHES, microbatches=MICROBATCHES, remat="full"
        ),
    )
)


@pytest.fixture(scope="module")
def step(h200_mesh):
    return build_step(CONFIG, H200)


@pytest.fixture(scope="module")
def plan(step):
    return make_plan(step, H200, "small")


def test_the_stage_map_places_every_layer_once(plan):
    pipeline = plan.layout.pipeline
    assert sum(count for _, count in pipeline.layers) == LAYERS
    assert pipeline.layers == ((0, 3), (3, 3), (6, 2), (8, 2))
    text = to_text(plan)
    assert "stage 0: layers 0-2" in text and "stage 3: layers 8-9" in text


def test_the_bubble_follows_the_formula(plan):
    # (p - 1) / (m + p - 1), Narayanan et al. 2021; the schedule holds at most 2p - 1 microbatches.
    expected = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    assert plan.layout.pipeline.bubble_ratio == pytest.approx(expected)
    assert plan.layout.pipeline.num_slots == 2 * STAGES - 1
    assert f"bubble {expected:.1%}" in to_text(plan)


def test_activations_move_between_stages_in_the_textbook_volume(step):
    # Each microbatch's activations go on and their gradients come back, split over tensor.
    microbatch = SEQ * EMBED * 2 / TENSOR
    permutes = step.program.summary.collectives("collective-permute", axis="pipeline")
    sent = sum(c.wire_bytes * c.executions for c in permutes)
    assert sent == pytest.approx(2 * MICROBATCHES * microbatch, rel=0.05)
    assert all(c.is_async for c in permutes)


def test_the_page_draws_the_schedule(plan):
    page = to_html(plan)
    assert page.count("<svg") == 3 and "stage 3" in page


def test_the_formula_of_memory_knows_schedules():
    def saved(schedule, **changes):
        pipeline = PipelineConfig(schedule=schedule, **changes)
        return estimate_memory(dataclasses.replace(CONFIG, pipeline=pipeline))["saved activations"]

    # GPipe holds all microbatches, and idle stages write to one place more; 1F1B at most 2p - 1.
    assert saved("gpipe") / saved("1f1b") == pytest.approx((MICROBATCHES + 1) / (2 * STAGES - 1))


def test_the_formula_counts_places_that_hold_no_layer():
    """Layers 3, 3, 2, 2 by stage, the first three dense: 3 + 3 places, in each of 2p - 1 slots."""
    model = dataclasses.replace(CONFIG.model, moe=MoeConfig(num_experts=4, first_dense=3))
    assert saved_layers(dataclasses.replace(CONFIG, model=model)) == 7 * 6
    assert saved_layers(CONFIG) == 7 * 3


@pytest.mark.nightly
def test_chunks_of_layers_count_once_among_the_parameters_of_a_device(h200_mesh):
    pipeline = PipelineConfig(schedule="interleaved_1f1b", chunks=2)
    model = dataclasses.replace(CONFIG.model, num_layers=8)
    config = dataclasses.replace(CONFIG, model=model, pipeline=pipeline)
    train = dataclasses.replace(CONFIG.train, microbatches=4, batch_size=4)
    plan = make_plan(build_step(dataclasses.replace(config, train=train), H200), H200)
    layer = 4 * EMBED * EMBED + 3 * EMBED * 1024
    expected = (8 * layer + 2 * 1024 * EMBED) / 8
    assert plan.layout.params_per_device == pytest.approx(expected, rel=0.01)


@pytest.mark.nightly
def test_a_job_of_1024_gpus_is_planned_within_five_minutes_and_8_gb(h200_mesh):
    recipe = load_recipe("llama3_70b")[0]
    config = validate(
        dataclasses.replace(
            recipe,
            mesh=MeshConfig(data=16, pipeline=8, tensor=8),
            train=dataclasses.replace(recipe.train, microbatches=32),
        )
    )
    started_s = time.monotonic()
    found = compile_step_for(config, parse_target("h200:128x8"), 300)
    plan = make_plan(found, parse_target("h200:128x8"), "large")
    assert time.monotonic() - started_s < 300
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 8 * 2**20
    assert plan.layout.num_devices == 1024 and plan.memory.fits
    state = plan.memory.parts["parameters"] + plan.memory.parts["optimizer state"]
    assert state == pytest.approx(12 * 70_553_706_496 / 1024, rel=0.01)
