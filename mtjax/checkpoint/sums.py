"""Checksums of the files of a checkpoint: written as part of a save, compared when it is read.

Arrays are stored compressed and without a checksum of their own, so a flipped byte would decode to
wrong numbers. A CRC-32 of every file tells; zlib computes it at 1 GB/s per core or more, and files
are shared out among threads and processes.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SUMS_FILE = "sums.json"
"""Beside the manifest: {path within the checkpoint: [bytes, CRC-32]}."""

_BLOCK_BYTES = 1 << 22
_MAX_THREADS = 8


def sum_files(root: pathlib.Path, files: Iterable[pathlib.Path]) -> dict[str, list[int]]:
    """{path relative to `root`: [bytes, CRC-32]} of each file. Raises OSError."""
    paths = sorted(files)
    with _threads() as pool:
        sums = pool.map(_sum_file, paths)
        return {path.relative_to(root).as_posix(): s for path, s in zip(paths, sums, strict=True)}


def files_under(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def write_sums(path: pathlib.Path, sums: Mapping[str, list[int]]) -> None:
    """Writes sums as JSON."""
    path.write_text(json.dumps(sums, indent=0), encoding="utf-8")


def read_sums(path: pathlib.Path) -> dict[str, list[int]] | None:
    """Sums from a file, None when there is no such file. Raises OSError, or ValueError for a file
    that holds something else."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    ok = isinstance(found, dict) and all(
        isinstance(entry, list) and len(entry) == 2 and all(isinstance(n, int) for n in entry)
        for entry in found.values()
    )
    if not ok:
        raise ValueError("holds no checksums")
    return found


def first_damage(
    root: pathlib.Path, sums: Mapping[str, list[int]], share: tuple[int, int] = (0, 1)
) -> str:
    """What differs from `sums` in the files below `root`; empty when nothing does.

    `share` is (k, n): only every n-th file from the k-th on, largest first, is read.
    """
    first, step = share
    names = sorted(sums, key=lambda name: (-sums[name][0], name))[first::step]
    with _threads() as pool:
        for problem in pool.map(lambda name: _difference(root / name, name, sums[name]), names):
            if problem:
                pool.shutdown(wait=False, cancel_futures=True)
                return problem
    return ""


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "checksums")


def _difference(path: pathlib.Path, name: str, expected: list[int]) -> str:
    try:
        size = path.stat().st_size
        if size != expected[0]:
            return f"{name} has {size} bytes, not the {expected[0]} that were written"
        if _sum_file(path) != expected:
            return f"{name} has another checksum than when it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} can't be read: {error.strerror}"
    return ""


def _sum_file(path: pathlib.Path) -> list[int]:
    """[bytes, CRC-32]"""
    crc, size = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return [size, crc]
