"""The words of a command line against the options there are, before they are parsed.

What tyro reports as unrecognised comes without a hint, and of an option given twice it silently
takes the last. Both are refused here, with the closest names and with both values.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tyro


class Option(NamedTuple):
    """An option of the command line."""

    name: str
    """As it is typed, such as --model.num-layers."""
    values: int | None
    """Values that follow it; None: any number."""
    field: str
    """What it sets: --no-x and --x set the same."""


def options_of(cls: Any, prefix: str = "") -> Iterator[Option]:
    """All options that tyro makes of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        name = f"{prefix}{field.name}".replace("_", "-")
        if typing.get_origin(hint) is typing.Annotated:
            # The one use of tyro.conf.arg here: a part whose fields need no prefix.
            hint = typing.get_args(hint)[0]
            yield from options_of(hint, prefix)
        elif dataclasses.is_dataclass(hint):
            yield from options_of(hint, f"{name}.")
        elif hint is bool:
            group, _, last = name.rpartition(".")
            negated = f"{group}.no-{last}" if group else f"no-{last}"
            yield Option(f"--{name}", 0, name)
            yield Option(f"--{negated}", 0, name)
        else:
            yield Option(f"--{name}", _num_values(hint), name)


def _num_values(hint: Any) -> int | None:
    return None if typing.get_origin(hint) in (tuple, list, dict) else 1


def check_words(args: Sequence[str], cls: Any) -> None:
    """Refuse options that `cls` lacks, options given twice, and words that belong to none.

    Raises:
        ValueError: naming the word, with the closest names.
    """
    known = {option.name: option for option in options_of(cls)}
    seen: dict[str, str] = {}
    remaining = list(args)
    while remaining:
        word = remaining.pop(0)
        name, has_value, value = word.partition("=")
        option = known.get(_normal(name))
        if option is None:
            raise ValueError(_unknown(word, list(known)))
        values = [value] if has_value else []
        if not has_value:
            while remaining and (option.values is None or len(values) < option.values):
                if option.values is None and remaining[0].startswith("--"):
                    break
                values.append(remaining.pop(0))
        given = " ".join([name, *values])
        if option.field in seen:
            raise ValueError(
                f"{name}: got it twice ({seen[option.field]!r} and {given!r}), expected it once; "
                "leave one out"
            )
        seen[option.field] = given


def _normal(name: str) -> str:
    """An option with dashes, which may be typed with underscores."""
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def _unknown(word: str, names: list[str]) -> str:
    """What to say about a word that is no option."""
    names = [*names, "--help", "--config", "--version"]
    name = word.partition("=")[0]
    wanted = _normal(name) if name.startswith("-") else f"--{name.replace('_', '-')}"
    wanted = wanted if wanted.startswith("--") else f"-{wanted}"
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.75)
    # A part of a name, such as --num-layers, is no close match and yet means one.
    last = wanted[2:].rpartition(".")[2]
    close += [n for n in names if n[2:].rpartition(".")[2] == last and n not in close][:3]
    group = wanted[2:].partition(".")[0]
    if not close and "." in wanted:
        close = [n for n in names if n.startswith(f"--{group}.")][:6]
    hint = f"did you mean {' or '.join(close)}?" if close else "see --help for all options"
    kind = "an unknown option" if word.startswith("-") else "a word that belongs to no option"
    return f"{word}: {kind}; {hint}"


def parse(cls: Any, args: Sequence[str], prog: str, default: Any = None) -> Any:
    """The dataclass `cls` filled from the command line."""
    if "--help" not in args and "-h" not in args:
        check_words(args, cls)
    if default is None:
        return tyro.cli(cls, args=args, prog=prog)
    return tyro.cli(cls, default=default, args=args, prog=prog)
