"""A model grows or loses experts, and says what that did to its loss."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.checkpoint.manifest import CheckpointMismatch
from mtjax.config import AttentionConfig, ModelConfig, MoeConfig, TrainConfig, validate
from mtjax.config.mesh import MeshConfig
from mtjax.operation.metrics import read_metrics
from mtjax.parallel.stack import abstract_params, forward
from mtjax.sharding import unbox
from mtjax.training import loop
from mtjax.training.loop import Trainer
from mtjax.training.resize import choose, with_chosen
from tests.training.runs import on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")

SMALL = ModelConfig(
    vocab_size=60,
    embed_dim=16,
    num_layers=2,
    ffn_dim=24,
    attention=AttentionConfig(num_heads=2, backend="xla"),
    mlp_bias=True,
)


def hidden(moe, params):
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, 60)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    model = dataclasses.replace(SMALL, moe=moe)
    run = jax.jit(lambda params: forward(model, TrainConfig(), params, tokens, positions)[0])
    return run(params)


def drawn(moe):
    """Random parameters, biases included."""
    rng = np.random.default_rng(0)
    shapes = unbox(abstract_params(dataclasses.replace(SMALL, moe=moe)))
    return jax.tree.map(lambda s: np.float32(0.4 * rng.normal(size=s.shape)), shapes)


def by_name(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def resize(params, chosen, noise):
    return jax.jit(lambda p: with_chosen(p, chosen, noise, jax.random.key(1)))(params)


def copied(params, num, noise=0.0):
    """With `num` experts in each layer."""

    def index(units):
        return {n: choose(np.ones((2, u["moe"]["up"].shape[1])), num) for n, u in units.items()}

    chosen = {group: index(units) for group, units in params["blocks"].items()}
    return resize(params, chosen, noise)


@pytest.mark.parametrize(
    ("settings", "after", "same"),
    [
        ({"capacity_factor": 0.7}, {}, True),
        ({"renormalize": False, "dispatcher": "allgather"}, {}, True),
        ({"router": "softmax_after_topk", "router_bias": True}, {}, True),
        ({"router": "expert_choice", "renormalize": False}, {}, True),
        ({"router": "sigmoid", "renormalize": False}, {"routed_scale": 0.5}, True),
        # Two copies of the best expert in place of the best two.
        ({}, {"top_k": 2}, False),
        ({"router": "sigmoid", "renormalize": False}, {}, False),
    ],
)
def test_equal_copies_of_which_a_token_uses_as_many_more_leave_the_function(settings, after, same):
    """Twice the experts, each token with both copies of its two: as the documentation says."""
    before = MoeConfig(num_experts=4, top_k=2, **settings)
    params = drawn(before)
    moe = dataclasses.replace(before, **({"num_experts": 8, "top_k": 4} | after))
    ours, theirs = hidden(moe, copied(params, 8)), hidden(before, params)
    assert np.allclose(ours, theirs, atol=2e-5) == same


def test_noise_parts_the_copies_of_matrices_by_a_share_of_their_size():
    params = drawn(MoeConfig(num_experts=2, router_bias=True))
    equal, noisy = copied(params, 4), copied(params, 4, noise=0.05)
    for name in ("up", "gate", "down", "router.kernel", "up_bias", "router.logit_bias"):
        old, plain, new = (by_name(tree["blocks"]["group0"]["block0"]["moe"])[name] for tree in
                           (params, equal, noisy))  # fmt: skip
        dim = -1 if name.startswith("router") else 1
        for i in range(4):
            np.testing.assert_array_equal(
                np.take(plain, i, axis=dim), np.take(old, i // 2, axis=dim)
            )
        size = np.std(new - plain) / np.sqrt(np.mean(np.square(old)))
        assert size == pytest.approx(0 if name.endswith("bias") else 0.05, rel=0.2), name


def test_pruning_keeps_the_most_used_of_each_layer_in_their_order():
    load = np.array([[5.0, 9.0, 1.0, 7.0, 5.0], [0.0, 0.0, 3.0, 0.0, 0.0]])
    assert choose(load, 3).tolist() == [[0, 1, 3], [0, 1, 2]]
    params = drawn(MoeConfig(num_experts=5))
    chosen = {"group0": {"block0": choose(load, 3)}}
    pruned = resize(params, chosen, 0.5)
    own, old = (by_name(tree["blocks"]["group0"]["block0"]["moe"]) for tree in (pruned, params))
    np.testing.assert_array_equal(own["down"][0], old["down"][0, [0, 1, 3]])
    np.testing.assert_array_equal(own["up_bias"][1], old["up_bias"][1, [0, 1, 2]])
    np.testing.assert_array_equal(own["router.kernel"][0], old["router.kernel"][0][:, [0, 1, 3]])


LAYERS = {"model__num_layers": 2, "model__dropout": 0.0}
FOUR = {"model__moe__num_experts": 4, "model__moe__top_k": 1, **LAYERS}
STILL = {"train__steps": 1, "optimizer__learning_rate": 1e-12, **LAYERS}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with four experts."""
    folder = tmp_path_factory.mktemp("resize") / "four"
    with pytest.MonkeyPatch.context() as patch:
        result = run(tiny(folder, train__steps=3, **FOUR), patch)
    return folder, [r for r in result.metrics if "eval/loss" in r][-1]["eval/loss"], result


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(expert=8), marks=pytest.mark.slow),
        pytest.param(MeshConfig(expert=4, pipeline=2), marks=pytest.mark.nightly),
    ],
    ids=["experts", "pipeline"],
)
def test_a_run_with_twice_the_experts_goes_on_on_a_mesh_that_the_first_does_not_fit(
    source, tmp_path, capsys, mesh
):
    """Four experts don't split over eight devices, eight do; and stages hold some layers only."""
    folder, before, _ = source
    moe = {"model__moe__num_experts": 8, "model__moe__top_k": 2}
    start = {"checkpoint__resize_from": str(folder), "checkpoint__resize_noise": 0.0}
    config = tiny(tmp_path / "eight", mesh=mesh, **moe, **start, **STILL)
    Trainer(validate(config)).run()
    after = read_metrics(tmp_path / "eight" / "metrics.jsonl")
    assert [r for r in after if "eval/loss" in r][-1]["eval/loss"] == pytest.approx(
        before, rel=1e-5
    )
    report = capsys.readouterr().out
    assert f"experts: 4 -> 8 in each layer, from step 3 of {folder}" in report
    losses = re.search(r"loss over 8 batches: (\S+) nats/token before, (\S+) after", report)
    assert losses and losses[1] == losses[2]


@pytest.mark.slow
def test_a_pruned_run_starts_with_the_experts_that_its_report_names(source, tmp_path, capsys):
    folder, _, first = source
    config = tiny(
        tmp_path / "two",
        model__moe__num_experts=2,
        model__moe__top_k=1,
        checkpoint__resize_from=str(folder),
        **STILL,
    )
    with pytest.MonkeyPatch.context() as patch:
        result = run(config, patch)
    kept = re.search(r"kept (\d) (\d), which had (\d+)% of the tokens", capsys.readouterr().out)
    assert kept and int(kept[3]) >= 50
    index = [int(kept[1]), int(kept[2])]
    up, router = (f"params.blocks.group0.block0.moe.{name}" for name in ("up", "router.kernel"))
    np.testing.assert_allclose(result.arrays[up][0], first.arrays[up][0][index], atol=1e-6)
    expected = first.arrays[router][0][:, index]
    np.testing.assert_allclose(result.arrays[router][0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model__moe__num_experts": 4}, r"another number than in checkpoint.resize_from \(4\)"),
        ({"model__moe__num_experts": 6}, "a multiple of the 4 .*; take 8"),
        ({"model__moe__router": "sigmoid"}, "model.moe.router: got 'sigmoid', expected 'softmax'"),
        ({"model__moe__shared_ffn_dim": 8}, "model.moe.shared_ffn_dim: got 8, expected 0"),
        ({"model__norm_epsilon": 1e-3}, r"(?s)norm_epsilon: .*accept the change with"),
        ({"model__embed_dim": 24}, r"(?s)embed_dim: .*can't be allowed"),
    ],
)
def test_experts_that_do_not_come_of_those_before_are_refused(
    source, tmp_path, monkeypatch, settings, message
):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)
    moe = {"model__moe__num_experts": 8, "model__moe__top_k": 1}
    config = tiny(tmp_path, checkpoint__resize_from=str(source[0]), **STILL, **(moe | settings))
    with pytest.raises((ValueError, CheckpointMismatch), match=message):
        Trainer(validate(config)).run()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected empty for a dense model"),
        (FOUR | {"model__mtp__depth": 1}, "expected empty with model.mtp"),
        (FOUR | {"checkpoint__upcycle_from": "runs/y"}, "drop one of them"),
        (FOUR | {"checkpoint__resize_noise": -1.0}, "resize_noise: got -1.0"),
        (FOUR | {"checkpoint__resize_batches": 0}, "resize_batches: got 0"),
        (FOUR | {"checkpoint__resize_from": "", "checkpoint__resize_batches": 2}, "is empty"),
    ],
)
def test_settings_without_sense_are_refused_before_any_device(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        validate(tiny(tmp_path, **({"checkpoint__resize_from": "runs/x"} | settings)))


@pytest.mark.parametrize("option", ["resize_from", "upcycle_from"])
@pytest.mark.parametrize("made", [(), ("empty",), ("empty", "empty/checkpoints")])
def test_a_folder_without_a_checkpoint_is_refused_before_anything_is_compiled(
    tmp_path, option, made
):
    for name in made:
        (tmp_path / name).mkdir()
    source = {f"checkpoint__{option}": str(tmp_path / "empty")}
    config = tiny(tmp_path / "run", **source, **FOUR)
    with pytest.raises(ValueError, match=rf"{option}: got .*a run that saved a checkpoint"):
        Trainer(validate(dataclasses.replace(config, mesh=MeshConfig(data=8))))
