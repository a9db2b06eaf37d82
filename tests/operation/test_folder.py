"""The folder of a run: refused when it can't be written, and for one run at a time."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtjax.operation.folder import FolderBusy, FolderLock, check_folder

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys, time; from mtjax.operation.folder import FolderLock\n"
    "with FolderLock(sys.argv[1]):\n    print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_in_a_folder_is_refused_with_process_and_host(tmp_path, holder):
    with pytest.raises(FolderBusy) as error, FolderLock(tmp_path):
        pass
    assert f"in use by process {holder.pid} on {os.uname().nodename} since" in str(error.value)
    assert "--run.directory" in str(error.value)
    with FolderLock(tmp_path, active=False):
        pass


def test_a_process_that_is_killed_leaves_the_folder_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with FolderLock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / "run.lock").read_text()
    with FolderLock(tmp_path):
        pass


def test_a_file_system_without_locks_is_tolerated_with_one_line(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, logger="mtjax"), FolderLock(tmp_path):
        pass
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/run.lock can't be locked (No locks available): nothing keeps a second run "
        "out of this folder"
    ]


@pytest.mark.parametrize("below", ["", "/run", "/some/run"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"run\.directory: got .*but {tmp_path}/file is a file"):
        check_folder(f"{tmp_path}/file{below}", "run.directory")


@pytest.mark.parametrize("path", ["/proc/run", "/proc", "/sys/run"])
def test_a_folder_that_can_not_be_written_is_refused(path):
    with pytest.raises(ValueError, match=rf"--output: got '{path}', which can't be written \(\w+"):
        check_folder(path, "--output")


def test_a_new_folder_is_made_and_left_empty(tmp_path):
    check_folder(tmp_path / "a" / "b", "run.directory")
    assert list((tmp_path / "a" / "b").iterdir()) == []
