"""What to do when the loss or the gradient norm is NaN, infinite or a spike."""

import collections
import hashlib
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from mtjax.config.check import RunError
from mtjax.config.run import FaultConfig

log = logging.getLogger(__name__)

_WATCHED = ("train/loss", "train/grad_norm")


class TrainingDiverged(RunError):
    """Training can't go on; the text names step, values and batch."""


class SpikeGuard:
    """Judges each step by its metrics.

    The update itself is left out inside the compiled step, which gets `limits()` and reports
    `train/skipped`; the guard counts and decides when to stop. Its memory is part of the data
    state, so that a resumed run judges as the uninterrupted one (`state`, `load`).
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._recent = {
            name: collections.deque[float](maxlen=config.spike_window) for name in _WATCHED
        }
        self._in_a_row = 0

    def limits(self) -> dict[str, float]:
        """The highest `train/loss` and `train/grad_norm` that are no spike; infinity if unset."""
        ratio, window = self._config.spike_ratio, self._config.spike_window
        return {
            name: ratio * statistics.median(values) if ratio and len(values) == window else math.inf
            for name, values in self._recent.items()
        }

    def observe(
        self, step: int, metrics: Mapping[str, Any], batch: str | Callable[[], str] = ""
    ) -> bool:
        """Whether `step` was good.

        `batch` describes its batch (see `describe_batch`), as text or as a function that is called
        on a bad step only. Raises TrainingDiverged for a bad step when the config says "stop", for
        one bad step too many in a row, and for a non-finite update that was not left out.
        """
        values = {name: float(metrics[name]) for name in _WATCHED if name in metrics}
        skipped = float(metrics.get("train/skipped", 0)) > 0
        reasons = self._reasons(values)
        if not reasons and not skipped:
            self._in_a_row = 0
            for name, value in values.items():
                self._recent[name].append(value)
            return True
        self._in_a_row += 1
        shown = ", ".join(reasons) or "the step skipped its update"
        text = f"step {step}: {shown}{_batch_text(batch)}"
        # An overflow under dynamic loss scaling is expected: the scale is lowered and it passes.
        overflow = skipped and "train/loss_scale" in metrics
        finite = all(math.isfinite(value) for value in values.values())
        if not skipped and not finite:
            raise TrainingDiverged(
                f"{text}. The update was applied, so the parameters are spoilt: resume from the "
                "last checkpoint, with a lower --optimizer.learning_rate or another --train.seed"
            )
        if self._config.on_bad_step == "stop" and not overflow:
            raise TrainingDiverged(
                f"{text}. Lower --optimizer.learning_rate, look at the batch, or leave such steps "
                "out with --run.faults.on_bad_step skip"
            )
        if self._in_a_row > self._config.max_skipped:
            raise TrainingDiverged(
                f"{text}. That is {self._in_a_row} bad steps in a row, more than "
                f"run.faults.max_skipped ({self._config.max_skipped}): resume from an earlier "
                "checkpoint with --checkpoint.restore_step, or lower --optimizer.learning_rate"
            )
        log.warning("%s; %d in a row", text, self._in_a_row)
        return False

    def state(self) -> dict[str, Any]:
        """The guard's memory as JSON values."""
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"recent": recent, "in_a_row": self._in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` returned."""
        for name, values in state["recent"].items():
            self._recent[name].clear()
            self._recent[name].extend(values)
        self._in_a_row = int(state["in_a_row"])

    def _reasons(self, values: Mapping[str, float]) -> list[str]:
        reasons = []
        for name, limit in self.limits().items():
            value = values.get(name, 0.0)
            if not math.isfinite(value):
                reasons.append(f"{name} is {value}")
            elif value > limit:
                reasons.append(f"{name} is {value:.4g}, above the spike limit {limit:.4g}")
        return reasons


def describe_batch(number: int, tokens_BT: Any, *, shown: int = 8) -> str:
    """A batch in one line: its number in the data's order, first tokens, a digest of all tokens.

    `tokens_BT` are the integer ids that this process read.
    """
    import numpy as np

    tokens_BT = np.ascontiguousarray(np.asarray(tokens_BT))
    digest = hashlib.sha256(tokens_BT.astype("<i8").tobytes()).hexdigest()[:12]
    first = tokens_BT.reshape(-1)[:shown].tolist()
    return f"number {number} (from 0), first tokens {first}, sha256 {digest}"


def _batch_text(batch: str | Callable[[], str]) -> str:
    text = batch() if callable(batch) else batch
    return f"; batch: {text}" if text else ""
