"""The command line: which command, which recipe, which overrides.

Nothing here imports jax before the whole command line has been checked.
"""

import contextlib
import difflib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from mtjax import __version__
from mtjax.config import Config, validate
from mtjax.config.check import RunError, require
from mtjax.config.data import PrepareConfig, SplitName
from mtjax.config.sampling import SamplingConfig
from mtjax.operation.faults import EarlyEnd
from mtjax.operation.folder import check_folder
from mtjax.options import check_words, parse
from mtjax.recipes import Origin, load_recipe, recipe_folders, trace

USAGE = """\
mtjax: train large transformers in JAX, with the same numbers on any device layout

  python launch.py [train] --config RECIPE [overrides]       train, or resume a run
  python launch.py evaluate --config RECIPE [overrides]      loss of a checkpoint on held-out data
  python launch.py generate --config RECIPE --prompt TEXT    text from a checkpoint
  python launch.py parity --config RECIPE --meshes M [M..]   the same steps on several meshes
  python launch.py plan --config RECIPE --target h200:32x8   memory, traffic, time on a cluster
  python launch.py prepare --paths FILES --output PREFIX     tokenise a corpus to .bin/.idx

RECIPE is a Python file, or the name of one in configs/ ({recipes}).
Overrides set any field of the config: --model.num-layers 4 --mesh.tensor 2. All fields, with their
meaning: python launch.py [command] --config RECIPE --help
"""

Root = Annotated[Config, tyro.conf.arg(name="")]
"""A config whose fields need no prefix on the command line."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train, or resume the run in run.directory."""

    config: Root


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Loss of a checkpoint on held-out data; checkpoint.restore_step picks the step."""

    config: Root
    split: SplitName = "valid"
    """Part of the data that is read."""
    compare_precision: bool = False
    """Also compare loss and gradients of one batch with those without quantised products."""


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Text from a checkpoint; checkpoint.restore_step picks the step."""

    config: Root
    prompt: str = ""
    """Text to continue; empty takes train.sample_prompt."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(
        default_factory=SamplingConfig
    )
    """How tokens are drawn."""


@dataclass(frozen=True, kw_only=True)
class ParityCommand:
    """Run the same steps on one device and on other meshes, and compare every number."""

    config: Root
    meshes: tuple[str, ...] = ()
    """Meshes to compare with one device, such as "fsdp=8" "data=2,tensor=4,microbatches=4"."""
    steps: int = 3
    """Optimizer steps to run on each."""
    tolerance: float | None = None
    """Largest relative difference allowed, 0 or more; None takes 1e-5 for fp32, 4e-2 for bf16 and
    2e-2 for fp16."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Compile the train step for a cluster, without its GPUs, and say what it will do there."""

    config: Root
    target: str = ""
    """GPUs as <gpu>:<hosts>x<GPUs per host>, such as h200:32x8; <gpu> may be a TOML file; cpu:8
    takes virtual CPU devices."""
    search: bool = False
    """Try meshes for the target, rank them by estimated tokens/s and print the best command. Axes
    given on the command line (--mesh.tensor 8) keep their size."""
    max_compiles: int | None = None
    """Meshes that a search compiles at most, least communication first; None is 12."""
    time_limit_s: float = 900.0
    """Seconds one compile may take."""
    output: str = ""
    """Folder for plan.json and plan.html, or search.json; empty takes run.directory/plan."""


def _train(command: TrainCommand, origin: Origin) -> int:
    from mtjax.training.loop import train

    return train(command.config, origin.fields)


def _evaluate(command: EvaluateCommand, origin: Origin) -> int:
    from mtjax.training.commands import evaluate

    return evaluate(command.config, command.split, command.compare_precision)


def _generate(command: GenerateCommand, origin: Origin) -> int:
    try:
        command.prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8
        raise ValueError(
            f"--prompt: got {command.prompt!r}, which is not UTF-8, expected text; check the "
            "encoding of the terminal or of the script"
        ) from error
    from mtjax.training.commands import generate_text

    return generate_text(command.config, command.prompt, command.sampling)


def _parity(command: ParityCommand, origin: Origin) -> int:
    from mtjax.config.layout import checked_layout
    from mtjax.config.mesh import parse_layout

    layouts = [parse_layout(text) for text in command.meshes]
    if not layouts:
        raise ValueError('--meshes: got none, expected at least one such as "fsdp=8"; name one')
    require(command.steps > 0, "--steps", command.steps, "at least 1", "raise it")
    tolerance = command.tolerance
    ok = tolerance is None or 0 <= tolerance < math.inf
    require(ok, "--tolerance", tolerance, "a number of at least 0", "leave it out for the default")
    for layout in layouts:
        checked_layout(command.config, layout)
    _want_cpu_devices(max(layout.num_devices for layout in layouts))
    from mtjax.training.parity import parity

    return parity(command.config, layouts, command.steps, command.tolerance)


def _plan(command: PlanCommand, origin: Origin) -> int:
    if not command.target:
        raise ValueError("--target: got none, expected a cluster; write for example h200:1x8")
    compiles, limit_s = command.max_compiles, command.time_limit_s
    require(0 < limit_s < 1e6, "--time-limit-s", limit_s, "seconds in (0, 1e6)", "try 900")
    require(
        compiles is None or (compiles > 0 and command.search),
        "--max-compiles",
        compiles,
        "a positive number, and --search",
        "drop it",
    )
    option = "--output" if command.output else "run.directory"
    check_folder(command.output or f"{command.config.run.directory}/plan", option)
    # The devices that count are the target's; this process only reads what compilers wrote.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from mtjax.planner.command import plan, search

    if not command.search:
        return plan(command.config, command.target, limit_s, command.output)
    output = command.output
    return search(command.config, command.target, compiles or 12, limit_s, output, origin)


def _want_cpu_devices(count: int) -> None:
    """Ask for virtual CPU devices; read when jax starts, without effect on GPU."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


COMMANDS: dict[str, tuple[type, Callable[[Any, Origin], int]]] = {
    "train": (TrainCommand, _train),
    "evaluate": (EvaluateCommand, _evaluate),
    "generate": (GenerateCommand, _generate),
    "parity": (ParityCommand, _parity),
    "plan": (PlanCommand, _plan),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 for a wrong command line or config, 1 for a run
    that can't go on. A stop signal before the first step ends the process with 130 (Ctrl-C) or
    143 (SIGTERM)."""
    args = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # Library chatter; our own lines carry what a user needs.
    for name in ("absl", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("ended by a stop signal before it was done", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, FileNotFoundError, RunError) as error:
        if os.environ.get("MTJAX_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2


def _run(args: list[str]) -> int:
    if "--version" in args:
        print(f"mtjax {__version__}")
        return 0
    name = "train"
    if args and not args[0].startswith("-"):
        name = args.pop(0)
    if name == "prepare":
        return _prepare(args)
    if name not in COMMANDS:
        known = [*COMMANDS, "prepare"]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see launch.py --help"
        raise ValueError(f"command: got {name!r}, expected one of {', '.join(known)}; {hint}")
    recipe_name, rest = _take_config(args)
    command_type, run = COMMANDS[name]
    if recipe_name is None:
        if "--help" in args or "-h" in args or not args:
            recipes = sorted({p.stem for f in recipe_folders() for p in f.glob("[!_]*.py")})
            print(USAGE.format(recipes=", ".join(recipes)))
            return 0
        check_words(rest, command_type)
        raise ValueError("--config: got none, expected a recipe; try --config tiny_gpt.py")
    with _ending(name):
        recipe, path = load_recipe(recipe_name)
        program = f"launch.py {name} --config {recipe_name}"
        command = parse(command_type, rest, program, command_type(config=recipe))
        validate(command.config)
        return run(command, Origin(recipe_name, trace(recipe, path, command.config)))


def _prepare(args: list[str]) -> int:
    from mtjax.data.prepare import main as prepare

    config = parse(PrepareConfig, args, "launch.py prepare")
    check_folder(Path(config.output).parent, "--output")
    with _ending("prepare"):
        return prepare(config)


@contextlib.contextmanager
def _ending(command: str) -> Iterator[None]:
    """What Ctrl-C and SIGTERM do, but in the training loop, which has its own handling."""
    if command not in ("prepare", "plan"):
        what = "nothing was trained, nothing new to save" if command == "train" else "not done"
        with EarlyEnd(f"ending at once: {what}"):
            yield
        return
    # They have half-written files or processes to clean up, and never are in native code for long.
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ValueError):  # in a thread, where nothing is to be done
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def _take_config(args: list[str]) -> tuple[str | None, list[str]]:
    """The value of --config, and the other arguments."""
    rest: list[str] = []
    found: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if arg == "--config":
            value = next(remaining, None)
            if value is None:
                raise ValueError("--config: got no value, expected a recipe; name one")
            found.append(value)
        elif arg.startswith("--config="):
            found.append(arg.removeprefix("--config="))
        else:
            rest.append(arg)
    if len(found) > 1:
        raise ValueError(
            f"--config: got it twice ({' and '.join(found)}), expected one recipe; leave one out"
        )
    return (found[0] if found else None), rest
