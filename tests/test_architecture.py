"""The rules of the code base that a reader relies on."""

import ast
import dataclasses
import functools
import inspect
import re
from pathlib import Path

import pytest

from mtjax.config import Config
from mtjax.config.data import PrepareConfig
from mtjax.config.mesh import AXES, MeshConfig
from mtjax.config.sampling import SamplingConfig

PACKAGE = Path(__file__).parents[1] / "mtjax"

# Each part may import those before it. Data, checkpoints, operation and planning stand beside the
# model: they know configs, and nothing of layers.
ORDER = ["config", "sharding", "precision", "layers", "models", "parallel"]
ALLOWED = {
    part: set(ORDER[: i + 1]) | ({"config"} if part != "config" else set())
    for i, part in enumerate(ORDER)
}
ALLOWED |= {
    "data": {"config", "data"},
    "checkpoint": {"config", "checkpoint"},
    "operation": {"config", "operation"},
    "planning": {"config", "planning"},
    "recipes": {"config"},
    "inference": {*ORDER, "inference"},
    "training": {*ORDER, "data", "checkpoint", "operation", "planning", "recipes", "inference",
                 "training"},
    "planner": {*ORDER, "operation", "planning", "recipes", "training", "planner"},
    "options": set(),
    "cli": {"config", "data", "operation", "options", "planner", "recipes", "training"},
}  # fmt: skip
# config/__init__.py asks the attention backends what they support, lazily: the one exception.
EXCEPTIONS = {("config/__init__.py", "layers")}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("mtjax."):
                yield name.split(".")[1]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    relative = path.relative_to(PACKAGE)
    part = relative.parts[0].removesuffix(".py")
    for imported in imported_parts(path):
        if (str(relative), imported) not in EXCEPTIONS:
            assert imported in ALLOWED[part], f"{relative} imports mtjax.{imported}"


def config_fields(cls):
    for config_field in dataclasses.fields(cls):
        yield cls, config_field
        factory = config_field.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield from config_fields(factory)


ALL_FIELDS = [f for cls in (Config, PrepareConfig, SamplingConfig) for f in config_fields(cls)]


@pytest.mark.parametrize(
    ("cls", "config_field"), ALL_FIELDS, ids=[f"{c.__name__}.{f.name}" for c, f in ALL_FIELDS]
)
def test_a_config_field_is_read_outside_its_own_checks(cls, config_field):
    """Attribute access of that name, in the package but not in a __post_init__ or a check."""
    if cls is MeshConfig:
        # Read by name through MeshConfig.sizes, in the order of the axes.
        assert config_field.name in AXES
        return
    read = config_field.name in attributes_read()
    assert read, f"nobody reads {cls.__name__}.{config_field.name}"


@functools.cache
def attributes_read():
    """Names of all attributes that the package accesses outside of checks."""
    names = set()
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checks = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and (node.name == "__post_init__" or node.name.startswith(("_check", "validate")))
        ]
        inside = {id(n) for check in checks for n in ast.walk(check)}
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and id(node) not in inside
        }
    return names


@pytest.mark.parametrize(
    ("cls", "config_field"), ALL_FIELDS, ids=[f"{c.__name__}.{f.name}" for c, f in ALL_FIELDS]
)
def test_a_config_field_has_a_docstring(cls, config_field):
    source = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    pattern = rf'\n    {config_field.name}: [^\n]*(\n    \)|\n        [^\n]*\n    \))?\n    """+'
    assert re.search(pattern, source), f"{cls.__name__}.{config_field.name} lacks a docstring"


def test_no_file_is_longer_than_500_lines_and_the_loop_than_400():
    for path in modules():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = 400 if path.name == "loop.py" else 500
        assert lines <= limit, f"{path.relative_to(PACKAGE)} has {lines} lines"
