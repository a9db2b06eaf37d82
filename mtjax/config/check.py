"""How config classes are made, and the one way they refuse a value."""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class RunError(RuntimeError):
    """What goes wrong in a run through no error of the program: one message, no traceback."""


def require(ok: bool, name: str, got: object, expected: str, fix: str) -> None:
    """Raise ValueError naming the field, what was got, what was expected and the fix."""
    if not ok:
        raise ValueError(f"{name}: got {got!r}, expected {expected}; {fix}")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def config_class(prefix: str) -> Callable[[type[T]], type[T]]:
    """A frozen, keyword-only dataclass that refuses values of another type than it declares.

    Python checks no annotation, and a recipe is Python: without this a misspelt choice would reach
    code that compares it with the right ones and takes it for something else.

    Args:
        prefix: what stands before the fields' names on the command line, such as "train".
    """

    def make(cls: type[T]) -> type[T]:
        own_check = cls.__dict__.get("__post_init__")

        def check(self: Any) -> None:
            for name, hint in _hints(self.__class__).items():
                _check_type(f"{prefix}.{name}" if prefix else name, hint, getattr(self, name))
            if own_check is not None:
                own_check(self)

        cls.__post_init__ = check  # type: ignore[attr-defined]
        return dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    return make


def require_defaults(config: Any, prefix: str, names: Iterable[str] | None, condition: str) -> None:
    """Refuse values for fields that nobody reads while `condition` holds; None: for all fields.

    Raises:
        ValueError: one of them is not at its default.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name in defaults if names is None else names:
        require(
            getattr(config, name) == defaults[name],
            f"{prefix}.{name}" if prefix else name,
            getattr(config, name),
            f"the default ({defaults[name]!r}), because nothing reads it while {condition}",
            f"drop it, or set it to {defaults[name]!r}",
        )


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _check_type(name: str, hint: Any, value: Any) -> None:
    if not _has_type(hint, value):
        fix = "correct it"
        if typing.get_origin(hint) is Literal:
            close = difflib.get_close_matches(str(value), map(str, typing.get_args(hint)), n=1)
            fix = f"did you mean {close[0]!r}?" if close else fix
        require(False, name, value, _describe(hint), fix)


def _has_type(hint: Any, value: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(arg, value) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(args[0], item) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint is int:
        return type(value) is int
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple:
        return f"a tuple, each entry {_describe(args[0])}"
    words = {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "True or False",
        type(None): "None",
    }
    return words.get(hint, f"a {hint.__name__}")
