"""`launch.py plan --search`: compile the likely layouts and rank them."""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping

from mtjax.config import Config
from mtjax.operation.progress import format_count
from mtjax.planner.layouts import Candidate, candidates
from mtjax.planner.place import Place
from mtjax.planner.program import compile_step_for
from mtjax.planner.report import Plan, make_plan
from mtjax.planner.text import GIB, table
from mtjax.planning.subprocess_compile import CompileFailed

# The formulas of planner/memory.py are good to 10 %: keep what is that close.
_MARGIN = 1.1


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What a search found."""

    tried: list[tuple[Candidate, Plan]]
    """Compiled layouts: those that fit, fastest first, then the others."""
    failed: list[tuple[Candidate, str]]
    """Layouts that did not compile, with the first line of the reason."""
    too_large: list[Candidate]
    """Left out because the formula is far above the memory."""
    left_out: list[Candidate]
    """Not tried because of the limit on compiles."""
    invalid: int
    """Meshes that the config does not divide by."""


def search_layouts(
    config: Config,
    place: Place,
    max_compiles: int,
    time_limit_s: float,
    fixed: Mapping[str, int] | None = None,
) -> Ranking:
    """Compile the layouts that may fit, least communication first; progress goes to stderr.

    The config's own mesh comes first, if it uses the devices. Axes in `fixed` keep their size.
    """
    found, invalid = candidates(config, place.num_devices, fixed or {})
    with contextlib.suppress(ValueError):
        own = place.resolve(config)
        found.sort(key=lambda c: c.config != own)
    capacity = place.capacity_bytes
    too_large = [c for c in found if capacity and c.memory_bytes > _MARGIN * capacity]
    likely = [c for c in found if c not in too_large]
    chosen, left_out = likely[:max_compiles], likely[max_compiles:]
    tried, failed = [], []
    for number, candidate in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {candidate.flags}", file=sys.stderr, flush=True)
        try:
            step = compile_step_for(candidate.config, place.devices, time_limit_s)
        except CompileFailed as error:
            failed.append((candidate, str(error).splitlines()[0]))
            continue
        tried.append((candidate, make_plan(step, place.target, candidate.flags, place.notes)))
    tried.sort(key=_order)
    return Ranking(tried, failed, too_large, left_out, invalid)


def _order(entry: tuple[Candidate, Plan]) -> tuple[bool, float, float]:
    plan = entry[1]
    step_s = plan.time.step_s if plan.time else 0.0
    return plan.memory.fits is False, step_s, plan.memory.total_bytes


def ranking_text(ranking: Ranking, command: str) -> str:
    """The table, what was left out and why, and the command of the best.

    Args:
        ranking: the result of a search.
        command: of training, without the options that choose the layout.
    """
    rows = [_row(candidate, plan) for candidate, plan in ranking.tried]
    head = ("layout", "tokens/s", "MFU", "GiB per device", "fits", "waiting")
    lines = [table(head, rows)] if rows else []
    lines += [f"did not compile: {c.flags} ({reason})" for c, reason in ranking.failed]
    if ranking.too_large:
        smallest = min(c.memory_bytes for c in ranking.too_large) / GIB
        lines.append(
            f"{len(ranking.too_large)} layouts left out: by formula they take {smallest:.0f} GiB "
            "per device or more"
        )
    if ranking.left_out:
        lines.append(
            f"{len(ranking.left_out)} layouts with more communication not tried; raise "
            "--max-compiles to include them"
        )
    if ranking.invalid:
        lines.append(f"{ranking.invalid} meshes left out: the config does not divide by them")
    best = next((c for c, plan in ranking.tried if plan.memory.fits is not False), None)
    if not ranking.tried:
        remedy = "use more devices or a smaller model"
        if ranking.failed:
            remedy = "raise --time-limit-s, or see the reasons above"
        lines.append(f"no layout was compiled: {remedy}")
    elif best is None:
        lines.append("none of these fits: use more devices, more microbatches or train.remat full")
    else:
        order = "tokens/s" if ranking.tried[0][1].time else "memory, since no rates are known,"
        lines.append(f"best by {order} of {len(ranking.tried)} tried:\n  {command} {best.flags}")
    return "\n".join(lines)


def _row(candidate: Candidate, plan: Plan) -> tuple[str, ...]:
    sizes = {**plan.layout.mesh, "microbatches": plan.layout.microbatches}
    name = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    time, memory = plan.time, plan.memory
    if time is None:
        speed = ("n/a", "n/a")
        waiting = "n/a"
    else:
        speed = (format_count(time.tokens_per_s), f"{time.mfu:.1%}")
        waiting = f"{sum(time.exposed_s.values()) / time.step_s:.1%}"
    fits = {True: "yes", False: "no", None: "n/a"}[memory.fits]
    return (name, *speed, f"{memory.total_bytes / GIB:.1f}", fits, waiting)
