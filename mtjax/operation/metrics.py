"""The metrics of a run: their names, and the files and services they are written to."""

import importlib.util
import json
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mtjax.config.precision import ROLES
from mtjax.config.run import MetricsConfig

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SUPERSEDED_FILE = "metrics.superseded.jsonl"


class Metric(NamedTuple):
    """What a metric is measured in, and what it says."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "train/loss": Metric("nats/token", "loss that is minimised, auxiliary terms included"),
    "train/cross_entropy": Metric("nats/token", "cross-entropy, weighted by token"),
    "train/z_loss": Metric("nats/token", "log-partition penalty within the loss"),
    "train/aux_loss": Metric("nats/token", "other auxiliary terms within the loss"),
    "train/mtp_loss": Metric("nats/token", "cross-entropy of tokens beyond the next, module mean"),
    "train/grad_norm": Metric("1", "global norm of the gradient before clipping"),
    "train/param_norm": Metric("1", "global norm of the parameters"),
    "train/learning_rate": Metric("1", "learning rate of the step"),
    "train/weight": Metric("tokens", "tokens that count in the loss of the step"),
    "train/tokens": Metric("tokens", "tokens trained on since step 0"),
    "train/epoch": Metric("epochs", "passes over the data since step 0"),
    "train/batch_size": Metric("sequences", "sequences in the step"),
    "train/skipped": Metric("0 or 1", "1 when the update of the step was left out"),
    "train/loss_scale": Metric("1", "dynamic loss scale (fp16)"),
    "eval/loss": Metric("nats/token", "cross-entropy on the held-out split"),
    "eval/bits_per_byte": Metric("bits/byte", "the same per UTF-8 byte, whatever the tokenizer"),
    "eval/perplexity": Metric("1", "exp of eval/loss"),
    "eval/tokens": Metric("tokens", "tokens that eval/loss is the mean of"),
    "perf/step_time_s": Metric("s", "wall time per step, mean since the last record"),
    "perf/tokens_per_s": Metric("tokens/s", "tokens per second over all devices"),
    "perf/tokens_per_s_per_device": Metric("tokens/s", "tokens per second and device"),
    "perf/tflops_per_device": Metric("TFLOP/s", "model FLOPs per second and device"),
    "perf/mfu": Metric("ratio", "model FLOPs by the device's peak; absent when it is unknown"),
    "perf/data_wait_s": Metric("s", "time per step spent waiting for data"),
    "perf/compile_s": Metric("s", "time to compile the step"),
    "perf/memory_peak_bytes": Metric("bytes", "peak memory of the first local device"),
    "perf/save_s": Metric("s", "time training stood still for a checkpoint"),
    "data/padding_ratio": Metric("ratio", "share of positions that hold no token"),
    "moe/dropped_ratio": Metric("ratio", "share of token-expert pairs that found no room"),
    "moe/load_ratio": Metric("ratio", "tokens of the fullest expert by the mean, worst layer"),
    "moe/entropy": Metric("nats", "entropy of a token's router probabilities, mean over layers"),
    "moe/bias_min": Metric("1", "lowest score bias of a router"),
    "moe/bias_max": Metric("1", "highest score bias of a router"),
    "moe/bias_norm": Metric("1", "largest norm of the score biases of one layer"),
    "moe/balance_loss": Metric("1", "load-balancing loss before its weight"),
    "moe/device_balance_loss": Metric("1", "the same between the groups of experts of a device"),
    "moe/z_loss": Metric("1", "router log-partition penalty before its weight"),
    "quantize/saturated_layers": Metric("layers", "layers that saturate too long, to fall back"),
}
"""Every metric that a record may hold; a new one starts with a line here."""

_OPERANDS = {"x": "inputs", "w": "weights", "g": "gradients of outputs"}
_OF_OPERANDS = {
    "amax": Metric("1", "largest magnitude of the {}, over the kernels of the role"),
    "scale": Metric("1", "largest scale of the {}"),
    "underflow": Metric("ratio", "share of the {} that were rounded to zero"),
    "saturation": Metric("ratio", "share of the {} that were beyond the range"),
}
METRICS |= {
    f"quantize/{role}_{operand}_{name}": Metric(metric.unit, metric.meaning.format(what))
    for role in ROLES
    for operand, what in _OPERANDS.items()
    for name, metric in _OF_OPERANDS.items()
}


def check_names(metrics: Mapping[str, Any]) -> None:
    """Raises ValueError for a metric that the table does not have."""
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown:
        raise ValueError(
            f"unknown metric {', '.join(unknown)}, expected names of mtjax.operation.metrics."
            f"METRICS ({', '.join(METRICS)}): correct the name or add a line to the table"
        )


class MetricWriter:
    """Writes records to `metrics.jsonl` and, as configured, TensorBoard and Weights & Biases.

    Each line of the file is an object: `step` and the metrics of that step. NaN and infinity,
    which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity". With `resume_step` k,
    lines of steps after k, which will be written again, move to `metrics.superseded.jsonl`, so
    that no step is twice in the file. Only process 0 (`active`) writes.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        config: MetricsConfig,
        *,
        resume_step: int = 0,
        run_name: str = "",
        run_config: Mapping[str, Any] | None = None,
        active: bool = True,
    ) -> None:
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._active = active
        if not active:
            return
        check_writers(config)
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _drop_steps_after(directory, resume_step)
        self._file = open(directory / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        if config.tensorboard:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(directory / "tensorboard"), purge_step=resume_step + 1
            )
        if config.wandb:
            self._wandb = _start_wandb(directory, config.wandb_project, run_name, run_config)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one record; values are numbers or scalar arrays. Raises ValueError on a name
        that METRICS lacks."""
        check_names(metrics)
        if not self._active:
            return
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": step} | {name: _to_json(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Flushes and closes all writers."""
        for name in ("_file", "_tensorboard"):
            if getattr(self, name) is not None:
                getattr(self, name).close()
                setattr(self, name, None)
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        self._active = False


def read_metrics(path: str | pathlib.Path) -> list[dict[str, float]]:
    """The records of a metrics file, `step` included; a cut-off last line is left out."""
    records = []
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        record = _parse(line)
        if record is not None:
            records.append({name: float(value) for name, value in record.items()})
    return records


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # a process killed while writing leaves half a line
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _drop_steps_after(directory: pathlib.Path, step: int) -> None:
    path = directory / METRICS_FILE
    if not path.exists():
        return
    kept: list[str] = []
    dropped: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        record = _parse(line)
        keep = record is not None and record["step"] <= step and (step > 0)
        (kept if keep else dropped).append(line.rstrip("\n") + "\n")
    if not dropped:
        return
    with open(directory / SUPERSEDED_FILE, "a", encoding="utf-8") as file:
        file.writelines(dropped)
    new = path.with_suffix(".tmp")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)
    log.info(
        "moved %d metric lines after step %d to %s", len(dropped), step, directory / SUPERSEDED_FILE
    )


def check_writers(config: MetricsConfig) -> None:
    """Raises ValueError when a writer that the config asks for is not installed."""
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "run.metrics.wandb is on, but the package wandb is not installed: "
            "run `pip install wandb`, or set --run.metrics.no-wandb"
        )


def _start_wandb(
    directory: pathlib.Path, project: str, name: str, run_config: Mapping[str, Any] | None
) -> Any:
    import wandb

    return wandb.init(
        project=project,
        name=name or None,
        dir=str(directory),
        config=dict(run_config or {}),
        resume="allow",
    )
