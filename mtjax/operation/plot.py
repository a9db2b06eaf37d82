"""The loss curve of a run as a picture."""

import math
import pathlib
import statistics
from typing import Any

from mtjax.operation.metrics import METRICS_FILE, read_metrics

PLOT_FILE = "loss.png"
_TRAIN, _EVAL, _INK, _GRID = "#2a78d6", "#c2410c", "#333333", "#dddddd"
_MAX_WINDOW = 101


def plot_loss(directory: str | pathlib.Path, title: str = "") -> pathlib.Path | None:
    """Draws train and eval loss over steps from the metrics of the run folder `directory`.

    Returns the path of the PNG, or None when no finite loss was recorded yet.
    """
    directory = pathlib.Path(directory)
    records = read_metrics(directory / METRICS_FILE)
    train, held_out = _series(records, "train/loss"), _series(records, "eval/loss")
    if not train[0] and not held_out[0]:
        return None
    # The object interface draws with Agg whatever backend the user's matplotlib would choose.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_train(axes, *train)
    if held_out[0]:
        axes.plot(*held_out, color=_EVAL, marker="o", markersize=4, linewidth=1.2, label="eval")
    _mark_skipped(axes, records)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss (nats per token)", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(*_limits(train[1] + held_out[1]))
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(_caption(title, train, held_out), loc="left", fontsize=10, color=_INK)
    path = directory / PLOT_FILE
    figure.savefig(path)
    return path


def _series(records: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of one metric."""
    points = [(r["step"], r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def _draw_train(axes: Any, steps: list[float], values: list[float]) -> None:
    """The recorded loss; for long runs its running median, blind to spikes, on top of it."""
    if not steps:
        return
    half = min(len(values) // 100, _MAX_WINDOW // 2)
    if half == 0:
        axes.plot(steps, values, color=_TRAIN, linewidth=1.6, label="train")
        return
    smooth = [
        statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))
    ]
    label = f"train (median of {2 * half + 1} records)"
    axes.plot(steps, values, color=_TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth, color=_TRAIN, linewidth=1.8, label=label)


def _mark_skipped(axes: Any, records: list[dict[str, float]]) -> None:
    steps = [r["step"] for r in records if r.get("train/skipped", 0) > 0]
    if steps:
        axes.plot(
            steps,
            [0.02] * len(steps),
            linestyle="none",
            marker="|",
            color=_INK,
            label="skipped step",
            transform=axes.get_xaxis_transform(),
        )


def _limits(values: list[float]) -> tuple[float, float]:
    """Range of the loss axis; a few spikes far above the rest are cut off."""
    ordered = sorted(values)
    low, top = ordered[0], ordered[-1]
    high = ordered[int(0.98 * (len(ordered) - 1))]
    start = max(values[:3])
    if top > low + 3 * (max(high, start) - low):
        top = max(high, start)
    margin = 0.05 * (top - low) or 0.1
    return low - margin, top + margin


def _caption(title: str, train: tuple, held_out: tuple) -> str:
    last = [
        f"{label} {series[1][-1]:.4f} at step {series[0][-1]:.0f}"
        for label, series in (("train", train), ("eval", held_out))
        if series[0]
    ]
    return f"{title}: {', '.join(last)}" if title else ", ".join(last)
