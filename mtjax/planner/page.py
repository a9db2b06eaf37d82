"""A plan as one self-contained HTML page with pictures."""

import html
import io
from collections.abc import Mapping
from typing import Any

from mtjax.planner.report import PipelinePart, Plan
from mtjax.planner.text import GIB, to_text

_COLORS = ("#2a78d6", "#5aa0e6", "#8fc1f0", "#c2410c", "#e08a4f", "#f0b78f", "#5b8c5a", "#9cbf9b")
_INK = "#333333"
_MAX_NUMBERED_TICKS = 48
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #333; max-width: 1000px; margin: 2em auto; }
pre { background: #f6f6f4; padding: 1em; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; }
"""


def to_html(plan: Plan) -> str:
    """The plan's text below pictures of memory and time by kind."""
    pictures = [_bars("memory per device (GiB)", _memory(plan), _capacity(plan))]
    if plan.time is not None:
        pictures.append(_bars("time per step (s)", _seconds(plan), None))
    if plan.layout.pipeline is not None:
        pictures.append(_gantt(plan.layout.pipeline))
    title = html.escape(f"{plan.title} on {plan.target}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(pictures)
        + f"\n<pre>{html.escape(to_text(plan))}</pre>\n</body></html>\n"
    )


def _memory(plan: Plan) -> dict[str, float]:
    return {name: size / GIB for name, size in plan.memory.parts.items() if size}


def _capacity(plan: Plan) -> float | None:
    return None if plan.memory.capacity_bytes is None else plan.memory.capacity_bytes / GIB


def _seconds(plan: Plan) -> dict[str, float]:
    if plan.time is None:
        return {}
    times = dict(plan.time.kernels_s)
    return times | {f"waiting for {axes}": s for axes, s in plan.time.exposed_s.items()}


def _bars(title: str, parts: Mapping[str, float], limit: float | None) -> str:
    """One stacked bar as SVG, with a line at `limit`."""
    figure, axes = _figure()
    left = 0.0
    for i, (name, size) in enumerate(parts.items()):
        color = _COLORS[i % len(_COLORS)]
        axes.barh(0, size, left=left, color=color, label=f"{name} {size:.3g}", height=0.6)
        left += size
    if limit is not None:
        axes.axvline(limit, color=_INK, linewidth=1.2)
        axes.annotate(f" {limit:.4g} there", (limit, 0.36), color=_INK, fontsize=8)
        axes.set_xlim(0, max(left, limit) * 1.12)
    axes.set_title(title, loc="left", color=_INK, fontsize=10)
    axes.set_yticks([])
    axes.set_ylim(-0.4, 0.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=8)
    return _svg(figure)


def _gantt(pipeline: PipelinePart) -> str:
    """Which microbatch each stage runs at each tick, forward above backward, as SVG."""
    stages, ticks = pipeline.num_stages, len(pipeline.forward)
    figure, axes = _figure(height=0.8 + 0.35 * stages)
    rows = ((pipeline.forward, 0.22, _COLORS[0]), (pipeline.backward, -0.22, _COLORS[3]))
    for passes, offset, color in rows:
        for stage in range(stages):
            busy = [(tick, 1) for tick in range(ticks) if passes[tick][stage] >= 0]
            place = (-stage + offset - 0.2, 0.4)
            axes.broken_barh(busy, place, facecolor=color, edgecolor="white", linewidth=0.3)
            if ticks <= _MAX_NUMBERED_TICKS:
                for tick, _ in busy:
                    spot = (tick + 0.5, -stage + offset)
                    style = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
                    axes.annotate(str(passes[tick][stage]), spot, **style)
    axes.set_xlim(0, ticks)
    axes.set_yticks([-stage for stage in range(stages)], [f"stage {s}" for s in range(stages)])
    title = f"{pipeline.schedule}: microbatches forward (blue) and backward (orange), by tick"
    axes.set_title(title, loc="left", color=_INK, fontsize=10)
    return _svg(figure)


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _figure(height: float = 1.9) -> tuple[Any, Any]:
    # The object interface draws with Agg whatever backend the user's matplotlib would choose.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure, axes
