"""Compiles in a process of its own, because XLA may abort or run away on what it cannot handle.

A failed check inside XLA kills the interpreter; there is no exception to catch. Here it becomes a
CompileFailed that holds the last lines XLA wrote.
"""

import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mtjax.config.check import RunError

Result = TypeVar("Result")

_TAIL_LINES = 15
# XLA prints a C++ stack below a failed check; the check itself is what helps.
_NOISE = ("    @ ", "*** Check failure stack trace", "PC: @")


class CompileFailed(RunError):
    """The compiling process died, ran out of time or raised."""


def compile_in_subprocess(
    build: Callable[..., Result],
    *,
    time_limit_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Result:
    """Runs `build(**kwargs)` in a fresh Python and returns its result, programs unexecutable.

    Args:
        build: a function at the top level of a module or script file, found again by the file's
            path and the function's name; it calls `compile_for` and returns what can be pickled.
        time_limit_s: the process is killed after this long.
        env: added to the environment, which always has JAX_PLATFORMS=cpu unless given here.
        kwargs: picklable arguments for build.

    Raises:
        ValueError: build is not a top-level function.
        CompileFailed: with the reason and the last lines of the process.
    """
    if "<" in build.__qualname__ or "." in build.__qualname__:
        raise ValueError(
            f"build: got {build.__qualname__}, expected a function at the top level of a module; "
            "move it there and pass what it needs as keyword arguments"
        )
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder, "request"), Path(folder, "reply")
        source = inspect.getsourcefile(build)
        request.write_bytes(pickle.dumps((build.__module__, source, build.__name__, kwargs)))
        output, status = _run(request, reply, time_limit_s, env or {})
        if status != 0 or not reply.exists():
            raise CompileFailed(f"{build.__name__}: {_reason(status, time_limit_s)}\n{output}")
        return pickle.loads(reply.read_bytes())


def _run(request: Path, reply: Path, time_limit_s: float, env) -> tuple[str, int | None]:
    """(last lines of output, exit status or None when killed for time)."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(request), str(reply)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=time_limit_s)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        # XLA compiles in threads and may start ptxas: end the whole group.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = None
    lines = [line for line in output.splitlines() if line and not line.startswith(_NOISE)]
    return "\n".join(lines[-_TAIL_LINES:]), status


def _reason(status: int | None, time_limit_s: float) -> str:
    if status is None:
        return (
            f"still compiling after {time_limit_s:g} s; raise time_limit_s (plan: --time-limit-s)"
        )
    if status < 0:
        return f"XLA killed the process with {signal.Signals(-status).name}; it last wrote:"
    return f"the process ended with status {status}; it last wrote:"


_CHILD = "import sys; from mtjax.planning.subprocess_compile import serve; serve(*sys.argv[1:])"


def serve(request: str, reply: str) -> None:
    """What the child does: loads the function, runs it, writes the result to `reply`."""
    module_name, source, name, kwargs = pickle.loads(Path(request).read_bytes())
    result = getattr(_load(module_name, source), name)(**kwargs)
    Path(reply).write_bytes(pickle.dumps(result))


def _load(module_name: str, source: str):
    """The module by name if that is the same file, else from its file (scripts, tests)."""
    try:
        module = importlib.import_module(module_name)
        if module_name != "__main__" and inspect.getsourcefile(module) == source:
            return module
    except ImportError:
        pass
    spec = importlib.util.spec_from_file_location("mtjax_compiled_module", source)
    assert spec is not None and spec.loader is not None, source
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
