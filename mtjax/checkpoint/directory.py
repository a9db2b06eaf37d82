"""The checkpoint folder on disk: which steps are usable, and moving old ones aside.

checkpoints/
  step_00000020/            one finished checkpoint
    state/                  arrays (orbax, OCDBT)
    data_state/metadata     JSON
    manifest/metadata       JSON
    manifest/sums.json      checksums of all these files
  step_00000030.orbax-...   a save that did not finish
  superseded/               checkpoints of an abandoned continuation
"""

import json
import logging
import os
import pathlib
import re
import time
from typing import Any

log = logging.getLogger(__name__)

STEP_PREFIX = "step"
STEP_DIGITS = 8
STATE, DATA_STATE, MANIFEST = "state", "data_state", "manifest"
SUPERSEDED = "superseded"

_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")
# orbax writes the marker last and then renames the folder, so either sign of an interrupted save
# (temporary name, missing marker) is conclusive on any file system.
_NEEDED = ("commit_success.txt", f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt")
_JSON_FILE = "metadata"


def step_path(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Folder of the checkpoint of `step`."""
    return directory / f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def check(directory: pathlib.Path) -> None:
    """Raises ValueError when `directory` exists but can't be listed."""
    try:
        if directory.exists():
            os.listdir(directory)
    except OSError as error:
        raise ValueError(
            f"the checkpoint directory {directory} can't be read ({error.strerror}), expected a "
            "readable folder: fix its permissions or choose another --run.directory"
        ) from error


def scan(directory: pathlib.Path) -> tuple[list[int], dict[str, str]]:
    """Usable steps in increasing order, and what was ignored as {name: reason}."""
    steps, ignored = [], {}
    for entry in sorted(directory.iterdir()) if directory.exists() else ():
        match = _STEP_NAME.fullmatch(entry.name)
        if match is None:
            if entry.name != SUPERSEDED:
                unfinished = _STEP_NAME.match(entry.name) is not None
                ignored[entry.name] = "unfinished save" if unfinished else "not a checkpoint"
            continue
        problem = _problem(entry)
        if problem:
            ignored[entry.name] = problem
        else:
            steps.append(int(match[1]))
    return sorted(steps), ignored


def report_ignored(directory: pathlib.Path, ignored: dict[str, str]) -> None:
    """One log line about everything `scan` ignored."""
    if ignored:
        listed = ", ".join(f"{name} ({reason})" for name, reason in ignored.items())
        log.warning("ignored in %s: %s; delete what you do not need", directory, listed)


def read_json(directory: pathlib.Path, step: int, item: str) -> Any:
    """The JSON item `item` of a checkpoint. Raises OSError or ValueError when unreadable."""
    return json.loads((step_path(directory, step) / item / _JSON_FILE).read_text())


def move_aside(directory: pathlib.Path, first_step: int) -> None:
    """Moves checkpoint folders at or after `first_step`, usable or not, to `superseded/`."""
    moved = []
    for entry in sorted(directory.iterdir()) if directory.exists() else ():
        match = _STEP_NAME.fullmatch(entry.name)
        if match and int(match[1]) >= first_step:
            target = directory / SUPERSEDED / f"{entry.name}.{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            entry.rename(target)
            moved.append(entry.name)
    if moved:
        log.warning(
            "moved %s to %s: this run continues from an earlier step; delete them when you like",
            ", ".join(moved),
            directory / SUPERSEDED,
        )


def _problem(entry: pathlib.Path) -> str:
    """Why the folder `entry` is no usable checkpoint; empty when it is one."""
    try:
        if not entry.is_dir():
            return "not a folder"
        missing = [name for name in _NEEDED if not (entry / name).is_file()]
        for item in (DATA_STATE, MANIFEST):
            if not (entry / item / _JSON_FILE).is_file():
                missing.append(item)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return f"incomplete: no {', '.join(missing)}" if missing else ""
