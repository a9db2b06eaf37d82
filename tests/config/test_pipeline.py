"""What doesn't fit a pipeline is refused before any device is touched, with the fix."""

import dataclasses

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PipelineConfig,
    TrainConfig,
    on_layout,
    validate,
)
from mtjax.config.mesh import parse_layout


def config(num_stages=4, model=(), train=(), windows=(), **pipeline):
    return Config(
        model=ModelConfig(
            **({"num_layers": 8} | dict(model)), attention=AttentionConfig(windows=windows)
        ),
        train=TrainConfig(**({"microbatches": 8} | dict(train))),
        mesh=MeshConfig(pipeline=num_stages),
        pipeline=PipelineConfig(**pipeline),
    )


INTERLEAVED = {"schedule": "interleaved_1f1b", "chunks": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"num_layers": 3}},
            r"model.num_layers: got 3, expected at least 4 layers.*; shrink mesh.pipeline",
        ),
        (
            {"windows": (64, 0), "model": {"num_layers": 6}},
            r"model.num_layers: got 6, expected at least 4 repeats of the pattern of layers \(2",
        ),
        (
            {"train": {"microbatches": 2}, **INTERLEAVED},
            r"train.microbatches: got 2, expected a multiple of mesh.pipeline \(4\).*; change",
        ),
        (
            {"model": {"num_layers": 7}, **INTERLEAVED},
            r"model.num_layers: got 7, expected at least 8 layers",
        ),
        (
            {"stage_layers": (4, 4)},
            r"pipeline.stage_layers: got \(4, 4\), expected 4 numbers: mesh.pipeline \(4\) x",
        ),
        (
            {"stage_layers": (2, 2, 2, 3)},
            r"expected a sum of model.num_layers \(8\); place every layer exactly once",
        ),
        (
            {"windows": (64, 0), "stage_layers": (1, 3, 2, 2)},
            r"expected whole repeats of the pattern of layers \(2 layers\) on all stages but",
        ),
        (
            {"num_stages": 1, "schedule": "gpipe"},
            r"pipeline.schedule: got .gpipe., expected the default .* while mesh.pipeline is 1",
        ),
        (
            {"model": {"vocab_multiple": 6}},
            r"model.vocab_multiple: got 6, expected a multiple of mesh.pipeline x mesh.tensor",
        ),
        (
            {"train": {"remat": "selective", "remat_offload": ("block_out",), "microbatches": 8}},
            r"train.remat_offload: got \('block_out',\), expected \(\) with a pipeline",
        ),
        (
            {"model": {"moe": MoeConfig(num_experts=4, every=2)}, "stage_layers": (1, 3, 2, 2)},
            r"expected whole repeats of the pattern of layers \(2 layers\) on all stages but the",
        ),
    ],
)
def test_what_does_not_fit_a_pipeline_is_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config(**changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "1f2b"}, "pipeline.schedule: got '1f2b', expected one of 1f1b, inter"),
        ({"chunks": 2}, "pipeline.chunks: got 2, expected 1 with schedule 1f1b"),
        ({"schedule": "interleaved_1f1b"}, "got 1, expected 2 or more with schedule interleaved"),
        ({"stage_layers": (4, 0)}, "expected at least one layer on each stage"),
    ],
)
def test_pipeline_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PipelineConfig(**settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"microbatches": 2}},
        {"model": {"num_layers": 5}},
        {"schedule": "gpipe"},
        INTERLEAVED,
        {"windows": (64, 0), "model": {"num_layers": 7}},
        {"model": {"moe": MoeConfig(num_experts=4), "num_layers": 5}},
        {"windows": (64, 0), "model": {"moe": MoeConfig(num_experts=4, every=2)}},
        {"model": {"moe": MoeConfig(num_experts=4, first_dense=3)}},
        {"num_stages": -1, "schedule": "gpipe"},
    ],
)
def test_what_fits_is_taken(changes):
    validate(config(**changes))


def test_a_layout_chooses_the_schedule_and_drops_it_where_there_is_no_pipeline():
    base = config(schedule="gpipe")
    chosen = on_layout(base, parse_layout("pipeline=2,chunks=4,microbatches=4"))
    assert chosen.pipeline == PipelineConfig(schedule="interleaved_1f1b", chunks=4)
    assert (chosen.mesh.pipeline, chosen.train.microbatches) == (2, 4)
    assert on_layout(base, parse_layout("pipeline=8")).pipeline.schedule == "gpipe"
    assert on_layout(base, parse_layout("fsdp=2")).pipeline == PipelineConfig()
    by_name = on_layout(dataclasses.replace(base), parse_layout("pipeline=2,schedule=1f1b"))
    assert by_name.pipeline == PipelineConfig()


def test_an_unknown_schedule_in_a_layout_is_refused():
    with pytest.raises(ValueError, match=r"got schedule 'dualpipe'.*expected one of 1f1b"):
        parse_layout("pipeline=2,schedule=dualpipe")
