"""What ends a run early, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mtjax.operation.divergence import TrainingDiverged
from mtjax.training import loop
from mtjax.training.loop import Trainer
from tests.conftest import OPTIMIZATION
from tests.training.runs import Finished, as_flags, assert_same, on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_many_devices_as_the_mesh(monkeypatch):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)


@pytest.fixture
def short_text(tmp_path):
    """384 bytes, of which the training part holds 19 sequences of 16: two batches and a bit."""
    path = tmp_path / "short.txt"
    paragraphs = [f"Paragraph {i:02d} says it.\n\n" for i in range(16)]
    path.write_text("".join(paragraphs), encoding="utf-8")
    return str(path)


@pytest.fixture
def poison(monkeypatch):
    """`poison(step)` makes the loss and the gradients of that step, counted from 1, NaN."""
    compile_step = loop.compile_step

    def at(*steps):
        def poisoned(*args):
            compiled = compile_step(*args)

            def step(state, batch, limits):
                if int(state.step) + 1 in steps:
                    weights = batch.weights.at[0, 0, 0].set(np.nan)
                    batch = batch._replace(weights=jax.device_put(weights, batch.weights.sharding))
                return compiled.run(state, batch, limits)

            return compiled._replace(run=step)

        monkeypatch.setattr(loop, "compile_step", poisoned)

    return at


class Launched:
    """`launch.py train` in its own process, with one CPU device."""

    def __init__(self, directory, cache, **changes):
        changes = {"run__directory": str(directory)} | changes
        self._process = subprocess.Popen(
            [sys.executable, "launch.py", "--config", "tiny_gpt", *as_flags(**changes)],
            cwd=ROOT,
            env=os.environ | cache | {"XLA_FLAGS": OPTIMIZATION},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, path, *, timeout_s=60.0):
        """Until `path` exists, or the process has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not path.exists() and time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                pytest.fail(f"ended before {path}: {self._process.stderr.read()}")
            time.sleep(0.01)

    def send(self, number):
        self._process.send_signal(number)

    def end(self):
        """(exit code, stdout, stderr)"""
        out, err = self._process.communicate(timeout=120)
        return self._process.returncode, out, err


# Saves follow each other so closely that a signal finds the child within one, most likely.
SAVING = {"train__steps": 60, "checkpoint__every_steps": 1, "checkpoint__keep": 100}
REST = SAVING | {"checkpoint__every_steps": 0}


def test_sigterm_saves_and_the_same_command_ends_as_if_nothing_had_been(
    tmp_path, compilation_cache
):
    child = Launched(tmp_path / "stopped", compilation_cache, **SAVING)
    child.wait_for(tmp_path / "stopped" / "checkpoints" / "step_00000002")
    child.send(signal.SIGTERM)
    code, out, err = child.end()
    assert code == 0, err
    stopped = [line for line in out.splitlines() if line.startswith("stopped by SIGTERM after")]
    assert len(stopped) == 1 and stopped[0].endswith("saved. The same command resumes.")
    step = int(stopped[0].split("step ")[1].split(";")[0])
    assert 2 <= step < 60
    assert Trainer(tiny(tmp_path / "stopped", **REST)).checkpointer.latest_step() == step
    straight = run(tiny(tmp_path / "straight", **REST))
    assert_same(run(tiny(tmp_path / "stopped", **REST)), straight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_before_the_first_step_says_that_nothing_was_trained(
    tmp_path, compilation_cache, number
):
    child = Launched(tmp_path, compilation_cache)
    child.wait_for(tmp_path / "run.lock")
    child.send(number)
    code, out, err = child.end()
    assert code == 128 + number
    assert err.splitlines()[-1].startswith(f"{number.name}: ending at once: nothing was trained")
    assert "Traceback" not in err and "step " not in out


def test_kill_9_among_saves_leaves_a_usable_checkpoint_and_the_same_end(
    tmp_path, compilation_cache
):
    child = Launched(tmp_path / "killed", compilation_cache, **SAVING)
    child.wait_for(tmp_path / "killed" / "checkpoints" / "step_00000004")
    child.send(signal.SIGKILL)
    assert child.end()[0] == -signal.SIGKILL
    assert 4 <= Trainer(tiny(tmp_path / "killed", **REST)).checkpointer.latest_step() < 60
    straight = run(tiny(tmp_path / "straight", **REST))
    assert_same(run(tiny(tmp_path / "killed", **REST)), straight)


def test_sigterm_during_the_last_step_ends_the_run_as_usual(tmp_path, monkeypatch):
    config = tiny(tmp_path, train__steps=3, checkpoint__at_end=False)
    monkeypatch.setattr(loop.StopRequest, "agreed", lambda self: True)
    trainer = Trainer(tiny(tmp_path, train__steps=1))
    trainer.run()
    assert not trainer.stopped and Finished(trainer).metrics[-1]["eval/loss"] > 0
    trainer = Trainer(config)
    trainer.run()
    assert trainer.stopped and trainer.checkpointer.latest_step() == 2


@pytest.mark.parametrize("every_steps", [0, 3], ids=["saved-at-the-end", "saved-just-before"])
def test_exhausted_data_ends_the_run_with_a_save_and_an_evaluation(
    tmp_path, short_text, capsys, every_steps
):
    changes = {
        "train__steps": 50,
        "data__paths": (short_text,),
        "data__split": "80,20",
        "data__epochs": 1,
        "checkpoint__every_steps": every_steps,
    }
    finished = run(tiny(tmp_path, **changes))
    assert finished.step == 3
    assert "data is exhausted after step 3 of 50" in capsys.readouterr().out
    assert finished.metrics[-1]["step"] == 3 and "eval/loss" in finished.metrics[-1]
    records = (tmp_path / "metrics.jsonl").read_bytes()
    again = run(tiny(tmp_path, **changes))
    assert again.step == 3
    assert "is finished: the training data ended after step 3 of 50" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == records
    assert not (tmp_path / "checkpoints" / "superseded").exists()


def test_stop_names_step_and_batch_and_the_last_checkpoint_stays(tmp_path, poison):
    poison(4)
    with pytest.raises(TrainingDiverged) as error:
        run(tiny(tmp_path, train__steps=6, checkpoint__every_steps=2))
    for part in ("step 4: train/loss is nan", "batch: number 3 (from 0)", "on_bad_step skip"):
        assert part in str(error.value)
    assert Trainer(tiny(tmp_path, train__steps=6)).checkpointer.latest_step() == 2


def test_skip_counts_and_leaves_parameters_and_moments_as_they_were(tmp_path, poison):
    skip = {"run__faults__on_bad_step": "skip"}
    before = run(tiny(tmp_path / "run", train__steps=2, **skip))
    poison(3)
    after = run(tiny(tmp_path / "run", train__steps=3, **skip))
    assert after.step == 3
    for name, array in before.arrays.items():
        if name != "step":
            assert after.arrays[name].tobytes() == array.tobytes(), name
    third = next(r for r in after.metrics if r["step"] == 3)
    assert third["train/skipped"] == 1 and np.isnan(third["train/loss"])
    goes_on = run(tiny(tmp_path / "run", train__steps=5, **skip))
    assert goes_on.arrays["params.head.norm.scale"].tobytes() != (
        after.arrays["params.head.norm.scale"].tobytes()
    )
    assert all(np.isfinite(array).all() for array in goes_on.arrays.values())


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path, poison):
    poison(*range(2, 9))
    changes = {"run__faults__on_bad_step": "skip", "run__faults__max_skipped": 2}
    with pytest.raises(TrainingDiverged, match=r"step 4: .* 3 bad steps in a row"):
        run(tiny(tmp_path, train__steps=8, **changes))


def test_a_spike_is_left_out_and_the_next_step_goes_on(tmp_path, monkeypatch):
    """A gradient norm far above the median of the two before; the limit is set below it."""
    changes = {
        "run__faults__on_bad_step": "skip",
        "run__faults__spike_ratio": 1.5,
        "run__faults__spike_window": 2,
    }
    limits = loop.SpikeGuard.limits

    def tight(self):
        own = limits(self)
        return own | {"train/grad_norm": 1e-3} if len(seen) == 3 else own

    seen = []
    observe = loop.SpikeGuard.observe
    monkeypatch.setattr(loop.SpikeGuard, "limits", tight)
    monkeypatch.setattr(
        loop.SpikeGuard, "observe", lambda self, *a: seen.append(observe(self, *a)) or seen[-1]
    )
    finished = run(tiny(tmp_path, train__steps=5, **changes))
    assert seen == [True, True, True, False, True]
    skipped = [r["train/skipped"] for r in finished.metrics if "train/loss" in r]
    assert skipped == [0, 0, 0, 1, 0]


def test_a_huge_learning_rate_ends_the_command_with_code_1_and_one_message(
    tmp_path, compilation_cache
):
    child = Launched(
        tmp_path / "run",
        compilation_cache,
        optimizer__learning_rate=1e30,
        optimizer__clip_norm=1e9,
        train__steps=20,
    )
    code, _, err = child.end()
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: step ") and "batch: number " in last
    assert "mtjax/training/loop.py" not in err


def test_no_held_out_share_trains_without_evaluating(tmp_path):
    finished = run(tiny(tmp_path, train__steps=1, data__split="1,0,0"))
    assert [sorted(r) for r in finished.metrics if "eval/loss" in r] == []


def test_too_little_held_out_data_is_said_before_training(tmp_path, short_text):
    with pytest.raises(ValueError, match=r"data\.split"):
        Trainer(tiny(tmp_path / "run", data__paths=(short_text,), data__split="97,3"))
    assert not (tmp_path / "run" / "config.json").exists()
