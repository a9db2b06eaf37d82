"""Keeping what libraries print about a damaged file behind the one error that we raise."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_reads() -> Iterator[None]:
    """While arrays are read: no log page of asyncio per unreadable array; and when reading fails,
    no report of tensorstore's other reads, which go on and end in an event loop that is closed."""
    asyncio_log = logging.getLogger("asyncio")
    level = asyncio_log.level
    asyncio_log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception:
        _ignore_closed_loops()
        raise
    finally:
        asyncio_log.setLevel(level)


def first_cause(error: BaseException) -> str:
    """What went wrong first, without the specifications that tensorstore and orbax append."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).split(" [tensorstore_spec", 1)[0]
    return text.split(" See full TensorStore details", 1)[0] or type(error).__name__


def _ignore_closed_loops() -> None:
    """Those reads end whenever they do, so the hook stays."""
    previous = sys.unraisablehook
    if getattr(previous, "ignores_closed_loops", False):
        return

    def hook(report: Any) -> None:
        closed = isinstance(report.exc_value, RuntimeError)
        if not (closed and "Event loop is closed" in str(report.exc_value)):
            previous(report)

    hook.ignores_closed_loops = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
