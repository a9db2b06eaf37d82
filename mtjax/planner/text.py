"""A plan as text for the terminal, and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mtjax.operation.progress import format_count
from mtjax.planner.report import PipelinePart, Plan
from mtjax.planning.flops import CONVENTION

GIB = 2**30
_UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))


def to_json(plan: Plan) -> str:
    """The plan with all its fields; bytes, FLOPs and seconds are per device and step."""
    record: dict[str, Any] = dataclasses.asdict(plan)
    record["memory"] |= {"headroom_bytes": plan.memory.headroom_bytes, "fits": plan.memory.fits}
    return json.dumps(record, indent=2) + "\n"


def to_text(plan: Plan) -> str:
    """Sections with one table each."""
    sections = [*plan.notes, _layout(plan), _memory(plan), _traffic(plan), _compute(plan)]
    sections.append(_time(plan))
    if plan.changes:
        sections.append(changes_text(plan))
    return f"{plan.title} on {plan.target}\n" + "\n\n".join(sections)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return ("  " + "  ".join(cells)).rstrip()

    return "\n".join(map(line, (head, *rows)))


def unit_for(num_bytes: float) -> tuple[str, int]:
    """Name and size of the binary unit in which a number of bytes reads best."""
    return next(((name, size) for name, size in _UNITS if num_bytes >= size), ("B", 1))


def changes_text(plan: Plan) -> str:
    """What was tried because the step does not fit."""
    rows = [
        (
            change.flags,
            f"{change.total_bytes / GIB:.1f}",
            {True: "yes", False: "no", None: "n/a"}[change.fits],
            "n/a" if change.step_s is None else f"{change.step_s:.3f}",
        )
        for change in plan.changes
    ]
    if not rows:
        return "No single change of remat, microbatches, loss chunk or mesh is possible here."
    return "Changes tried:\n" + table(("", "GiB", "fits", "s per step"), rows)


def _layout(plan: Plan) -> str:
    layout = plan.layout
    mesh = ", ".join(f"{axis}={size}" for axis, size in layout.mesh.items()) or "one device"
    rows = [(row.names, row.axes, f"{row.count:,}", f"{row.per_device:,}") for row in layout.rows]
    data = layout.mesh.get("data", 1) > 1
    stages = "" if layout.pipeline is None else _stages(layout.pipeline)
    return (
        f"Layout: {mesh} on {layout.num_devices} devices, {layout.microbatches} microbatches\n"
        f"  {layout.params:,} parameters"
        f"{f' ({layout.active_params:,} active)' if layout.active_params != layout.params else ''}"
        f"{f', {layout.mtp_params:,} that predict further tokens' if layout.mtp_params else ''}"
        f"{f' and {layout.padding_params:,} of padding' if layout.padding_params else ''}, "
        f"{layout.params_per_device:,} per device as layers use them\n"
        + ("  masters and optimizer state are also split over data\n" if data else "")
        + stages
        + table(("logical dims", "mesh axes", "parameters", "per device"), rows)
    )


def _stages(pipeline: PipelinePart) -> str:
    """The layers of each stage, and what the schedule costs."""
    chunked = pipeline.num_chunks > 1
    lines = [
        f"  {pipeline.schedule}: bubble {pipeline.bubble_ratio:.1%}, a stage holds the activations "
        f"of at most {pipeline.num_slots} {'passes of a chunk' if chunked else 'microbatches'}"
    ]
    for stage in range(pipeline.num_stages):
        parts = pipeline.layers[stage :: pipeline.num_stages]
        ranges = (f"{first}-{first + count - 1}" for first, count in parts if count)
        lines.append(f"  stage {stage}: layers {', '.join(ranges)}")
    return "\n".join(lines) + "\n"


def _memory(plan: Plan) -> str:
    memory = plan.memory
    unit, scale = unit_for(memory.total_bytes)
    rows = [(name, f"{size / scale:.2f}") for name, size in memory.parts.items() if size]
    rows.append(("total", f"{memory.total_bytes / scale:.2f}"))
    verdict = "no device memory to compare with"
    if memory.capacity_bytes is not None and memory.headroom_bytes is not None:
        room = abs(memory.headroom_bytes) / GIB
        verdict = (
            f"fits in {memory.capacity_bytes / GIB:.1f} GiB, {room:.1f} GiB left"
            if memory.fits
            else f"does not fit in {memory.capacity_bytes / GIB:.1f} GiB, {room:.1f} GiB too much"
        )
    held = [
        (h.origin[:70], f"{h.count} x {h.shape}", f"{h.num_bytes / scale:.2f}")
        for h in memory.largest
    ]
    return (
        f"Memory per device: {verdict}\n"
        + table(("", unit), rows)
        + "\n"
        + table(("largest temporaries at the peak", "arrays", unit), held)
    )


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return "Communication: none"
    rows = [
        (
            row.kind,
            row.axes or "unknown",
            row.dtypes,
            "loop" if row.inside_loop else "once",
            f"{row.count:,}",
            f"{row.sent_bytes / 1e9:.3f}",
            f"{row.overlapped_ratio:.0%}",
        )
        for row in plan.traffic
    ]
    head = ("collective", "axes", "dtype", "where", "per step", "GB sent", "beside kernels")
    total = sum(row.sent_bytes for row in plan.traffic)
    return f"Communication: {total / 1e9:.2f} GB sent per device and step\n" + table(head, rows)


def _compute(plan: Plan) -> str:
    compute = plan.compute
    ratio = compute.hardware_flops / compute.model_flops
    shares = ", ".join(
        f"{dtype} {flops / compute.hardware_flops:.1%}" for dtype, flops in compute.by_dtype.items()
    )
    lines = [
        f"Compute: {format_count(compute.model_flops)}FLOP of the model per device and step "
        f"({CONVENTION}); the program does {ratio:.2f} x that",
        f"  rates: {shares}",
        *(f"  warning: {warning}" for warning in compute.warnings),
    ]
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    time = plan.time
    if time is None:
        return "Time: no estimate, the rates of this machine are not known"
    rows = [(f"kernels, {kind}", *_share(s, time.step_s)) for kind, s in time.kernels_s.items()]
    rows += [(f"waiting for {axes}", *_share(s, time.step_s)) for axes, s in time.exposed_s.items()]
    notes = []
    if plan.layout.pipeline is not None:
        bubble = plan.layout.pipeline.bubble_ratio
        notes.append(f"the kernels run through the bubble ({bubble:.1%} of the passes) too")
    if plan.memory.fits is False:
        notes.append("to save memory XLA recomputes and serialises: with more it would be faster")
    return (
        f"Time: at least {time.step_s:.3g} s per step, at most "
        f"{format_count(time.tokens_per_s)} tokens/s, {time.mfu:.1%} MFU\n"
        + table(("", "s per step", "share"), rows)
        + f"\n  communication in all: {_seconds(time.communication_s)}\n"
        + "".join(f"  note: {note}\n" for note in notes)
        + "\n".join(f"  assumed: {line}" for line in time.assumptions)
    )


def _share(seconds: float, total: float) -> tuple[str, str]:
    return f"{seconds:.3g}", f"{seconds / total:.1%}"


def _seconds(times: Mapping[str, float]) -> str:
    return ", ".join(f"{axes} {seconds:.3g} s" for axes, seconds in times.items()) or "none"
