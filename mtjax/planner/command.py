"""`launch.py plan`: compile the train step for a cluster and report on it."""

import dataclasses
import sys
from pathlib import Path

from mtjax.config import Config
from mtjax.planner.changes import try_changes
from mtjax.planner.page import to_html
from mtjax.planner.place import Place, check_plannable, parse_place
from mtjax.planner.program import compile_step_for
from mtjax.planner.report import make_plan
from mtjax.planner.search import ranking_text, search_layouts
from mtjax.planner.text import changes_text, to_json, to_text
from mtjax.recipes import COMMAND_LINE, Origin, override_flags

NUM_CHANGES = 3
"""Changes tried for a step that does not fit."""


def plan(config: Config, target: str, time_limit_s: float, output: str) -> int:
    """Print and save the plan of one layout; returns 1 if it does not fit.

    Raises:
        ValueError: the target is unknown, the mesh does not use its devices, or the step can't be
            compiled without them.
        CompileFailed: the step does not compile.
    """
    check_plannable(config)
    place = parse_place(target)
    config = place.resolve(config)
    print(f"compiling the train step for {place} ...", file=sys.stderr, flush=True)
    step = compile_step_for(config, place.devices, time_limit_s)
    found = make_plan(step, place.target, Path(config.run.directory).name, place.notes)
    print(to_text(found), flush=True)
    if found.memory.fits is False:
        changes = try_changes(config, place, NUM_CHANGES, time_limit_s)
        found = dataclasses.replace(found, changes=changes)
        print(changes_text(found), flush=True)
    folder = Path(output or f"{config.run.directory}/plan")
    _save(folder, {"plan.json": to_json(found), "plan.html": to_html(found)})
    return 1 if found.memory.fits is False else 0


def search(
    config: Config,
    target: str,
    max_compiles: int,
    time_limit_s: float,
    output: str,
    origin: Origin,
) -> int:
    """Print and save the ranking of layouts; returns 1 if none fits.

    Mesh axes that the command line names keep their size.

    Raises:
        ValueError: the target is unknown, or steps can't be compiled without it.
    """
    check_plannable(config)
    place: Place = parse_place(target)
    fixed = {
        entry.field.removeprefix("mesh."): entry.value
        for entry in origin.fields
        if entry.source == COMMAND_LINE and entry.field.startswith("mesh.") and entry.value != -1
    }
    ranking = search_layouts(config, place, max_compiles, time_limit_s, fixed)
    command = f"python launch.py --config {origin.recipe} {override_flags(origin.fields)}".rstrip()
    print("\n".join((*place.notes, ranking_text(ranking, command))), flush=True)
    plans = ",\n".join(to_json(found).rstrip() for _, found in ranking.tried)
    _save(Path(output or f"{config.run.directory}/plan"), {"search.json": f"[{plans}]\n"})
    return 0 if any(plan.memory.fits is not False for _, plan in ranking.tried) else 1


def _save(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"saved: {folder / name}")
