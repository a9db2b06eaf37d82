"""What a checkpoint was made with, and how that compares with what reads it.

A manifest is a JSON object with the keys `config` (the run's config as nested plain values),
`mesh` (axis name to size) and `versions` (package name to version).
"""

import difflib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_PACKAGES = ("mtjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_ABSENT = "absent"

# Whether a manifest entry must match on resume. The longest dotted prefix decides; what no line
# names must match, so that a new config field is safe until somebody says otherwise.
MUST_MATCH: dict[str, bool] = {
    "mesh": False,
    "versions": False,
    "config.checkpoint": False,
    "config.data.prefetch": False,
    "config.data.scan_tokens": False,
    "config.mesh": False,
    "config.model.attention.backend": False,
    "config.model.attention.exchange": False,
    "config.model.moe.allow_expanded_products": False,
    "config.pipeline": False,
    "config.quantize.backend": False,
    "config.quantize.fallback_ratio": False,
    "config.quantize.fallback_steps": False,
    "config.quantize.statistics": False,
    "config.run": False,
    "config.train.eval_batches": False,
    "config.train.eval_every": False,
    "config.train.loss_chunk": False,
    "config.train.remat": False,
    "config.train.remat_offload": False,
    "config.train.remat_save": False,
    "config.train.sample_prompt": False,
    "config.train.sample_tokens": False,
    "config.train.steps": False,
    "config.train.unroll_layers": False,
}


_OTHER_WAYS = {
    "model.moe.num_experts": ". A new run starts from one with another number of experts by "
    "--checkpoint.resize-from, from one without by --checkpoint.upcycle-from",
}


class CheckpointMismatch(ValueError):
    """The checkpoint does not fit the current config or state; the text lists all differences."""


def build_manifest(config: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
    """The manifest of a run.

    `config` holds nested plain values (`dataclasses.asdict`), `mesh` axis sizes. Raises ValueError
    for values that JSON can't hold.
    """
    try:
        plain = json.loads(json.dumps(config))
    except TypeError as error:
        raise ValueError(
            f"the config holds a value that is not plain ({error}), expected numbers, strings, "
            "booleans, lists and dicts: convert it before building the manifest"
        ) from error
    return {"config": plain, "mesh": dict(mesh), "versions": _versions()}


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """All entries that differ, one line "dotted.name: saved -> current" each, sorted by name."""
    return [f"{name}: {change}" for name, change in _changes(saved, current)]


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, str]]:
    old, new = _flatten(saved, ""), _flatten(current, "")
    return [
        (name, f"{old.get(name, _ABSENT)} -> {new.get(name, _ABSENT)}")
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]


def must_match(name: str) -> bool:
    """Whether the manifest entry `name` (dotted) must be equal on resume."""
    best = max((p for p in MUST_MATCH if _is_under(name, p)), key=len, default=None)
    return True if best is None else MUST_MATCH[best]


def compare(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    where: str,
    allow: Iterable[str] = (),
    only: str = "",
    fits: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Differences that may stay, as lines for the log.

    `where` names the checkpoint, `allow` holds dotted config prefixes the user accepts, `only`
    restricts what must match to one dotted prefix. Raises CheckpointMismatch with every difference
    that must not be; the text offers to allow them if the stored arrays `fits` this config, without
    which what was allowed is refused too.
    Raises ValueError when `allow` names a field that neither config has.
    """
    names_allowed = check_allowed(allow, saved, current)
    allowed = [f"config.{prefix}" for prefix in names_allowed]
    fatal: list[tuple[str, str]] = []
    harmless: list[tuple[str, str]] = []
    accepted: list[str] = []
    for name, change in _changes(saved, current):
        free = not must_match(name) or (bool(only) and not _is_under(name, only))
        shown = name.removeprefix("config.")
        if not free and any(_is_under(name, prefix) for prefix in allowed):
            accepted.append(f"{shown}: {change} (allowed)")
            free = True
        (harmless if free else fatal).append((shown, f"{shown}: {change}"))
    fitting = not (fatal or accepted) or fits()
    if fatal or not fitting:
        names = " ".join([*names_allowed, *(name for name, _ in fatal)])
        fix = "Use the checkpoint's values, start a new run with another --run.directory"
        if fitting:
            fix += f", or accept the change with --checkpoint.allow-changes {names}"
        else:
            fix = fix.replace(", start", " or start") + (
                " (arrays of other names or shapes come of it, so it can't be allowed)"
            )
            fatal += [("", line) for line in accepted]
        fix += "".join(hint for name, hint in _OTHER_WAYS.items() if name in dict(fatal))
        raise CheckpointMismatch(
            f"{where} was made with another config (checkpoint -> now):\n  "
            + "\n  ".join(line for _, line in fatal)
            + f"\n{fix}"
        )
    # The mesh is named twice: as asked for in the config, and as it was built.
    return list(dict.fromkeys(line for _, line in harmless))


def check_allowed(allow: Iterable[str], *manifests: Mapping[str, Any]) -> list[str]:
    """The prefixes of config fields in `allow`, with "_" for "-". Raises ValueError, with the
    closest, for one that no config of `manifests` has."""
    known: set[str] = set()
    for manifest in manifests:
        for name in _flatten(manifest["config"], ""):
            parts = name.split(".")
            known.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    names = [name.replace("-", "_") for name in allow]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else "see --help for the fields"
            raise ValueError(
                f"checkpoint.allow_changes: got {name!r}, expected a field or a group of fields "
                f"of the config; {hint}"
            )
    return names


def check_steps(train_steps: int, checkpoint_step: int) -> None:
    """Raises ValueError when a run of `train_steps` steps is shorter than what was trained."""
    if train_steps < checkpoint_step:
        raise ValueError(
            f"train.steps is {train_steps}, but the checkpoint is already at step "
            f"{checkpoint_step}: there is nothing left to train. Set --train.steps above "
            f"{checkpoint_step} to go on, or start a new run with another --run.directory"
        )


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _flatten(value: Any, prefix: str) -> dict[str, str]:
    """Dotted name -> JSON text of each leaf; lists of plain values count as one leaf."""
    if isinstance(value, Mapping) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(i, Mapping | list) for i in value):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: json.dumps(value)}
    flat: dict[str, str] = {}
    for key, item in items:
        flat.update(_flatten(item, f"{prefix}.{key}" if prefix else key))
    return flat


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
