"""Saving and restoring a training state with orbax: asynchronous, atomic, onto any mesh."""

import contextlib
import logging
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mtjax.checkpoint import directory as disk
from mtjax.checkpoint import leaves, sums
from mtjax.checkpoint.manifest import CheckpointMismatch, check_allowed, compare
from mtjax.checkpoint.quiet import first_cause, quiet_reads
from mtjax.config.check import RunError
from mtjax.config.checkpoint import CheckpointConfig

log = logging.getLogger(__name__)


class CheckpointCorrupt(RunError):
    """A checkpoint that looks finished can't be read; the text names the one to use instead."""


class Checkpointer:
    """The checkpoints of one run.

    `directory` may not exist yet. `manifest` is what `build_manifest` made; it is stored with each
    checkpoint and compared on restore. Nothing is written or deleted before the first `save`, so a
    reader can look at the folder of a run that is still training. All processes of a run call
    every method together.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        config: CheckpointConfig,
        manifest: Mapping[str, Any],
    ) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self.config = config
        self.manifest = dict(manifest)
        self._manager: Any = None
        self._last: int | None = None
        disk.check(self.directory)
        _, ignored = disk.scan(self.directory)
        disk.report_ignored(self.directory, ignored)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps of all usable checkpoints, in increasing order."""
        return disk.scan(self.directory)[0]

    def latest_step(self) -> int | None:
        """The newest usable step, or None. A save still being written does not count."""
        steps = self.steps()
        return steps[-1] if steps else None

    def step_to_resume(self) -> int | None:
        """The step that the config says to resume from, or None for a fresh start.

        Raises ValueError when the config names a step, or demands one, that is not there, or
        allows changes of a field that does not exist.
        """
        if self.config.resume == "never":
            return None
        steps, wanted = self.steps(), self.config.restore_step
        if wanted and wanted not in steps:
            found = ", ".join(map(str, steps)) or "none"
            raise ValueError(
                f"checkpoint.restore_step is {wanted}, but {self.directory} has these usable "
                f"steps: {found}; choose one of them, or 0 for the newest"
            )
        if self.config.resume == "must" and not steps:
            raise ValueError(
                f"checkpoint.resume is 'must', but {self.directory} has no usable checkpoint: "
                "check --run.directory, or set --checkpoint.resume auto to start from step 0"
            )
        if not steps:
            check_allowed(self.config.allow_changes, self.manifest)
        return wanted or (steps[-1] if steps else None)

    def check_config(self, step: int, abstract_state: Any, ignore: tuple[str, ...] = ()) -> None:
        """Raises CheckpointMismatch, naming each field, when `step` was saved with a config that
        can't go on as this one; logs the differences that may be. The arguments are those of
        `restore`."""
        kept = self._compare_manifest(self._existing(step), abstract_state, ignore=ignore)
        if kept:
            log.info("step %d was saved with other settings: %s", step, "; ".join(kept))

    def save(
        self, step: int, state: Any, data_state: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Saves `state` (pytree of arrays) and `data_state` (JSON) as the checkpoint of `step`.

        Returns when the arrays are copied to host memory, so the caller may donate them; files
        are written in the background unless `wait` or the config says otherwise. The checkpoint
        appears under its name only when complete. An error of the previous background save is
        raised here.
        """
        import orbax.checkpoint as ocp

        manager = self._writer(step)
        self._last = step
        manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    disk.STATE: ocp.args.PyTreeSave(leaves.to_stored(state)),
                    disk.DATA_STATE: ocp.args.JsonSave(dict(data_state)),
                    disk.MANIFEST: ocp.args.JsonSave(self.manifest),
                }
            ),
            force=True,
        )
        if wait or not self.config.background:
            self.wait()

    def restore(
        self, abstract_state: Any, step: int | None = None, ignore: tuple[str, ...] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The state and data state of `step` (default: what the config says to resume from).

        `abstract_state` is a pytree of jax.ShapeDtypeStruct with a NamedSharding on any mesh; the
        arrays come back with these shardings, bit for bit as saved. The checkpoint may hold
        further arrays if their names begin as `ignore` says. Raises FileNotFoundError when there is
        no checkpoint, CheckpointMismatch when config, names, shapes or dtypes differ,
        CheckpointCorrupt when files are damaged.
        """
        step = self._existing(self.step_to_resume() if step is None else step)
        self._compare_manifest(step, abstract_state, ignore=ignore)
        state = self._read(step, abstract_state, "", partial=False, ignore=ignore)
        return state, self.data_state(step)

    def data_state(self, step: int, needed: Iterable[str] = ()) -> dict[str, Any]:
        """The data state of `step`, without its arrays; CheckpointCorrupt when it is no object
        with the keys `needed`."""
        found = self._json(step, disk.DATA_STATE)
        missing = [key for key in needed if key not in found]
        if missing:
            raise self.corrupt(step, f"{disk.DATA_STATE}: no {', '.join(missing)}")
        return found

    def restore_params(
        self, abstract_params: Any, step: int | None = None, key: str = "params"
    ) -> Any:
        """Only the part of the state under `key`; the rest is not read from disk.

        Shardings as in `restore`; a dtype other than the saved one casts. Only the model config
        has to match. Raises as `restore`.
        """
        step = self._existing(self.step_to_resume() if step is None else step)
        self.check_params(step, abstract_params, key)
        return self._read(step, abstract_params, key + "/", partial=True)

    def check_params(self, step: int, abstract_params: Any, key: str = "params") -> None:
        """Raises CheckpointMismatch where `restore_params` would for the config of the model."""
        self._compare_manifest(step, abstract_params, key + "/", only="config.model")

    def saved_config(self, step: int) -> Mapping[str, Any]:
        """The config that `step` was saved with, as nested plain values."""
        saved = self._json(self._existing(step), disk.MANIFEST)
        if not isinstance(saved.get("config"), Mapping):
            raise self.corrupt(step, f"{disk.MANIFEST}: no config")
        return saved["config"]

    def wait(self) -> None:
        """Blocks until the last save is complete on disk; raises its error if it failed."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes pending saves and frees the writer; further saves open a new one."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _writer(self, step: int) -> Any:
        """The orbax manager; the first call clears the way for `step`."""
        if self._manager is None:
            if self._last is None:
                # What lies after the point that this run starts from is another branch.
                self._last = self.step_to_resume()
            first = step if self._last is None else self._last + 1
            if self.config.resume == "never" and self._last is None:
                first = 0
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                disk.move_aside(self.directory, min(first, step))
            if jax.process_count() > 1:
                from jax.experimental import multihost_utils

                multihost_utils.sync_global_devices("mtjax_checkpoint_directory")
            self._manager = _open_manager(self.directory, self.config)
        return self._manager

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if step is None or step not in steps:
            found = ", ".join(map(str, steps)) or "none"
            wanted = "a checkpoint" if step is None else f"step {step}"
            raise FileNotFoundError(
                f"{self.directory} has no usable checkpoint to read: wanted {wanted}, found "
                f"steps {found}. Check --run.directory and --checkpoint.restore_step"
            )
        return step

    def _compare_manifest(
        self,
        step: int,
        abstract_tree: Any,
        prefix: str = "",
        only: str = "",
        ignore: tuple[str, ...] = (),
    ) -> list[str]:
        where = f"checkpoint {disk.step_path(self.directory, step)}"
        saved = self._json(step, disk.MANIFEST)
        if not isinstance(saved.get("config"), Mapping):
            raise self.corrupt(step, f"{disk.MANIFEST}: no config")

        def fits() -> bool:
            try:
                wanted = _wanted(abstract_tree, prefix)
                self._check_leaves(step, wanted, partial=bool(prefix), ignore=ignore)
            except CheckpointMismatch:
                return False
            return True

        allow = self.config.allow_changes
        return compare(saved, self.manifest, where=where, allow=allow, only=only, fits=fits)

    def _json(self, step: int, item: str) -> dict[str, Any]:
        try:
            found = disk.read_json(self.directory, step, item)
        except (OSError, ValueError) as error:
            raise self.corrupt(step, f"{item}: {error}") from error
        if not isinstance(found, dict):
            raise self.corrupt(step, f"{item}: got a {type(found).__name__}, expected an object")
        return found

    def _check_leaves(
        self,
        step: int,
        wanted: Mapping[str, Any],
        *,
        partial: bool,
        ignore: tuple[str, ...] = (),
    ) -> None:
        path = disk.step_path(self.directory, step)
        with self._damage_named(step):
            saved = _stored_metadata(path / disk.STATE)
            where = f"checkpoint {path}"
            leaves.check_leaves(saved, wanted, where, partial=partial, ignore=ignore)

    def _read(
        self,
        step: int,
        abstract_tree: Any,
        prefix: str,
        *,
        partial: bool,
        ignore: tuple[str, ...] = (),
    ) -> Any:
        """The arrays whose names start with `prefix`, as the pytree `abstract_tree`."""
        path = disk.step_path(self.directory, step)
        wanted = _wanted(abstract_tree, prefix)
        started_s = time.monotonic()
        self._check_leaves(step, wanted, partial=partial, ignore=ignore)
        if self.config.verify:
            self._verify(step)
        with self._damage_named(step):
            stored = _read_arrays(path / disk.STATE, wanted)
        log.info("restored step %d from %s in %.1f s", step, path, time.monotonic() - started_s)
        plain = {name.removeprefix(prefix): array for name, array in stored.items()}
        return leaves.from_stored(plain, abstract_tree)

    def _verify(self, step: int) -> None:
        """Compares all files with the checksums they were saved with; each process reads a share.

        Raises CheckpointCorrupt on all processes when one finds damage.
        """
        path = disk.step_path(self.directory, step)
        count, index = jax.process_count(), jax.process_index()
        try:
            expected = sums.read_sums(path / disk.MANIFEST / sums.SUMS_FILE)
        except (OSError, ValueError) as error:
            raise self.corrupt(step, f"{disk.MANIFEST}/{sums.SUMS_FILE}: {error}") from error
        if expected is None:
            log.info("%s was saved without checksums, so its files are not verified", path)
            return
        problem = sums.first_damage(path, expected, (index, count))
        if count > 1:
            from jax.experimental import multihost_utils

            found = multihost_utils.process_allgather(np.int32(bool(problem)))
            if found.any() and not problem:
                problem = f"found by process {int(np.argmax(found))}"
        if problem:
            raise self.corrupt(step, problem)

    @contextlib.contextmanager
    def _damage_named(self, step: int) -> Iterator[None]:
        """Turns what orbax and tensorstore raise for damaged files into CheckpointCorrupt."""
        with quiet_reads():
            try:
                yield
            except (CheckpointMismatch, jax.errors.JaxRuntimeError):
                raise  # a wrong config, out of memory, a lost peer: not the fault of the files
            # They report damage as anything from KeyError to bare Exception.
            except Exception as error:
                raise self.corrupt(step, first_cause(error)) from error

    def corrupt(self, step: int, reason: str) -> CheckpointCorrupt:
        """The error for a checkpoint that is damaged, with the one to use in its place."""
        older = [other for other in self.steps() if other < step]
        advice = (
            f"The usable checkpoint before it is step {older[-1]}: resume from it with "
            f"--checkpoint.restore_step {older[-1]}"
            if older
            else "There is no older checkpoint: start again with --checkpoint.resume never"
        )
        path = disk.step_path(self.directory, step)
        short = " ".join(reason.split())[:400]
        return CheckpointCorrupt(f"checkpoint {path} is damaged ({short}). {advice}")


def _wanted(abstract_tree: Any, prefix: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The stored form of `abstract_tree`, each name under `prefix`."""
    return {prefix + name: leaf for name, leaf in leaves.abstract_stored(abstract_tree).items()}


def _open_manager(directory: pathlib.Path, config: CheckpointConfig) -> Any:
    """An orbax manager that writes to `directory` and deletes what `config` does not keep."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint.checkpoint_managers import preservation_policy

    from mtjax.checkpoint.handlers import registry

    keep: list[Any] = [preservation_policy.LatestN(config.keep)]
    if config.keep_every_steps:
        keep.append(preservation_policy.EveryNSteps(config.keep_every_steps))
    options = ocp.CheckpointManagerOptions(
        step_name_format=ocp.path.step.standard_name_format(
            step_prefix=disk.STEP_PREFIX, step_format_fixed_length=disk.STEP_DIGITS
        ),
        preservation_policy=preservation_policy.AnyPreservationPolicy(keep),
        enable_async_checkpointing=True,
        async_options=ocp.options.AsyncOptions(timeout_secs=config.timeout_s),
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(
        directory, options=options, handler_registry=registry(config.verify)
    )


def _stored_metadata(path: pathlib.Path) -> dict[str, Any]:
    """{name: object with shape and dtype} of a stored state, without reading arrays."""
    import orbax.checkpoint as ocp
    from etils import epath

    return dict(ocp.PyTreeCheckpointHandler().metadata(epath.Path(path)).tree)


def _read_arrays(
    path: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The arrays named in `wanted`, resharded as it says."""
    import orbax.checkpoint as ocp

    item = dict(wanted)
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=leaf.dtype,
            sharding=leaf.sharding,
            global_shape=leaf.shape,
        )
        for name, leaf in wanted.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(
            path,
            args=ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True),
        )
