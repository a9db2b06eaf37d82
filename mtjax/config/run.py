"""Where a run writes, what it reports, how it reacts to faults, and how processes meet."""

import dataclasses
from typing import Literal

from mtjax.config.check import config_class, require, require_defaults


@config_class("run.metrics")
class MetricsConfig:
    """Who receives the metrics; JSONL is always written."""

    every_steps: int = 10
    """Steps between two log lines (and metric records), at least 1."""

    tensorboard: bool = True
    """Write TensorBoard event files to `<run.directory>/tensorboard`."""

    wandb: bool = False
    """Report to Weights & Biases; needs `pip install wandb` and a login."""

    wandb_project: str = "mtjax"
    """Weights & Biases project name, used with `wandb`."""

    plot: bool = True
    """Draw `<run.directory>/loss.png` when the run ends."""

    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """"auto" shows a bar on a terminal and one line per logged step elsewhere."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 1, "metrics.every_steps", self.every_steps, "1 or more")
        if not self.wandb:
            require_defaults(self, "run.metrics", ["wandb_project"], "run.metrics.wandb is off")
        if self.wandb and not self.wandb_project:
            raise ValueError(
                "run.metrics.wandb_project is empty, expected a name: set it, or turn wandb off"
            )


@config_class("run.faults")
class FaultConfig:
    """What happens on a bad loss, a hang, or a lost peer."""

    on_bad_step: Literal["stop", "skip"] = "stop"
    """A step is bad when its loss or gradient norm is NaN, infinite, or a spike. "stop" ends the
    run and names step and batch; "skip" leaves parameters and optimizer untouched and goes on."""

    spike_ratio: float = 0.0
    """A loss or gradient norm above this multiple of the median of recent good steps is a spike;
    above 1, or 0 to look at NaN and infinity only."""

    spike_window: int = 64
    """Number of recent good steps the median is taken over, at least 2. Spikes are looked for
    once that many steps were seen."""

    max_skipped: int = 10
    """With "skip": the run stops when more than this many steps in a row are bad; 0 or more."""

    watchdog_timeout_s: float = 1800.0
    """Seconds without a finished step after which the process dumps its Python stacks and exits
    with code 74; 0 turns the watchdog off. Must be longer than the longest step."""

    watchdog_startup_s: float = 3600.0
    """The same limit before the first step ends: loading and compiling count into it."""

    def __post_init__(self) -> None:
        ratio_ok = self.spike_ratio == 0 or self.spike_ratio > 1
        _require(ratio_ok, "faults.spike_ratio", self.spike_ratio, "0 or above 1")
        _require(self.spike_window >= 2, "faults.spike_window", self.spike_window, "2 or more")
        _require(self.max_skipped >= 0, "faults.max_skipped", self.max_skipped, "0 or more")
        for field in ("watchdog_timeout_s", "watchdog_startup_s"):
            value = getattr(self, field)
            _require(value == 0 or value >= 1, f"faults.{field}", value, "0 or at least 1 second")
        if self.on_bad_step != "skip":
            condition = f"run.faults.on_bad_step is {self.on_bad_step!r}"
            require_defaults(self, "run.faults", ["max_skipped"], condition)
        if self.spike_ratio == 0:
            condition = "run.faults.spike_ratio is 0"
            require_defaults(self, "run.faults", ["spike_window"], condition)


@config_class("run.distributed")
class DistributedConfig:
    """How the processes of a run find each other (`jax.distributed`)."""

    mode: Literal["off", "explicit", "auto"] = "off"
    """"off": one process. "explicit": use `coordinator`, `num_processes` and `process_id`.
    "auto": read them from SLURM, Open MPI or Kubernetes."""

    coordinator: str = ""
    """`host:port` of process 0, reachable from all other processes."""

    num_processes: int = 1
    """Number of processes of the run, at least 1."""

    process_id: int = 0
    """Number of this process, from 0 to num_processes - 1."""

    timeout_s: int = 300
    """Seconds to wait for all processes to arrive before giving up, at least 1."""

    heartbeat_timeout_s: int = 100
    """Seconds without a sign of life after which a process counts as dead and the others end."""

    def __post_init__(self) -> None:
        if self.mode != "explicit":
            names = ("coordinator", "num_processes", "process_id")
            condition = f"run.distributed.mode is {self.mode!r} and not 'explicit'"
            require_defaults(self, "run.distributed", names, condition)
        _require(self.timeout_s >= 1, "distributed.timeout_s", self.timeout_s, "1 or more")
        _require(
            self.heartbeat_timeout_s >= 2,
            "distributed.heartbeat_timeout_s",
            self.heartbeat_timeout_s,
            "2 or more",
        )
        if self.mode == "explicit":
            self._check_explicit()

    def _check_explicit(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        _require(
            bool(host) and port.isdigit() and 0 < int(port) < 2**16,
            "distributed.coordinator",
            self.coordinator,
            "host:port of process 0, such as 10.0.0.1:1234",
        )
        count = self.num_processes
        _require(count >= 1, "distributed.num_processes", count, "1 or more")
        _require(
            0 <= self.process_id < count,
            "distributed.process_id",
            self.process_id,
            f"0 to {count - 1} (num_processes - 1)",
        )


@config_class("run")
class RunConfig:
    """One run: its folder and everything around the training step."""

    directory: str = "runs/default"
    """Folder of this run: checkpoints, metrics, plots, stack dumps. Shared by all processes."""

    name: str = ""
    """Name shown in plots and reports; empty takes the last part of `directory`."""

    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    """Metric writers and progress."""

    faults: FaultConfig = dataclasses.field(default_factory=FaultConfig)
    """Bad steps and hangs."""

    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """Several processes."""

    def __post_init__(self) -> None:
        _require(bool(self.directory), "directory", self.directory, "the path of a folder")

    @property
    def title(self) -> str:
        """Name of the run for people."""
        return self.name or self.directory.rstrip("/").rsplit("/", 1)[-1]


def _require(ok: bool, field: str, got: object, expected: str) -> None:
    require(ok, f"run.{field}", got, expected, "change it")
