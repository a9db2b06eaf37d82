"""Two processes on CPU devices: together, apart, and when one of them fails."""

import signal
import socket
import threading

import pytest

from mtjax.config.run import DistributedConfig
from mtjax.operation.distributed import EXIT_PEER, Beat, PeerError, describe_beats, initialize
from mtjax.operation.faults import EXIT_HANG
from mtjax.operation.rendezvous import meet

# sum of squares of step..step+7, the loss of the toy
LOSSES = [float(sum((i + step) ** 2 for i in range(8))) for step in range(1, 7)]


def losses(ended):
    return [float(line.split()[-1]) for line in ended.out.splitlines() if " loss " in line]


def test_two_processes_get_the_numbers_of_one_and_share_a_checkpoint(run_processes):
    ends = run_processes("train")
    assert [ended.code for ended in ends] == [0, 0], ends[0].err + ends[1].err
    assert losses(ends[0]) == losses(ends[1]) == LOSSES
    assert "saved and restored" in ends[0].out and "saved and" not in ends[1].out


def test_sigterm_on_one_process_stops_both_after_the_same_step(run_processes):
    ends = run_processes("stop")
    assert [ended.code for ended in ends] == [0, 0], ends[0].err + ends[1].err
    assert all("stopped after step 3" in ended.out for ended in ends)


def test_a_hung_peer_ends_both_with_a_message(run_processes):
    ends = run_processes("hang")
    assert EXIT_HANG in [ended.code for ended in ends]
    assert all(ended.code != 0 and ended.seconds < 30 for ended in ends)
    assert any("no progress for" in e.err and "last finished step 2" in e.err for e in ends)


def test_a_killed_peer_ends_the_other_with_a_message(run_processes):
    survivor, killed = run_processes("die")
    assert killed.code == -signal.SIGKILL
    assert survivor.code != 0 and survivor.seconds < 30
    assert "process 0" in survivor.err


def test_an_exception_on_one_process_ends_both(run_processes):
    other, failed = run_processes("raise")
    assert failed.code == EXIT_PEER and "OSError: the disk is gone" in failed.err
    assert "process 1 of 2 ends with OSError" in failed.err
    assert other.code != 0 and other.seconds < 30


@pytest.mark.parametrize(
    ("present", "missing"), [(0, "process 1 did not arrive"), (1, "process 0 did not answer")]
)
def test_a_missing_peer_ends_the_other_with_its_name(run_processes, present, missing):
    (ended,) = run_processes("train", ids=[present], wait_s=2)
    assert ended.code == 1 and missing in ended.err and ended.seconds < 20
    assert "waits" in ended.out


def test_a_peer_that_came_learns_from_process_0_who_did_not(free_port):
    errors = meet_all(free_port, [(3, 0), (3, 1)], timeout_s=5.0)
    assert "process 2 did not arrive" in errors[0]
    assert "process 0 gave up" in errors[1] and "process 2 did not arrive" in errors[1]


@pytest.mark.parametrize(
    ("second", "expected"),
    [((3, 1), "a number already taken"), ((2, 1), "the same run.distributed.num_processes")],
)
def test_processes_that_do_not_fit_together_are_refused(free_port, second, expected):
    errors = meet_all(free_port, [(3, 0), (3, 1), second], timeout_s=5.0)
    assert expected in errors[0]


def test_a_port_scan_does_not_disturb_the_meeting(free_port):
    def scan():
        for _ in range(50):
            try:
                with socket.create_connection(("127.0.0.1", free_port), timeout=1) as probe:
                    probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    return
            except OSError:
                threading.Event().wait(0.02)

    scanner = threading.Thread(target=scan)
    scanner.start()
    errors = meet_all(free_port, [(2, 0), (2, 1)], timeout_s=10.0)
    scanner.join()
    assert errors == ["", ""]


def test_a_port_in_use_is_said_at_once():
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"can't listen on port {port}"):
            meet(f"127.0.0.1:{port}", 2, 0, 5.0)


def test_auto_outside_a_cluster_says_what_to_do(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="no SLURM, Open MPI or Kubernetes job was found"):
        initialize(DistributedConfig(mode="auto"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"coordinator": "host"}, "host:port of process 0"),
        ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, "0 to 1"),
    ],
)
def test_explicit_settings_are_checked_before_anything_starts(fields, expected):
    with pytest.raises(ValueError, match=expected):
        DistributedConfig(mode="explicit", **fields)


def meet_all(port, places, timeout_s):
    """Error text of each of the processes (count, id), which meet as threads; "" if none."""
    errors = [""] * len(places)

    def run(index, count, number):
        try:
            meet(f"127.0.0.1:{port}", count, number, timeout_s)
        except PeerError as error:
            errors[index] = str(error)

    threads = [threading.Thread(target=run, args=(i, *place)) for i, place in enumerate(places)]
    for thread in threads:
        thread.start()
        threading.Event().wait(0.2)
    for thread in threads:
        thread.join(timeout=30)
    return errors


@pytest.mark.parametrize(
    ("beats", "line"),
    [
        ({}, "All 2 processes live; none finished a step, and none goes on."),
        (
            {0: Beat(3, 1.0), 1: Beat(3, 0.5)},
            "All 2 processes live; the first finished step 3, and none goes on.",
        ),
        (
            {0: Beat(3, 1.0), 1: Beat(2, 0.5)},
            "Behind or silent, while the first finished step 3: process 1 (step 2).",
        ),
        (
            {0: Beat(3, 1.0), 1: Beat(3, 8.2)},
            "Behind or silent, while the first finished step 3: "
            "process 1 (step 3, silent for 8 s).",
        ),
        (
            {0: Beat(None, 8.2), 1: Beat(None, 1.0)},
            "Behind or silent, while none finished a step: process 0 (no step, silent for 8 s).",
        ),
        (
            {1: Beat(3, 1.0)},
            "Behind or silent, while the first finished step 3: process 0 (no step).",
        ),
    ],
)
def test_the_message_of_a_hang_names_who_is_behind_or_silent(beats, line):
    assert describe_beats(beats, 2, silent_s=4.0) == line
