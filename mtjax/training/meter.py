"""How fast a run goes."""

import time

import jax.numpy as jnp
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.planning.targets import peak_flops
from mtjax.training.step import COMPUTE_DTYPES


class Meter:
    """Speed since the last record, evaluations and saves left out."""

    def __init__(
        self, config: Config, mesh: Mesh, flops_per_token: float, compile_s: float
    ) -> None:
        device = mesh.devices.flat[0]
        self._devices = mesh.size
        dtype = jnp.dtype(COMPUTE_DTYPES[config.compute_dtype])
        self._peak = peak_flops(device.device_kind, dtype.name)
        self._flops_per_token = flops_per_token
        self._compile_s: float | None = compile_s
        self._restart()

    def _restart(self) -> None:
        self._started = time.perf_counter()
        self._tokens = self._steps = 0
        self._paused_s = 0.0
        self.data_wait_s = 0.0

    def count(self, tokens: int) -> None:
        """A step that trained on this many tokens was seen to end."""
        self._tokens += tokens
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Time that went to something else than steps."""
        self._paused_s += seconds

    def read(self) -> dict[str, float]:
        """Metrics since the last call."""
        elapsed = max(time.perf_counter() - self._started - self._paused_s, 1e-9)
        rate = self._tokens / elapsed
        metrics = {
            "perf/step_time_s": elapsed / max(self._steps, 1),
            "perf/tokens_per_s": rate,
            "perf/tokens_per_s_per_device": rate / self._devices,
            "perf/tflops_per_device": rate * self._flops_per_token / self._devices / 1e12,
            "perf/data_wait_s": self.data_wait_s / max(self._steps, 1),
        }
        if self._peak is not None:
            metrics["perf/mfu"] = rate * self._flops_per_token / self._devices / self._peak
        if self._compile_s is not None:
            metrics["perf/compile_s"], self._compile_s = self._compile_s, None
        self._restart()
        return metrics
