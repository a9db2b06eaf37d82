"""Two processes, connected by gloo, train as one process with the same devices does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mtjax.operation.distributed import EXIT_PEER
from mtjax.operation.faults import EXIT_HANG
from mtjax.training import loop
from mtjax.training.loop import Trainer
from tests.training.runs import as_flags, learning_metrics, on_some_devices, run, tiny

pytestmark = pytest.mark.usefixtures("compilation_cache")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_many_devices_as_the_mesh(monkeypatch):
    monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)


@pytest.fixture
def start_two(compilation_cache):
    """`start(directory, **changes)` starts two processes of a training; `ids` leaves one out."""
    started = []

    def start(directory, *, ids=(0, 1), **changes):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        distributed = {
            "run__directory": str(directory),
            "run__distributed__mode": "explicit",
            "run__distributed__coordinator": f"127.0.0.1:{port}",
            "run__distributed__num_processes": 2,
            "run__distributed__heartbeat_timeout_s": 60,
        }
        flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
        for number in ids:
            own = distributed | {"run__distributed__process_id": number} | changes
            started.append(
                subprocess.Popen(
                    [sys.executable, "launch.py", "--config", "tiny_gpt", *as_flags(**own)],
                    cwd=ROOT,
                    env=os.environ | compilation_cache | {"XLA_FLAGS": flags},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def launch_two(start_two):
    """The same, until they end: [(exit code, stdout, stderr)]."""

    def launch(*args, timeout_s=200, **changes):
        ends = [(p.communicate(timeout=timeout_s), p) for p in start_two(*args, **changes)]
        return [(process.returncode, out, err) for (out, err), process in ends]

    return launch


def losses(directory):
    return [r["train/loss"] for r in learning_metrics(directory) if "train/loss" in r]


SAMPLE = {"train__sample_tokens": 4, "train__sample_prompt": "It is "}


PIPELINE = {"mesh__pipeline": 2, "train__microbatches": 4, "model__num_layers": 3}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"mesh__data": 2} | SAMPLE, marks=pytest.mark.slow),
        pytest.param({"mesh__fsdp": 2}, marks=pytest.mark.nightly),
        pytest.param(PIPELINE, marks=pytest.mark.slow),
        pytest.param(PIPELINE | SAMPLE, marks=pytest.mark.nightly),
    ],
)
def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(
    tmp_path, launch_two, mesh
):
    ends = launch_two(tmp_path / "two", train__steps=4, **mesh)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2] + ends[1][2]
    assert ("sample: It is " in ends[0][1]) == ("train__sample_tokens" in mesh)
    assert "step " in ends[0][1] and "step " not in ends[1][1]
    mesh = {name: size for name, size in mesh.items() if name not in SAMPLE}
    one = run(tiny(tmp_path / "one", train__steps=6, **mesh))
    together = losses(tmp_path / "two")
    assert len(together) == 4
    np.testing.assert_allclose(together, losses(tmp_path / "one")[:4], rtol=1e-6)
    alone = run(tiny(tmp_path / "two", train__steps=6, **mesh))
    assert alone.step == 6
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-6)
    for name, array in one.arrays.items():
        np.testing.assert_allclose(alone.arrays[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_flipped_bit_in_what_the_other_process_wrote_is_found(tmp_path, launch_two):
    ends = launch_two(tmp_path, mesh__fsdp=2, train__steps=2)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2] + ends[1][2]
    newest = tmp_path / "checkpoints" / "step_00000002"
    recorded = json.loads((newest / "manifest" / "sums.json").read_text())
    files = [newest / name for name in recorded if name.startswith("state/ocdbt.process_1/d/")]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    ends = launch_two(tmp_path, mesh__fsdp=2, train__steps=3)[2:]  # those that were started last
    assert all(code != 0 for code, _, _ in ends)
    text = f"step_00000002 is damaged (state/ocdbt.process_1/d/{largest.name} has another checksum"
    assert any(text in err for _, _, err in ends), ends[0][2] + ends[1][2]


def test_sigterm_on_all_processes_before_the_first_step_ends_each_at_once(tmp_path, start_two):
    both = start_two(tmp_path, mesh__data=2, train__steps=100000)
    deadline_s = time.monotonic() + 100
    while not (tmp_path / "run.lock").exists():  # from here on jax has its own SIGTERM handler
        assert time.monotonic() < deadline_s and both[0].poll() is None, both[0].stderr.read()
        time.sleep(0.02)
    for process in reversed(both):
        process.send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [143, 143], errors
    assert all("SIGTERM: ending at once: nothing was trained" in err for err in errors)


def test_a_peer_that_never_comes_ends_the_command_with_its_name(tmp_path, launch_two):
    ((code, _, err),) = launch_two(
        tmp_path, ids=[0], mesh__data=2, run__distributed__timeout_s=2, timeout_s=30
    )
    assert code == 1
    assert err.strip().splitlines()[-1].startswith("error: process 0 of 2: process 1 did not")


def test_a_hung_peer_ends_the_command_with_stacks_and_its_number(tmp_path, start_two):
    main, peer = start_two(
        tmp_path,
        mesh__data=2,
        train__steps=100000,
        run__faults__watchdog_timeout_s=8.0,
    )
    deadline_s = time.monotonic() + 150
    while not (tmp_path / "metrics.jsonl").exists() or len(losses(tmp_path)) < 3:
        assert time.monotonic() < deadline_s and main.poll() is None, main.stderr.read()
        time.sleep(0.05)
    peer.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    _, err = main.communicate(timeout=90)
    assert main.returncode == EXIT_HANG
    assert time.monotonic() - stopped_s < 50
    assert "process 0: no progress for" in err and (tmp_path / "stacks-0.txt").exists()
    assert re.search(r": process 1 \(\w+ \w+, silent for \d+ s\)\.", err), err


def test_a_config_error_on_every_process_ends_each_with_its_text(tmp_path, launch_two):
    run(tiny(tmp_path, train__steps=2))
    ends = launch_two(tmp_path, mesh__data=2, train__steps=1)
    assert all(code in (EXIT_PEER, EXIT_HANG) or code < 0 for code, _, _ in ends)
    assert any("train.steps is 1, but the checkpoint is already at step 2" in e[2] for e in ends)
    assert Trainer(tiny(tmp_path, train__steps=3)).checkpointer.latest_step() == 2
