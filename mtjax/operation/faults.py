"""Stop signals, hangs and diverging losses."""

import faulthandler
import functools
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

EXIT_HANG = 74
"""Exit code of a process that its watchdog ended."""


# The descriptor: sys.stderr may be an object without one, as in a notebook.
_STDERR = 2


class EarlyEnd:
    """Ends the process at once on SIGTERM or SIGINT, with one line, while no StopRequest is there.

    Python calls a handler only when native code returns, which takes minutes while XLA compiles.
    So a thread does it, told by the signal's wake-up file. The exit code is 128 and the number of
    the signal, as a shell has it. Use as a context manager; without effect outside the main thread.
    """

    steps_ran = False
    """Whether a StopRequest has been entered in this process: the loop had its own handling."""

    def __init__(self, text: str) -> None:
        """`text` says what the end means."""
        self._text = text
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1

    def __enter__(self) -> "EarlyEnd":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=self._pipe[:1], daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            # nohup and shell jobs in the background ignore SIGINT, and so do we then.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe[1])  # ends the thread, which closes the other end
        self._pipe = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Has the signal written to the wake-up file instead of killing the process."""

    def _watch(self, wakeup: int) -> None:
        while data := os.read(wakeup, 1):
            number = data[0]
            if signal.getsignal(number) == self._handle:
                text = "the run had ended" if EarlyEnd.steps_ran else self._text
                os.write(_STDERR, f"{signal.Signals(number).name}: {text}\n".encode())
                os._exit(128 + number)
        os.close(wakeup)


class StopRequest:
    """Turns SIGTERM and SIGINT into a flag that the loop looks at after each step.

    Use as a context manager in the main thread. A second SIGINT (Ctrl-C) ends the process at
    once, with exit code 130.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self._previous: dict[int, Any] = {}
        self._wakeup = -1
        self._pending: Any = None

    def __enter__(self) -> "StopRequest":
        EarlyEnd.steps_ran = True
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        # Nor may the thread of an EarlyEnd learn of a signal and act on it when this has ended.
        self._wakeup = signal.set_wakeup_fd(-1)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        signal.set_wakeup_fd(self._wakeup)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return bool(self.signal_name)

    def agreed(self) -> bool:
        """Whether to stop after this step; the same answer on all processes.

        Call once per step on every process. One process: `requested`. Several: the flags as they
        were at the previous call, so that the reduction runs behind the step on the device and
        the host never waits for more than the step before.
        """
        import jax

        if jax.process_count() == 1:
            return self.requested
        previous, self._pending = self._pending, _start_any(self.requested)
        return previous is not None and _finish_any(previous)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.requested:
            os.write(_STDERR, b"second SIGINT: exiting at once, nothing is saved\n")
            os._exit(130)
        self.signal_name = name
        # A handler may interrupt a print: only os.write is safe here.
        os.write(_STDERR, f"{name}: stopping after this step\n".encode())


def agree(flag: bool) -> bool:
    """Whether `flag` is true on any process; all processes call this together and wait."""
    import jax

    return flag if jax.process_count() == 1 else _finish_any(_start_any(flag))


def _start_any(flag: bool) -> Any:
    """Dispatches a maximum of `flag` over all devices; returns the pending scalar."""
    import jax
    import numpy as np

    split, maximum = _maximum_over_devices()
    shape = (jax.device_count(),)
    one = np.full((1,), flag, np.int32)
    return maximum(jax.make_array_from_callback(shape, split, lambda _: one))


@functools.cache
def _maximum_over_devices() -> tuple[Any, Any]:
    """One value per device as a sharding, and the jitted maximum of such an array."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    maximum = jax.jit(jax.numpy.max, out_shardings=replicated)
    return NamedSharding(mesh, PartitionSpec("all")), maximum


def _finish_any(pending: Any) -> bool:
    return bool(pending.addressable_data(0))


class Watchdog:
    """Ends the process when no step finishes for `timeout_s` seconds.

    The stacks of all Python threads go to stderr and to `<directory>/stacks-<process>.txt`, a
    message names the process and its last step, and the process exits with code EXIT_HANG.
    `startup_s` is the limit before the first beat. 0 turns the watchdog off. `board` (see
    mtjax.operation.distributed.BeatBoard) shares steps between processes, so that the message
    can say who is behind and who is silent.
    """

    def __init__(
        self,
        timeout_s: float,
        directory: str | pathlib.Path,
        *,
        startup_s: float | None = None,
        process_index: int = 0,
        board: Any = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._limit_s = timeout_s if startup_s is None else startup_s
        self._pause_s = min(max(timeout_s / 8, 0.05), 5.0)
        self._path = pathlib.Path(directory) / f"stacks-{process_index}.txt"
        self._process = process_index
        self._board = board
        self._step: int | None = None
        self._phase = "the first step"
        self._last_s = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._timeout_s > 0:
            self._last_s = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
            if self._board is not None:
                threading.Thread(target=self._publish, name="beats", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def beat(self, step: int) -> None:
        """Says that `step` is finished."""
        # The clock first: the thread must not hold the old one against a shorter limit.
        self._last_s = time.monotonic()
        self._step, self._phase, self._limit_s = step, f"step {step + 1}", self._timeout_s

    @contextmanager
    def phase(self, name: str, timeout_s: float | None = None) -> Iterator[None]:
        """Gives work that is no step, such as an evaluation, its own limit and name."""
        before = self._phase, self._limit_s
        self._last_s = time.monotonic()
        self._phase = name
        self._limit_s = self._limit_s if timeout_s is None else timeout_s
        try:
            yield
        finally:
            self._last_s = time.monotonic()
            self._phase, self._limit_s = before

    def _watch(self) -> None:
        while True:
            idle_s, limit_s = time.monotonic() - self._last_s, self._limit_s
            if limit_s > 0 and idle_s > limit_s:
                self._end(idle_s)
            # If native code hangs while it holds the interpreter lock, this thread can't run;
            # the timer of faulthandler is native and fires all the same.
            faulthandler.dump_traceback_later(2 * max(limit_s, 1.0) + 10, exit=True, file=_STDERR)
            # Not by what is left now: a beat may bring in a shorter limit while this sleeps.
            if self._done.wait(self._pause_s):
                return

    def _publish(self) -> None:
        """Writes to the board; a thread of its own, for a frozen coordinator blocks the call."""
        while True:
            # A lost beat is made good by the next one.
            with suppress(Exception):
                self._board.publish(self._step)
            if self._done.wait(self._pause_s):
                return

    def _end(self, idle_s: float) -> None:
        last = "no step finished yet" if self._step is None else f"last finished step {self._step}"
        lines = [
            f"process {self._process}: no progress for {idle_s:.0f} s in {self._phase} ({last}).",
            f"The stacks of all threads are above and in {self._path}.",
            *self._peers(),
            f"Exiting with code {EXIT_HANG}. If steps are this slow, raise "
            "--run.faults.watchdog_timeout_s.",
        ]
        text = "\n".join(lines) + "\n"
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:
            text += f"The stacks could not be written to {self._path}: {error}\n"
        os.write(_STDERR, text.encode())
        os._exit(EXIT_HANG)

    def _peers(self) -> list[str]:
        """Who is behind, asked of the coordinator for at most five seconds."""
        if self._board is None:
            return []
        answer: list[str] = []

        def ask() -> None:
            # Any failure says the same: whoever keeps the board is gone.
            with suppress(Exception):
                answer.append(self._board.describe(silent_s=self._limit_s / 2))

        asker = threading.Thread(target=ask, daemon=True)
        asker.start()
        asker.join(timeout=5.0)
        return answer or ["The coordinator (process 0) does not answer."]
