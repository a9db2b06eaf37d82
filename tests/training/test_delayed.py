"""Scales that come from earlier steps: the state they live in, and what a run does with it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mtjax.checkpoint.manifest import CheckpointMismatch
from mtjax.config import QuantizeConfig
from mtjax.training import commands, loop
from mtjax.training.commands import evaluate
from mtjax.training.step import Limits
from tests.parity.layouts import by_name, run_steps
from tests.parity.test_precision import model
from tests.training.runs import assert_same, on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")

QUANTIZE = QuantizeConfig(compute="fp32", amax_history=2, statistics=True)
ONE = {"num_layers": 1, "dropout": 0.0, "attention": {"dropout": 0.0}}


@pytest.fixture(autouse=True)
def as_many_devices_as_the_mesh(monkeypatch):
    for module in (commands, loop):
        monkeypatch.setattr(module, "prepare_mesh", on_some_devices)


def histories(state):
    return by_name(state.delayed.histories["blocks"]["group0"]["block0"])


def steps(number, **changes):
    return run_steps(model("fp8_delayed", QUANTIZE, **ONE), "data=1", number, **changes)


def test_histories_hold_what_steps_found_and_scales_follow_one_step_later():
    states, metrics = zip(*(steps(number) for number in (1, 2, 3)), strict=True)
    for name, newest in histories(states[2]).items():
        assert newest.shape == (1, 2, 2)
        older = histories(states[1])[name]
        np.testing.assert_array_equal(newest[..., 1], older[..., 0])
        np.testing.assert_array_equal(older[..., 1], histories(states[0])[name][..., 0])
        assert (newest > 0).all()
    down = histories(states[1])["mlp.down.kernel"][0]
    assert metrics[1]["quantize/ffn_out_x_amax"] == down[0, 0]
    # Powers of two of max / 448 and max / 57344, upward.
    scales = 2.0 ** np.ceil(np.log2(down.max(axis=1) / [448, 57344]))
    found = [float(metrics[2][f"quantize/ffn_out_{operand}_scale"]) for operand in "xg"]
    assert found == pytest.approx(scales.tolist(), rel=1e-6)


def test_a_step_that_is_left_out_leaves_the_histories_alone():
    state, metrics = steps(1, limits=Limits(np.float32(0), np.float32(np.inf)))
    assert metrics["train/skipped"] == 1
    assert not any(leaf.any() for leaf in histories(state).values())


@pytest.mark.nightly
def test_clipping_does_not_reach_the_histories():
    config = model("fp8_delayed", QUANTIZE, **ONE)
    optimizer = dataclasses.replace(config.optimizer, clip_norm=0.1)
    state, metrics = run_steps(dataclasses.replace(config, optimizer=optimizer), "data=1", 1)
    assert metrics["train/grad_norm"] > 0.1, "nothing was clipped"
    for name, leaf in histories(state).items():
        np.testing.assert_array_equal(leaf, histories(steps(1)[0])[name])


def delayed(directory, **changes):
    return tiny(directory, precision="fp8_delayed", quantize__amax_history=3, **changes)


@pytest.mark.slow
def test_a_run_starts_with_scales_from_its_first_batch_and_resumes_bit_for_bit(tmp_path, capsys):
    straight = run(delayed(tmp_path / "straight", train__steps=4))
    assert "delayed scales start from the next batch" in capsys.readouterr().out
    for stop in (2, 4):
        resumed = run(delayed(tmp_path / "resumed", train__steps=stop))
    assert capsys.readouterr().out.count("delayed scales start") == 1
    resumed.metrics = [r for r in resumed.metrics if "train/loss" in r or r["step"] == 4]
    assert_same(resumed, straight)


@pytest.mark.slow
def test_another_recipe_starts_with_new_scales_and_says_so(tmp_path, capsys):
    run(delayed(tmp_path, train__steps=1))
    longer = {"train__steps": 2, "quantize__amax_history": 5}
    with pytest.raises(CheckpointMismatch, match=r"allow-changes quantize\.amax_history"):
        run(tiny(tmp_path, precision="fp8_delayed", **longer))
    allowed = {"checkpoint__allow_changes": ("quantize", "precision")}
    capsys.readouterr()
    run(tiny(tmp_path, precision="fp8_delayed", **longer, **allowed))
    assert "next batch: the checkpoint has none of this recipe" in capsys.readouterr().out
    done = run(tiny(tmp_path, precision="fp8", train__steps=3, **allowed))
    assert done.step == 3
    assert not any(name.startswith("delayed") for name in done.arrays)


@pytest.mark.slow
def test_a_layer_that_saturates_too_long_falls_back_and_stays_so(tmp_path, capsys, monkeypatch):
    """Scales that are 2^-12 of what they should be, in one of two layers."""
    from mtjax.training import step as step_module

    right = step_module.delayed_scales

    def wrong(config, boxes, state):
        return jax.tree.map(lambda s: s.at[1].multiply(2.0**-12), right(config, boxes, state))

    monkeypatch.setattr(step_module, "delayed_scales", wrong)
    changes = {
        "model__num_layers": 2,
        "quantize__fallback_ratio": 0.01,
        "quantize__fallback_steps": 2,
    }
    found = run(delayed(tmp_path, train__steps=5, **changes))
    message = "fell back to bf16 and stay there: layers 1"
    assert f"{message} (steps in a row" in capsys.readouterr().out
    counts = [r["quantize/saturated_layers"] for r in found.metrics if "train/loss" in r]
    assert counts[:2] == [0, 1]
    assert counts[-1] == 0
    evaluate(delayed(tmp_path, train__steps=5, **changes), "valid")
    assert f"{message}\n" in capsys.readouterr().out
    data_state = json.loads(next(tmp_path.glob("checkpoints/*5/data_state/metadata")).read_text())
    assert data_state["scaling"]["fallen"] == [1]
    found = run(delayed(tmp_path, train__steps=6, **changes))
    assert f"{message}\n" in capsys.readouterr().out
    counts = [r["quantize/saturated_layers"] for r in found.metrics if "train/loss" in r]
    assert counts[-1] == 0
