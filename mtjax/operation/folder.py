"""The folder of a run: whether it can be written, and that one run at a time does so."""

import errno
import fcntl
import logging
import os
import pathlib
import socket
import tempfile
import time
from typing import Any

from mtjax.config.check import RunError

log = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderBusy(RunError):
    """Another run writes to the folder; the text says which."""


def check_folder(path: str | pathlib.Path, option: str) -> None:
    """Makes the folder if it isn't there, and tries to write to it.

    Raises ValueError, naming `option` and the reason, when that fails.
    """
    folder = pathlib.Path(path)
    expected = "expected a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".write-test-"):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        file = next(p for p in (folder, *folder.parents) if p.exists() and not p.is_dir())
        raise ValueError(
            f"{option}: got {str(path)!r}, but {file} is a file, {expected}; choose another path"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{option}: got {str(path)!r}, which can't be written ({error.strerror or error}), "
            f"{expected}; choose another path or fix its permissions"
        ) from error


class FolderLock:
    """Holds the folder of a run for this process, until the block ends or the process dies.

    A lock of the operating system on `run.lock`, which says who holds it. File systems without
    locks are tolerated with one log line. Where not `active` (all processes but 0), does nothing.
    """

    def __init__(self, directory: str | pathlib.Path, *, active: bool = True) -> None:
        self._path = pathlib.Path(directory) / LOCK_FILE
        self._active = active
        self._file: Any = None

    def __enter__(self) -> "FolderLock":
        """Raises FolderBusy when another process holds it."""
        if not self._active:
            return self
        try:
            self._file = open(self._path, "a+", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._file is not None and error.errno in _HELD:
                raise self._busy() from error
            log.warning(
                "%s can't be locked (%s): nothing keeps a second run out of this folder",
                self._path,
                error.strerror,
            )
        if self._file is None:
            return self
        self._file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}")
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _busy(self) -> FolderBusy:
        self._file.seek(0)
        holder = self._file.read().strip() or "another process"
        self.__exit__()
        return FolderBusy(
            f"the run folder {self._path.parent} is in use by {holder}: wait until it ends, stop "
            "it, or choose another --run.directory"
        )
