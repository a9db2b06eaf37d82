"""Signals and hangs of one process, in real processes."""

import pathlib
import signal
import subprocess
import sys

import pytest

from mtjax.operation.faults import EXIT_HANG, EarlyEnd, StopRequest, agree

CHILD = pathlib.Path(__file__).parent / "children" / "one_process.py"


def start(role, directory):
    return subprocess.Popen(
        [sys.executable, str(CHILD), role, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_loop_after_its_step(tmp_path, number):
    child = start("run", tmp_path)
    assert child.stdout.readline() == "step 1\n"
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 0
    assert out.splitlines()[-2].endswith(f"after {number.name}")
    assert f"{number.name}: stopping after this step" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_in_native_code_before_the_loop_ends_at_once_with_one_line(tmp_path, number):
    child = start("native", tmp_path)
    assert child.stdout.readline() == "compiling\n"
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 128 + number
    assert (out, err) == ("", f"{number.name}: nothing was trained\n")


def test_a_stop_signal_after_the_loop_does_not_say_that_nothing_was_trained(tmp_path):
    child = start("ended", tmp_path)
    assert child.stdout.readline() == "step 1\n"
    child.send_signal(signal.SIGTERM)
    while child.stdout.readline() != "left the loop\n":
        pass
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 143
    assert err.endswith("SIGTERM: the run had ended\n")


def test_handlers_and_wake_up_file_are_as_before_an_early_end_that_was_not_needed():
    before = signal.getsignal(signal.SIGTERM)
    with EarlyEnd("nothing"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_ctrl_c_exits_at_once(tmp_path):
    child = start("sleep", tmp_path)
    assert [child.stdout.readline() for _ in range(2)] == ["step 1\n", "step 2\n"]
    child.send_signal(signal.SIGINT)
    assert "stopping after" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 130


def test_a_hang_ends_with_stacks_step_and_code(tmp_path):
    child = start("sleep", tmp_path)
    _, err = child.communicate(timeout=20)
    assert child.returncode == EXIT_HANG
    assert "process 0: no progress for" in err and "(last finished step 2)" in err
    written = (tmp_path / "stacks-0.txt").read_text()
    for text in (err, written):
        assert "one_process.py" in text and "in main" in text


def test_a_phase_with_its_own_limit_is_no_hang(tmp_path):
    child = start("phase", tmp_path)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_handlers_are_as_before_after_the_loop():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested and stop.agreed() and stop.signal_name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_alone_a_process_agrees_with_itself():
    assert agree(True) is True and agree(False) is False
