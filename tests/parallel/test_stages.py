"""How layers are dealt out over stages, and the way there and back of their parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import AttentionConfig, ModelConfig, MoeConfig, PipelineConfig
from mtjax.config.pipeline import layers_per_stage
from mtjax.models.decoder import block_groups
from mtjax.parallel.stages import stack_stages, stage_layout, unstack_stages

MODEL = ModelConfig(embed_dim=16, ffn_dim=16, attention=AttentionConfig(num_heads=2))
INTERLEAVED = PipelineConfig(schedule="interleaved_1f1b", chunks=2)


def model(num_layers, windows=(), **moe):
    attention = dataclasses.replace(MODEL.attention, windows=windows)
    moe = MoeConfig(num_experts=4, **moe) if moe else MODEL.moe
    return dataclasses.replace(MODEL, num_layers=num_layers, attention=attention, moe=moe)


@pytest.mark.parametrize(
    ("num_layers", "windows", "pipeline", "stages", "expected"),
    [
        (8, (), PipelineConfig(), 4, (2, 2, 2, 2)),
        (7, (), PipelineConfig(), 4, (2, 2, 2, 1)),
        (5, (), PipelineConfig(), 4, (2, 1, 1, 1)),
        (8, (), INTERLEAVED, 2, (2, 2, 2, 2)),
        (9, (), INTERLEAVED, 2, (3, 2, 2, 2)),
        (7, (4, 0), PipelineConfig(), 2, (4, 3)),
        (5, (4, 0), PipelineConfig(), 2, (4, 1)),
        (12, (4, 4, 0), PipelineConfig(), 2, (6, 6)),
        (8, (), PipelineConfig(stage_layers=(1, 3, 3, 1)), 4, (1, 3, 3, 1)),
    ],
)
def test_layers_are_dealt_out_whole_patterns_first(num_layers, windows, pipeline, stages, expected):
    assert layers_per_stage(model(num_layers, windows), pipeline, stages) == expected


def numbered(config):
    """One leaf per block and group, holding the index of each layer."""
    return {
        f"group{i}": {
            f"block{p}": {
                "w": jnp.array([[100.0 + g.layer_index(r, p)] * 2 for r in range(g.repeat)])
            }
            for p in range(len(g.unit))
        }
        for i, g in enumerate(block_groups(config))
    }


@pytest.mark.parametrize(
    ("config", "pipeline", "stages"),
    [
        (model(8), PipelineConfig(), 4),
        (model(5), PipelineConfig(), 4),
        (model(8), INTERLEAVED, 2),
        (model(9), INTERLEAVED, 2),
        (model(7, (4, 0)), PipelineConfig(), 2),
        (model(11, (4, 4, 0)), PipelineConfig(), 3),
        (model(8), PipelineConfig(stage_layers=(1, 3, 3, 1)), 4),
        (model(8, first_dense=3), PipelineConfig(), 4),
        (model(9, (4, 0), first_dense=3, every=2), PipelineConfig(), 2),
        (model(7, every=2), INTERLEAVED, 2),
        (model(7, first_dense=1, every=2), PipelineConfig(stage_layers=(1, 4, 2)), 3),
    ],
)
def test_stages_hold_every_layer_once_in_the_order_of_the_model(config, pipeline, stages):
    layout = stage_layout(config, pipeline, stages)
    blocks = numbered(config)
    stacked = stack_stages(layout, blocks)
    layers, counts = [], []
    for chunk in range(pipeline.chunks):
        for stage in range(stages):
            here = [
                float(stacked[name][f"block{place}"]["w"][chunk, stage, unit, 0])
                for name, run in layout.runs.items()
                for unit in range(run.index_VSU.shape[2])
                for place in range(len(run.unit.unit))
                if run.real_VSUP[chunk, stage, unit, place]
            ]
            layers += here
            counts.append(len(here))
    assert layers == [100.0 + i for i in range(config.num_layers)]
    assert tuple(counts) == layers_per_stage(config, pipeline, stages)
    back = unstack_stages(layout, config, stacked)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, blocks))


def test_only_an_even_cut_with_one_chunk_leaves_layers_where_they_are():
    assert stage_layout(model(8), PipelineConfig(), 4).contiguous
    assert not stage_layout(model(7), PipelineConfig(), 4).contiguous
    assert not stage_layout(model(8), INTERLEAVED, 2).contiguous
