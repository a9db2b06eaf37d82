"""A pipeline computes what one device does: every schedule, uneven layers, whatever else is split.

Float32 throughout; dropout, a z-loss and uneven weights are in the base model.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.checkpoint.manager import Checkpointer
from mtjax.checkpoint.manifest import build_manifest
from mtjax.config import CheckpointConfig, PipelineConfig
from mtjax.training.state import create_state
from mtjax.training.step import dropout_key, evaluation_loss, loss_and_gradients
from tests.parity.layouts import (
    COMPILER_OPTIONS,
    SEQ,
    TOLERANCE,
    assert_close,
    assert_gradients_are_those_of_one_device,
    by_name,
    changed,
    on_layout,
    place,
    run_steps,
)
from tests.parity.test_layouts import drawn


def deep(num_layers, **changes):
    return changed(num_layers=num_layers, **changes)


GPT2 = deep(
    5,
    attention={"qkv_bias": True, "out_bias": True},
    position="learned",
    max_positions=SEQ,
    norm="layernorm",
    activation="gelu",
    mlp_bias=True,
    tied_embeddings=True,
)
MODELS = {
    "8 layers": deep(8),
    "GPT-2, 5 layers": GPT2,
    "packed, a window pattern, 7 layers": deep(7, attention={"windows": (5, 0)}, packed=True),
    "8 layers by hand": dataclasses.replace(
        deep(8), pipeline=PipelineConfig(stage_layers=(1, 3, 3, 1))
    ),
    "8 layers, full remat": deep(8, train={"remat": "full"}),
    "8 layers, selective remat": deep(8, train={"remat": "selective", "unroll_layers": True}),
    "post-norm, soft cap": deep(
        4, attention={"logit_softcap": 2.0}, post_norm=True, embed_scale=True, logit_softcap=3.0
    ),
}
CASES = [
    ("8 layers", "pipeline=4,tensor=2,schedule=gpipe,microbatches=4"),
    ("8 layers", "data=2,pipeline=2,tensor=2,chunks=2,microbatches=4"),
    ("GPT-2, 5 layers", "pipeline=4,tensor=2,microbatches=4"),
]
NIGHTLY = [
    ("8 layers", "pipeline=8,microbatches=4"),
    ("8 layers", "data=2,pipeline=4,microbatches=8"),
    ("8 layers", "pipeline=2,fsdp=2,tensor=2,microbatches=4"),
    ("packed, a window pattern, 7 layers", "data=2,pipeline=2,fsdp=2,microbatches=4"),
    ("8 layers by hand", "pipeline=4,tensor=2,microbatches=4"),
    ("8 layers, selective remat", "pipeline=2,tensor=2,fsdp=2,chunks=2,microbatches=4"),
    ("8 layers", "pipeline=2,microbatches=4"),
    ("8 layers", "pipeline=4,microbatches=1"),
    ("8 layers", "pipeline=4,tensor=2,microbatches=8"),
    ("8 layers", "pipeline=2,schedule=gpipe,microbatches=8"),
    ("8 layers", "data=2,pipeline=4,schedule=gpipe,microbatches=2"),
    ("8 layers", "pipeline=2,chunks=4,microbatches=4"),
    ("8 layers", "pipeline=4,fsdp=2,chunks=2,microbatches=8"),
    ("8 layers by hand", "data=2,pipeline=4,schedule=gpipe,microbatches=4"),
    ("8 layers, full remat", "pipeline=4,fsdp=2,microbatches=8"),
    ("8 layers, full remat", "pipeline=4,schedule=gpipe,microbatches=4"),
    ("GPT-2, 5 layers", "pipeline=2,data=2,tensor=2,chunks=2,microbatches=8"),
    ("GPT-2, 5 layers", "fsdp=2,pipeline=4,schedule=gpipe,microbatches=4"),
    ("packed, a window pattern, 7 layers", "pipeline=4,tensor=2,microbatches=8"),
    ("post-norm, soft cap", "pipeline=4,tensor=2,microbatches=4"),
]
ALL = [
    *CASES[:1],
    *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:]),
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY),
]


@pytest.mark.parametrize(("model", "layout"), ALL)
def test_loss_and_gradients_are_those_of_one_device(model, layout):
    assert_gradients_are_those_of_one_device(MODELS[model], layout)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20, 26))
def test_a_random_model_in_a_random_pipeline_agrees_with_one_device(seed):
    config, layout = drawn(seed)
    parts = dict(part.split("=") for part in layout.split(","))
    stages = 2 if seed % 2 else 4
    tensor = min(int(parts["tensor"]), 8 // stages)
    model = dataclasses.replace(config.model, num_layers=stages * 2 + seed % 3)
    layout = f"pipeline={stages},tensor={tensor},data={8 // stages // tensor},microbatches=4"
    assert_gradients_are_those_of_one_device(dataclasses.replace(config, model=model), layout)


@pytest.fixture(scope="module")
def born_on_one_device():
    return jax.device_get(create_state(*on_layout(GPT2, "data=1")))


@pytest.mark.parametrize(
    "layout", ["pipeline=4,tensor=2,microbatches=4", "data=2,pipeline=2,fsdp=2,microbatches=4"]
)
def test_initial_states_are_bit_equal(layout, born_on_one_device):
    """Of 5 layers, so that they are stored in pieces over the pipeline."""
    state = by_name(jax.device_get(create_state(*on_layout(GPT2, layout))))
    for name, leaf in by_name(born_on_one_device).items():
        assert np.array_equal(state[name], leaf), f"initial {name} differs"


@pytest.mark.parametrize("layers", [4, 5])
def test_each_device_stores_its_part_of_the_layers_alone(layers):
    """Evenly cut layers by layer, others in pieces; embedding and head by vocabulary."""
    setup = on_layout(deep(layers), "data=2,pipeline=4,microbatches=4")[2]
    for path, leaf in jax.tree_util.tree_leaves_with_path(setup.abstract.params):
        local = np.prod(leaf.sharding.shard_shape(leaf.shape))
        assert local == np.prod(leaf.shape) // 8, jax.tree_util.keystr(path)


def computed(function, config, mesh, *args):
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*args)
        return jax.device_get(lowered.compile(compiler_options=COMPILER_OPTIONS)(*args))


@pytest.mark.parametrize(
    "layout",
    [
        "data=2,pipeline=2,tensor=2,chunks=2,microbatches=4",
        pytest.param("pipeline=4,fsdp=2,microbatches=2", marks=pytest.mark.nightly),
    ],
)
def test_an_evaluation_in_a_pipeline_has_the_loss_of_one_device(layout):
    losses = []
    for text in (layout, "data=1"):
        config, mesh, setup, state, batch = place(deep(8), text)

        def run(params, batch, config=config, mesh=mesh, setup=setup):
            return evaluation_loss(config, setup, mesh, params, batch)

        losses.append(computed(run, config, mesh, state.params, batch))
    np.testing.assert_allclose(losses[0], losses[1], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "active"),
    [
        ("pipeline=4,microbatches=8", 3),
        pytest.param("pipeline=2,chunks=2,microbatches=8", 3, marks=pytest.mark.nightly),
        pytest.param("pipeline=4,schedule=gpipe,microbatches=8", 5, marks=pytest.mark.nightly),
    ],
)
def test_a_batch_ramp_leaves_out_the_microbatches_without_data(layout, active):
    """Their weights are garbage: the gradients are those of the microbatches before them."""
    no_dropout = deep(8, attention={"dropout": 0.0}, dropout=0.0)
    config, mesh, setup, state, batch = place(no_dropout, layout)
    rest = batch.weights.at[active:]
    poisoned = batch._replace(weights=rest.set(jnp.nan), active=jnp.int32(active))
    alone = batch._replace(weights=rest.set(0.0))

    def gradients(params, batch):
        key = dropout_key(config, 0)
        return loss_and_gradients(config, setup, mesh, params, batch, key, 0.01)[1]

    got = computed(gradients, config, mesh, state.params, poisoned)
    assert_close(got, computed(gradients, config, mesh, state.params, alone), TOLERANCE)


@pytest.mark.parametrize("layers", [5, 8])
def test_a_checkpoint_of_a_pipeline_restores_bit_by_bit_on_any_other_layout(layers, tmp_path):
    config, _, _, state, _ = place(deep(layers), "pipeline=4,microbatches=4")
    manifest = build_manifest(dataclasses.asdict(config), config.mesh.sizes)
    with Checkpointer(tmp_path, CheckpointConfig(), manifest) as checkpointer:
        checkpointer.save(1, state, {}, wait=True)
        for layout in ("fsdp=2", "pipeline=2,tensor=2,chunks=2,microbatches=4"):
            other = on_layout(deep(layers), layout)[2]
            restored, _ = checkpointer.restore(other.abstract, 1)
            assert jax.tree.all(jax.tree.map(np.array_equal, restored, state))
            for leaf, abstract in zip(
                jax.tree.leaves(restored), jax.tree.leaves(other.abstract), strict=True
            ):
                assert leaf.sharding == abstract.sharding


@pytest.mark.slow
def test_a_pipeline_trains_as_one_device_does():
    """Two whole steps, moments and clipping included; metrics agree to float32 rounding."""
    config = deep(4)
    state, metrics = run_steps(config, "data=2,pipeline=2,fsdp=2,microbatches=4", 2)
    expected, expected_metrics = run_steps(config, "data=1", 2)
    for key in ("train/loss", "train/cross_entropy", "train/grad_norm", "train/weight"):
        np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=TOLERANCE)
    assert_close(state.params, expected.params, 1e-4)
