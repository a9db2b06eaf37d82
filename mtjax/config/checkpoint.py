"""When checkpoints are written, how many are kept, and how a run resumes."""

from typing import Literal

from mtjax.config.check import config_class, require, require_defaults


@config_class("checkpoint")
class CheckpointConfig:
    """Checkpoints of one run; they live in `<run.directory>/checkpoints`."""

    every_steps: int = 1000
    """Steps between two saves, at least 1; 0 saves only at the end and on SIGTERM."""

    at_end: bool = True
    """Save once more after the last step, whatever `every_steps` says."""

    keep: int = 3
    """How many of the newest checkpoints stay on disk, at least 1."""

    keep_every_steps: int = 0
    """Checkpoints at multiples of this step number are never deleted; 0 turns this off."""

    background: bool = True
    """Write files in a background thread while training goes on. The step only waits for the
    copy from device to host memory."""

    resume: Literal["auto", "never", "must"] = "auto"
    """"auto" continues from the newest checkpoint of the run directory if there is one, "must"
    stops if there is none, "never" starts at step 0 (older checkpoints are moved aside)."""

    restore_step: int = 0
    """Resume from this step in place of the newest one; 0 takes the newest."""

    upcycle_from: str = ""
    """Run folder of the same model without experts, whose newest checkpoint a new run with experts
    starts from, each expert a copy of the dense feed-forward part; empty: start afresh."""

    resize_from: str = ""
    """Run folder of the same model with another number of experts, whose newest checkpoint a new
    run starts from. If this one has a multiple of them, each is copied; if it has fewer, the most
    used are kept. Other settings of model.moe that only concern the choice of experts, such as
    top_k, may change too."""

    resize_noise: float = 0.01
    """resize_from, copies: standard deviation of the noise on the matrices of experts and routers,
    in root mean squares of each; 0 leaves copies equal."""

    resize_batches: int = 8
    """resize_from: batches, the first that the run trains on, over which it measures the loads and
    the loss before and after, at least 1."""

    allow_changes: tuple[str, ...] = ()
    """Config fields, as dotted prefixes such as `optimizer.learning_rate`, that may differ from
    the checkpoint's although they change the numbers."""

    verify: bool = True
    """Save a checksum of every file, and compare it when a checkpoint is read. Costs one reading
    of the files each time, in the background at saves: about 1 s per GB and core."""

    timeout_s: int = 1200
    """Seconds that processes wait for each other while a checkpoint is written, at least 1."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "every_steps", self.every_steps, "0 or more")
        _require(self.keep >= 1, "keep", self.keep, "1 or more")
        _require(self.keep_every_steps >= 0, "keep_every_steps", self.keep_every_steps, "0 or more")
        _require(self.restore_step >= 0, "restore_step", self.restore_step, "0 or more")
        _require(self.resize_noise >= 0, "resize_noise", self.resize_noise, "0 or more")
        _require(self.resize_batches >= 1, "resize_batches", self.resize_batches, "1 or more")
        if not self.resize_from:
            names = ["resize_noise", "resize_batches"]
            require_defaults(self, "checkpoint", names, "checkpoint.resize_from is empty")
        require(
            not (self.resize_from and self.upcycle_from),
            "checkpoint.resize_from",
            self.resize_from,
            f"empty with checkpoint.upcycle_from ({self.upcycle_from!r})",
            "a run starts from one checkpoint: drop one of them",
        )
        _require(self.timeout_s >= 1, "timeout_s", self.timeout_s, "1 or more")
        _require(
            self.every_steps == 0 or self.keep_every_steps % self.every_steps == 0,
            "keep_every_steps",
            self.keep_every_steps,
            f"a multiple of checkpoint.every_steps ({self.every_steps}), where saves happen",
        )
        if self.restore_step and self.resume == "never":
            raise ValueError(
                f"checkpoint.restore_step is {self.restore_step} while checkpoint.resume is "
                "'never': set checkpoint.resume to 'auto' or 'must', or leave restore_step at 0"
            )

    def due(self, step: int, total_steps: int) -> bool:
        """Whether a checkpoint is to be saved after `step` of `total_steps` steps."""
        if step >= total_steps:
            return self.at_end
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0


def _require(ok: bool, field: str, got: object, expected: str) -> None:
    require(ok, f"checkpoint.{field}", got, expected, "change it")
