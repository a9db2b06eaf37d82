"""From the loader's numpy batches to global arrays, each process giving the rows it holds."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mtjax.config import Config, TrainConfig
from mtjax.config.data import SplitName
from mtjax.data.batch import Batch
from mtjax.data.loader import Loader, make_loader
from mtjax.training.step import StepInput, abstract_batch


def samples_until(train: TrainConfig, steps: int) -> int:
    """Sequences in the batches of the first `steps` steps."""
    ramp = train.batch_ramp
    if not ramp.start:
        return steps * train.batch_size
    within = min(steps, ramp.steps)
    total = (steps - within) * train.batch_size + within * ramp.start
    # Increase k of n comes with step ceil(k ramp.steps / n) and holds for the rest of the ramp.
    levels = (train.batch_size - ramp.start) // ramp.increment + 1
    firsts = (-(-k * ramp.steps // levels) for k in range(1, levels))
    return total + ramp.increment * sum(max(within - first, 0) for first in firsts)


class Feed:
    """A loader of one split, and how its batches are laid out on the mesh."""

    def __init__(self, config: Config, mesh: Mesh, split: SplitName, num_samples: int | None):
        self._abstract = abstract_batch(config, mesh)
        self._rows = _local_rows(self._abstract.rows)
        self._config = config
        train = config.train
        self.loader: Loader = make_loader(
            config.data,
            split=split,
            seq_len=train.seq_len,
            batch_size=train.batch_size,
            num_microbatches=train.microbatches,
            vocab_size=config.model.vocab_size,
            seed=train.seed,
            num_samples=num_samples,
            rows=self._rows,
            batch_rows=train.batch_size_at if split == "train" else None,
        )

    def next(self) -> tuple[StepInput, Batch]:
        """The next batch on the devices, and what this process read of it.

        Raises:
            StopIteration: the data is exhausted.
        """
        batch = next(self.loader)
        fields = batch._asdict() | {"active": None}
        if self._abstract.active is not None:
            # Rows fill the microbatches in order, so those with data come first.
            fields["active"] = np.int32(np.any(batch.weights > 0, axis=(1, 2)).sum())
        if self._abstract.segments is None:
            fields["segments"] = None
        return jax.tree.map(self._place, self._abstract, StepInput(**fields)), batch

    def at_end(self) -> bool:
        """Whether no batch is left; the stream stays where it is."""
        state = self.loader.get_state()
        ended = next(self.loader, None) is None
        self.loader.set_state(state)
        return ended

    def _place(self, abstract: Any, local: np.ndarray) -> jax.Array:
        """One field as a global array."""
        if not abstract.shape:
            return jax.device_put(local, abstract.sharding)

        def read(index: Any) -> np.ndarray:
            rows = np.arange(abstract.shape[1])[index[1]]
            picked = np.searchsorted(self._rows, rows)
            return local[index[0]][:, picked][(slice(None), slice(None), *index[2:])]

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, read)


def _local_rows(abstract: Any) -> np.ndarray:
    """Rows of each microbatch that this process's devices hold, sorted."""
    indices = abstract.sharding.addressable_devices_indices_map(abstract.shape).values()
    rows = np.arange(abstract.shape[1])
    return np.unique(np.concatenate([rows[index[1]] for index in indices]))
