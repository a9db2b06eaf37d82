"""`launch.py plan`: compile the train step for a cluster and report on it."""

import dataclasses
import math
import sys
from pathlib import Path

from mtjax.config import Config, validate
from mtjax.planner.page import to_html
from mtjax.planner.program import compile_step_for
from mtjax.planner.report import Plan, make_plan
from mtjax.planner.text import to_json, to_text
from mtjax.planning.compile import cuda_plugin_missing
from mtjax.planning.subprocess_compile import CompileFailed
from mtjax.planning.targets import Target, parse_target
from mtjax.recipes import Provenance, command_line


@dataclasses.dataclass(frozen=True)
class Place:
    """What a plan is for: GPUs of a cluster, or virtual CPU devices of this machine."""

    target: Target | None
    """None for plain CPU devices."""
    num_devices: int
    virtual: bool
    """Compiled for CPU devices, though a target may be known."""
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> Target | int:
        """What the step is compiled for."""
        return self.num_devices if self.virtual or self.target is None else self.target

    def __str__(self) -> str:
        return f"cpu:{self.num_devices}" if self.target is None else str(self.target)


def parse_place(text: str) -> Place:
    """Read --target: a cluster as `parse_target` does, or "cpu:N".

    Without a CUDA plugin the step is compiled for virtual CPU devices, and a note says so.

    Raises:
        ValueError: malformed, or unknown GPU.
    """
    name, _, size = text.strip().partition(":")
    if name.lower() == "cpu":
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"target: got {text!r}, expected cpu:<devices>; write for example cpu:8")
        note = "Compiled for virtual CPU devices: memory, dtypes and fusion differ from a GPU's."
        return Place(None, int(size), True, (note,))
    target = parse_target(text)
    missing = cuda_plugin_missing()
    if missing is None:
        return Place(target, target.num_devices, False)
    note = f"Compiled for virtual CPU devices, not for {target}: {missing}"
    return Place(target, target.num_devices, True, (note,))


def plan(
    config: Config,
    provenance: list[Provenance],
    *,
    target: str,
    search: bool,
    max_compiles: int,
    time_limit_s: float,
    output: str,
) -> int:
    """Print a plan, or the ranking of a search; returns the exit code.

    Raises:
        ValueError: the target is unknown, or the mesh does not use its devices.
    """
    place = parse_place(target)
    folder = Path(output or f"{config.run.directory}/plan")
    if search:
        from mtjax.planner.search import search_meshes

        return search_meshes(config, provenance, place, max_compiles, time_limit_s)
    config = on_mesh(config, place)
    made = compile_plan(config, place, time_limit_s)
    print(to_text(made), flush=True)
    if made.memory.fits is False:
        from mtjax.planner.changes import try_changes

        made = dataclasses.replace(made, changes=try_changes(config, place, time_limit_s))
        print(changes_text(made))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(to_json(made), encoding="utf-8")
    (folder / "plan.html").write_text(to_html(made), encoding="utf-8")
    print(f"saved: {folder / 'plan.json'}, {folder / 'plan.html'}")
    return 0
