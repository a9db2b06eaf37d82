"""Orbax handlers that sum up what they wrote before the checkpoint gets its name.

Each process sums its own array files when they are complete, in the background thread of the save;
process 0 then sums the little that it merged, and writes one file for all. As that happens before
the rename, a checkpoint never appears without its sums.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mtjax.checkpoint import directory as disk
from mtjax.checkpoint import sums

_OWN = "ocdbt.process_"  # the folder in which orbax has each process write
_OWN_SUMS = "sums."


class SummedArrays(ocp.PyTreeCheckpointHandler):
    """Arrays, with a file of sums per process."""

    async def async_save(
        self, directory: epath.Path, *args: Any, **kwargs: Any
    ) -> list[Any] | None:
        written = await super().async_save(directory, *args, **kwargs)
        return [_Summed(written or [], pathlib.Path(directory), jax.process_index())]


class SummedManifest(ocp.JsonCheckpointHandler):
    """The manifest, which is finished last, and the sums of the whole checkpoint beside it."""

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        folder = pathlib.Path(directory)
        root = folder.parent
        found: dict[str, list[int]] = {}
        for path in sorted((root / disk.STATE).glob(f"{_OWN_SUMS}*")):
            found |= sums.read_sums(path) or {}
            path.unlink()
        others = [*sums.files_under(root / disk.STATE), *sums.files_under(root / disk.DATA_STATE)]
        rest = [path for path in others if path.relative_to(root).as_posix() not in found]
        found |= sums.sum_files(root, rest)
        # The folder of the manifest itself has a temporary name until this returns.
        own = sums.sum_files(folder, sums.files_under(folder))
        found |= {f"{disk.MANIFEST}/{name}": entry for name, entry in own.items()}
        sums.write_sums(folder / sums.SUMS_FILE, dict(sorted(found.items())))


class _Summed:
    """The writes of one process, done when their files are summed up too."""

    def __init__(self, written: Sequence[Any], folder: pathlib.Path, process: int) -> None:
        self._written, self._folder, self._process = written, folder, process

    def result(self, timeout: float | None = None) -> None:
        for future in self._written:
            future.result(timeout)
        own = self._folder / f"{_OWN}{self._process}"
        found = sums.sum_files(own, sums.files_under(own))
        prefix = f"{disk.STATE}/{own.name}"
        sums.write_sums(
            self._folder / f"{_OWN_SUMS}{self._process}.json",
            {f"{prefix}/{name}": entry for name, entry in found.items()},
        )


def registry(with_sums: bool) -> Any:
    """Handlers of the three parts of a checkpoint, in the order in which they are finished."""
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays = SummedArrays() if with_sums else ocp.PyTreeCheckpointHandler()
    handlers.add(disk.STATE, ocp.args.PyTreeSave, arrays)
    handlers.add(disk.DATA_STATE, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    manifest = SummedManifest() if with_sums else ocp.JsonCheckpointHandler()
    handlers.add(disk.MANIFEST, ocp.args.JsonSave, manifest)
    return handlers
