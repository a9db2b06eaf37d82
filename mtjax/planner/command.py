"""`launch.py plan`: compile the train step for a cluster and report on it."""

import dataclasses
from pathlib import Path

from mtjax.config import Config
from mtjax.planner.changes import try_changes
from mtjax.planner.page import to_html
from mtjax.planner.place import Place, parse_place
from mtjax.planner.program import compile_step_for
from mtjax.planner.report import Plan, make_plan
from mtjax.planner.search import ranking_text, search_layouts
from mtjax.planner.text import changes_text, to_json, to_text

NUM_CHANGES = 3
"""Changes tried for a step that does not fit."""


def plan(config: Config, target: str, time_limit_s: float, output: str) -> int:
    """Print and save the plan of one layout; returns the exit code.

    Raises:
        ValueError: the target is unknown, or the mesh does not use its devices.
        CompileFailed: the step does not compile.
    """
    place = parse_place(target)
    config = place.resolve(config)
    step = compile_step_for(config, place.devices, time_limit_s)
    found = make_plan(step, place.target, Path(config.run.directory).name, place.notes)
    print(to_text(found), flush=True)
    if found.memory.fits is False:
        changes = try_changes(config, place, NUM_CHANGES, time_limit_s)
        found = dataclasses.replace(found, changes=changes)
        print(changes_text(found), flush=True)
    _save(found, Path(output or f"{config.run.directory}/plan"))
    return 0


def search(
    config: Config, target: str, max_compiles: int, time_limit_s: float, command: str
) -> int:
    """Print the ranking of layouts; returns 1 if none fits.

    Raises:
        ValueError: the target is unknown.
    """
    place: Place = parse_place(target)
    ranking = search_layouts(config, place, max_compiles, time_limit_s)
    print("\n".join((*place.notes, ranking_text(ranking, command))), flush=True)
    return 0 if any(plan.memory.fits is not False for _, plan in ranking.tried) else 1


def _save(found: Plan, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("plan.json", to_json(found)), ("plan.html", to_html(found))):
        (folder / name).write_text(text, encoding="utf-8")
        print(f"saved: {folder / name}")
