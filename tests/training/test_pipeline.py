"""Whole runs in a pipeline: saved on one layout and resumed on another, evaluated, sampled."""

import numpy as np
import pytest

from mtjax.training import loop
from tests.training.runs import assert_same, on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")

# Of 5 layers, so that some stages have fewer and layers are stored in pieces over the pipeline.
DEEP = {"model__num_layers": 5, "train__microbatches": 4}


@pytest.fixture(autouse=True)
def as_many_devices_as_the_mesh(monkeypatch):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)


@pytest.mark.slow
def test_a_checkpoint_of_four_stages_goes_on_with_fsdp_as_on_one_device(tmp_path, capsys):
    """So do the evaluations, and the samples drawn at the end of each run."""
    sample = {"train__sample_tokens": 8, "train__sample_prompt": "It is "}
    whole = run(tiny(tmp_path / "whole", train__steps=4, **DEEP, **sample))
    text = [line for line in capsys.readouterr().out.splitlines() if "sample: " in line]
    piped = run(tiny(tmp_path / "moved", train__steps=2, mesh__pipeline=4, **DEEP, **sample))
    assert piped.step == 2 and "sample: It is " in capsys.readouterr().out
    moved = run(tiny(tmp_path / "moved", train__steps=4, mesh__fsdp=2, **DEEP, **sample))
    assert text == [line for line in capsys.readouterr().out.splitlines() if "sample: " in line]
    for name, array in whole.arrays.items():
        np.testing.assert_allclose(moved.arrays[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    # Beside the losses, the evaluation that each of the runs ends with.
    expected = {r["step"]: r for r in whole.metrics if "train/loss" in r}
    for record in moved.metrics:
        if "train/loss" in record:
            loss = expected[record["step"]]["train/loss"]
            np.testing.assert_allclose(record["train/loss"], loss, rtol=1e-5)
    evaluations = [r["eval/loss"] for r in moved.metrics if "eval/loss" in r]
    assert len(evaluations) == 2, "one at the end of each leg"
    expected_loss = next(r["eval/loss"] for r in whole.metrics if "eval/loss" in r)
    np.testing.assert_allclose(evaluations[-1], expected_loss, rtol=1e-5)


@pytest.mark.nightly
def test_a_resumed_pipeline_is_the_one_that_never_stopped_bit_for_bit(tmp_path):
    mesh = {
        "mesh__pipeline": 2,
        "mesh__tensor": 2,
        "pipeline__schedule": "interleaved_1f1b",
        "pipeline__chunks": 2,
    }
    straight = run(tiny(tmp_path / "straight", train__steps=4, **DEEP, **mesh))
    for stop in (2, 4):
        resumed = run(tiny(tmp_path / "resumed", train__steps=stop, **DEEP, **mesh))
    resumed.metrics = [r for r in resumed.metrics if "train/loss" in r or r["step"] == 4]
    assert_same(resumed, straight)
