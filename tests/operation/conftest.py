"""Starting the processes of a run."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

CHILDREN = pathlib.Path(__file__).parent / "children"


class Ended:
    """How a process ended: exit code, output, seconds it took."""

    def __init__(self, process: subprocess.Popen, started_s: float, timeout_s: float) -> None:
        self.out, self.err = process.communicate(timeout=timeout_s)
        self.code = process.returncode
        self.seconds = time.monotonic() - started_s


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def run_processes(free_port, tmp_path):
    """`run(role, ids, count)` starts the processes `ids` of a run of `count` and returns their
    ends, in the same order; whatever is left after `timeout_s` fails the test."""
    processes: list[subprocess.Popen] = []

    def run(role, ids=(0, 1), count=2, timeout_s=45.0, wait_s=30):
        started_s = time.monotonic()
        for number in ids:
            argv = [CHILDREN / "two_processes.py", role, free_port, count, number, tmp_path]
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, argv)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"TEST_TIMEOUT_S": str(wait_s)},
                )
            )
        return [Ended(process, started_s, timeout_s) for process in processes]

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
