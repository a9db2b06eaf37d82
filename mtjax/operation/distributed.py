"""Several processes as one run, by `jax.distributed`."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mtjax.config.check import RunError
from mtjax.config.run import DistributedConfig
from mtjax.operation.rendezvous import PeerError, meet

EXIT_PEER = 75
"""Exit code of a process that ends because the run as a whole can't go on."""

__all__ = [
    "EXIT_PEER",
    "Beat",
    "BeatBoard",
    "PeerError",
    "describe_beats",
    "ending_together",
    "initialize",
    "is_main_process",
]


class _Place(NamedTuple):
    coordinator: str
    num_processes: int
    process_id: int
    local_devices: Sequence[int] | None


def initialize(config: DistributedConfig) -> None:
    """Connects this process with the others; call before the first use of a device.

    Raises PeerError, naming who is missing, when not all arrive within `config.timeout_s`
    seconds, and ValueError when mode "auto" finds no cluster.
    """
    if config.mode == "off":
        return
    place = _detect(config.timeout_s) if config.mode == "auto" else _explicit(config)
    if place.num_processes == 1:
        return
    meet(place.coordinator, place.num_processes, place.process_id, config.timeout_s)
    import jax

    # The default of CPU devices knows no collectives across processes; GPUs ignore the setting.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=config.timeout_s,
        heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        shutdown_timeout_seconds=config.timeout_s,
    )
    # jax has just taken SIGTERM for its notice of preemption, which nobody here reads: give it
    # back to the handler that Python knows of.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def is_main_process() -> bool:
    """Whether this process writes logs, metrics and pictures."""
    import jax

    return jax.process_index() == 0


@contextmanager
def ending_together() -> Iterator[None]:
    """Makes an error of one process end the run.

    With several processes, an exception would leave this one waiting in jax's shutdown for peers
    that wait for it in a collective. So it is printed and the process exits at once with code
    EXIT_PEER; the coordinator ends the others within the heartbeat timeout.
    """
    import jax

    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if not isinstance(error, RunError):
            traceback.print_exc()
        print(
            f"process {jax.process_index()} of {jax.process_count()} ends with "
            f"{type(error).__name__}: {error}\nThe others end too. If a collective failed, "
            "look for the first error in the logs of the other processes.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_PEER)


class Beat(NamedTuple):
    """What a process last wrote on the board."""

    step: int | None
    """Its last finished step."""
    age_s: float
    """Seconds since it wrote."""


class BeatBoard:
    """Where each process writes its last finished step, and when, for the others to read.

    It lives in the key-value store of the coordinator, which answers while devices hang. Times
    are of the hosts' clocks, so ages are as good as these agree.
    """

    _PREFIX = "mtjax/beat/"

    def __init__(self) -> None:
        import jax

        # jax has no public name for the coordination client.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._process = jax.process_index()
        self._count = jax.process_count()

    def publish(self, step: int | None) -> None:
        """Writes the last finished step of this process, and that it is alive now."""
        key = f"{self._PREFIX}{self._process}"
        self._client.key_value_set(key, f"{step} {time.time():.3f}", allow_overwrite=True)

    def read(self) -> dict[int, Beat]:
        """The last beat of each process that published one."""
        beats = {}
        for key, value in self._client.key_value_dir_get(self._PREFIX):
            step, written_s = value.split()
            beats[int(key.rsplit("/", 1)[-1])] = Beat(
                None if step == "None" else int(step), time.time() - float(written_s)
            )
        return beats

    def describe(self, silent_s: float) -> str:
        """One line that says which processes are behind, or have not published for `silent_s`."""
        return describe_beats(self.read(), self._count, silent_s)


def describe_beats(beats: dict[int, Beat], count: int, silent_s: float) -> str:
    """One line on the `count` processes: who is behind, and who is silent for over `silent_s`."""
    top = max((beat.step for beat in beats.values() if beat.step is not None), default=None)
    suspects = []
    for process in range(count):
        step, age_s = beats.get(process, Beat(None, 0.0))
        name = f"{process} (no step" if step is None else f"{process} (step {step}"
        if age_s > silent_s:
            suspects.append(f"{name}, silent for {age_s:.0f} s)")
        elif step != top:
            suspects.append(f"{name})")
    reached = "none finished a step" if top is None else f"the first finished step {top}"
    if not suspects:
        return f"All {count} processes live; {reached}, and none goes on."
    more = f" and {len(suspects) - 16} more" if len(suspects) > 16 else ""
    return f"Behind or silent, while {reached}: process {', '.join(suspects[:16])}{more}."


def _explicit(config: DistributedConfig) -> _Place:
    return _Place(config.coordinator, config.num_processes, config.process_id, None)


def _detect(timeout_s: int) -> _Place:
    """What jax finds out from SLURM, Open MPI, Kubernetes or a TPU pod."""
    # Only this private function resolves the addresses without connecting at once.
    from jax._src.clusters import ClusterEnv

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, timeout_s
        )
    except RuntimeError as error:  # Open MPI 5 without mpi4py, a pod without permissions
        raise ValueError(
            f"run.distributed.mode is 'auto', but jax can't read this job: {error} Or set mode to "
            "'explicit' with coordinator, num_processes and process_id"
        ) from error
    coordinator, num_processes, process_id, local_devices = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "run.distributed.mode is 'auto', but no SLURM, Open MPI or Kubernetes job was found "
            "in the environment: start through one of them, or set mode to 'explicit' with "
            "coordinator, num_processes and process_id"
        )
    return _Place(coordinator, int(num_processes), int(process_id), local_devices)
