"""Recipes: Python files with a `get_config()`, and overrides on top of them."""

import contextlib
import dataclasses
import difflib
import importlib.util
import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtjax.config import Config


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a field got its value."""

    field: str
    """Dotted name, such as model.num_layers."""
    value: Any
    source: str
    """"command line", the recipe's file, or "caller" where a program made the config."""


class Origin(NamedTuple):
    """Where the whole of a config came from."""

    recipe: str
    """The recipe as it was named on the command line."""
    fields: list[Provenance]


def recipe_folders() -> list[Path]:
    """Where recipe names are looked up: ./configs, then those that ship with mtjax."""
    package = Path(__file__).resolve().parent
    return [Path("configs"), package.parent / "configs", package / "configs"]


def find_recipe(name: str) -> Path:
    """Path of a recipe given as a file or by its name in configs/, with or without .py.

    Raises:
        ValueError: there is none; lists the closest names.
    """
    if Path(name).is_file():
        return Path(name)
    file = name if name.endswith(".py") else f"{name}.py"
    for folder in recipe_folders():
        if (folder / file).is_file():
            return folder / file
    known = sorted({p.name for f in recipe_folders() for p in f.glob("*.py") if p.name[0] != "_"})
    close = difflib.get_close_matches(file[:-3], [each[:-3] for each in known], n=1)
    hint = f"did you mean {close[0]}.py?" if close else f"known are {', '.join(known)}"
    raise ValueError(f"--config: got {name!r}, expected a file or a recipe of configs/; {hint}")


def load_recipe(name: str) -> tuple[Config, Path]:
    """Run a recipe's `get_config()`.

    Raises:
        ValueError: no such recipe, no `get_config`, a misspelt field, or an invalid value.
    """
    path = find_recipe(name)
    module_spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"--config: got {str(path)!r}, expected a Python file ending in .py")
    module = importlib.util.module_from_spec(module_spec)
    with _explained(path):
        module_spec.loader.exec_module(module)
        make = getattr(module, "get_config", None)
        if make is None:
            raise ValueError("found no get_config(), expected one that returns a Config; define it")
        config = make()
        if not isinstance(config, Config):
            raise ValueError(
                f"get_config() returned {type(config).__name__}, expected mtjax.config.Config"
            )
    return config, path


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what a wrong recipe raises into one message that names the file and the fix."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a recipe is a program: it may raise anything
        where, text = _place(path, error), " ".join(str(error).splitlines())
        if isinstance(error, TypeError) and (unknown := explain_keyword(error)):
            text = unknown
        elif not (_is_ours(error) or isinstance(error, SyntaxError)):
            text = f"{type(error).__name__}: {text}"
        raise ValueError(f"{where}: {text}") from error


def _is_ours(error: BaseException) -> bool:
    """Whether mtjax itself refused something, with a text that needs no exception's name."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).resolve().parent
    return isinstance(error, ValueError) and package in Path(frames[-1].filename).resolve().parents


def _place(path: Path, error: BaseException) -> str:
    """The recipe's file, and the line of it that was running last."""
    if isinstance(error, SyntaxError):  # its text has the line, of whichever file it is
        return str(path)
    file = str(path.resolve())
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if str(Path(frame.filename).resolve()) == file
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def explain_keyword(error: TypeError) -> str:
    """A TypeError about an unknown keyword, with the closest field of that config class; empty for
    any other."""
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if not match:
        return ""
    owner, name = match.groups()
    fields = _fields_by_class(Config).get(owner, [])
    close = difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(fields)}"
    return f"{owner} has no field {name!r}; {hint}"


def _fields_by_class(cls: Any) -> dict[str, list[str]]:
    """Names of the fields of every config class under `cls`."""
    found = {cls.__name__: [f.name for f in dataclasses.fields(cls)]}
    for config_field in dataclasses.fields(cls):
        factory = config_field.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            found |= _fields_by_class(factory)
    return found


def trace(recipe: Config, path: Path, config: Config) -> list[Provenance]:
    """Where each field of `config` that is not at its default came from: recipe or command line."""
    changed = _differences(recipe, config, COMMAND_LINE)
    overridden = {p.field for p in changed}
    by_recipe = _differences(Config(), config, str(path))
    return [p for p in by_recipe if p.field not in overridden] + changed


def from_caller(config: Config) -> list[Provenance]:
    """The fields of a config made by a program, without recipe or command line."""
    return _differences(Config(), config, "caller")


def override_flags(provenance: Sequence[Provenance]) -> str:
    """The overrides of a command line, as they may be typed again; those of the mesh left out."""
    words = []
    for entry in provenance:
        if entry.source != COMMAND_LINE or entry.field.startswith("mesh."):
            continue
        parent, _, name = entry.field.replace("_", "-").rpartition(".")
        values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
        if isinstance(entry.value, bool):
            name, values = (name if entry.value else f"no-{name}"), ()
        words += [f"--{parent}.{name}" if parent else f"--{name}", *map(str, values)]
    return shlex.join(words)


COMMAND_LINE = "command line"
"""Source of what was given there."""


def _differences(base: Any, config: Any, source: str, prefix: str = "") -> list[Provenance]:
    """Fields of `config` that differ from `base`, depth first."""
    found = []
    for config_field in dataclasses.fields(config):
        old, new = getattr(base, config_field.name), getattr(config, config_field.name)
        name = prefix + config_field.name
        if dataclasses.is_dataclass(new):
            found += _differences(old, new, source, f"{name}.")
        elif old != new:
            found.append(Provenance(name, new, source))
    return found


def describe(provenance: Sequence[Provenance]) -> str:
    """One line per field that differs from its default: name, value, source."""
    if not provenance:
        return "all fields at their defaults"
    width = max(len(p.field) for p in provenance)
    return "\n".join(f"  {p.field:<{width}}  {p.value!r}  ({p.source})" for p in provenance)
