"""Several processes as one run, by `jax.distributed`."""

import os
import sys
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
    "BeatBoard",
    "PeerError",
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


class BeatBoard:
    """Where each process writes its last finished step for the others to read.

    It lives in the key-value store of the coordinator, which answers while devices hang.
    """

    _PREFIX = "mtjax/beat/"

    def __init__(self) -> None:
        import jax

        # jax has no public name for the coordination client.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._process = jax.process_index()
        self._count = jax.process_count()

    def publish(self, step: int) -> None:
        """Writes the last finished step of this process."""
        key = f"{self._PREFIX}{self._process}"
        self._client.key_value_set(key, str(step), allow_overwrite=True)

    def read(self) -> dict[int, int]:
        """{process: last finished step} of those that published one."""
        entries = self._client.key_value_dir_get(self._PREFIX)
        return {int(key.rsplit("/", 1)[-1]): int(value) for key, value in entries}

    def describe(self) -> str:
        """One line that says which processes are behind."""
        steps = self.read()
        top = max(steps.values(), default=None)
        behind = [i for i in range(self._count) if steps.get(i) != top]
        if top is None:
            return "No process has finished a step."
        if not behind:
            return f"All {self._count} processes finished step {top} and none the next."
        listed = ", ".join(f"{i} (step {steps.get(i, 'none')})" for i in behind[:16])
        return f"Behind the others, which finished step {top}: process {listed}."


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
