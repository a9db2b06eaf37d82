"""Changes that make a step smaller, each tried by compiling it."""

import dataclasses
import sys
from collections.abc import Iterator

from mtjax.config import Config
from mtjax.planner.memory import estimate_memory
from mtjax.planner.place import Place
from mtjax.planner.program import compile_step_for
from mtjax.planner.report import Change, make_plan
from mtjax.planning.subprocess_compile import CompileFailed


def try_changes(config: Config, place: Place, num: int, time_limit_s: float) -> tuple[Change, ...]:
    """The `num` changes that formulas favour, as compiled, most memory saved first."""
    likely = sorted(smaller(config, place), key=lambda c: sum(estimate_memory(c[1]).values()))
    found = []
    for flags, other in likely[:num]:
        print(f"trying {flags}", file=sys.stderr, flush=True)
        try:
            plan = make_plan(compile_step_for(other, place.devices, time_limit_s), place.target)
        except CompileFailed as error:
            print(f"  {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        step_s = plan.time.step_s if plan.time else None
        fits = plan.memory.fits
        found.append(
            Change(flags=flags, total_bytes=plan.memory.total_bytes, fits=fits, step_s=step_s)
        )
    return tuple(sorted(found, key=lambda change: change.total_bytes))


def smaller(config: Config, place: Place) -> Iterator[tuple[str, Config]]:
    """Single changes that are valid here, as command-line options and config."""
    train, mesh = config.train, config.mesh
    changes: list[tuple[str, dict]] = []
    if train.remat != "full":
        full = {"remat": "full", "remat_offload": ()}
        default = type(train).__dataclass_fields__["remat_save"].default
        changes.append(("--train.remat full", {"train": full | {"remat_save": default}}))
    for factor in (2, 4):
        count = train.microbatches * factor
        changes.append((f"--train.microbatches {count}", {"train": {"microbatches": count}}))
    if train.loss_chunk > 128:
        chunk = train.loss_chunk // 4
        changes.append((f"--train.loss-chunk {chunk}", {"train": {"loss_chunk": chunk}}))
    sizes = mesh.sizes
    for source in sizes:
        for target in ("fsdp", "tensor"):
            if source != target and sizes[source] % 2 == 0:
                moved = {source: sizes[source] // 2, target: sizes[target] * 2}
                flags = " ".join(f"--mesh.{axis} {size}" for axis, size in moved.items())
                changes.append((flags, {"mesh": moved}))
    for flags, parts in changes:
        replaced = {
            part: dataclasses.replace(getattr(config, part), **fields)
            for part, fields in parts.items()
        }
        try:
            other = place.resolve(dataclasses.replace(config, **replaced))
        except ValueError:
            continue  # not valid for this model or batch
        yield flags, other
