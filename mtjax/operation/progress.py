"""What a person sees while a run goes on: a bar on a terminal, lines elsewhere."""

import sys
import time
import unicodedata
from collections.abc import Mapping
from typing import Any, Literal

Mode = Literal["auto", "bar", "lines", "off"]


def format_count(value: float) -> str:
    """`value` with a decimal prefix: 950, 12.3k, 4.56M."""
    for size, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """A duration for people: 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    total = max(0, round(seconds))
    minutes, seconds_left = divmod(total, 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left:02d} h"
    if hours:
        return f"{hours} h {minutes_left:02d} min"
    return f"{minutes} min {seconds_left:02d} s" if minutes else f"{total} s"


def printable(text: str) -> str:
    """`text` with control characters written out, such as \\x1b, but for line ends and tabs."""
    hidden = ("Cc", "Cs", "Cn")
    return "".join(
        repr(char)[1:-1] if char not in "\n\t" and unicodedata.category(char) in hidden else char
        for char in text
    )


def summary(metrics: Mapping[str, Any]) -> str:
    """The metrics people follow, with units; MFU reads n/a where the device's peak is unknown."""
    parts = []
    for name, label in (("train/loss", "loss"), ("eval/loss", "eval loss")):
        if name in metrics:
            parts.append(f"{label} {float(metrics[name]):.4f}")
    if "train/grad_norm" in metrics:
        parts.append(f"grad norm {float(metrics['train/grad_norm']):.3g}")
    if "train/learning_rate" in metrics:
        parts.append(f"lr {float(metrics['train/learning_rate']):.3g}")
    if "perf/tokens_per_s" in metrics:
        parts.append(f"{format_count(float(metrics['perf/tokens_per_s']))} tokens/s")
        mfu = metrics.get("perf/mfu")
        parts.append("MFU n/a" if mfu is None else f"MFU {100 * float(mfu):.1f}%")
    if float(metrics.get("train/skipped", 0)):
        parts.append("skipped")
    return " | ".join(parts)


class Progress:
    """Progress of a run of `total_steps` steps that starts after `start_step`.

    Call `update` once per logged step and `message` for other lines. Writes nothing where not
    `active` (all processes but 0).
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        mode: Mode = "auto",
        active: bool = True,
        stream: Any = None,
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        if mode == "auto":
            mode = "bar" if self._stream.isatty() else "lines"
        self._mode = mode if active else "off"
        self._total = total_steps
        self._first: tuple[int, float] = (start_step, time.monotonic())
        self._bar: Any = None
        self._task: Any = None
        if self._mode == "bar":
            self._start_bar(start_step)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `step` steps are done."""
        left = f"left {self._time_left(step)}"
        if self._mode == "bar":
            self._bar.update(self._task, completed=step, text=f"{summary(metrics)} | {left}")
        elif self._mode == "lines":
            width = len(str(self._total))
            self._print(f"step {step:>{width}}/{self._total} | {summary(metrics)} | {left}")

    def message(self, text: str) -> None:
        """One line that stays, above the bar if there is one."""
        if self._mode == "bar":
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._mode == "lines":
            self._print(text)

    def close(self) -> None:
        """Ends the bar and leaves its last state on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._mode = "off"

    def _time_left(self, step: int) -> str:
        first_step, first_time_s = self._first
        if step >= self._total:
            return "0 s"
        if step <= first_step:
            return "n/a"
        per_step_s = (time.monotonic() - first_time_s) / (step - first_step)
        return format_duration(per_step_s * (self._total - step))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _start_bar(self, start_step: int) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=self._stream),
        )
        self._bar.start()
        self._task = self._bar.add_task(
            "train", total=self._total, completed=start_step, text="compiling"
        )
