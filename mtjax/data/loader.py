"""Batches for the training loop: prefetched, resumable, the same for any number of hosts.

The stream of sequences is global: batch k holds the same rows whoever reads them. A process reads
only its own rows where the order allows random access; first-fit packing has to run in full.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from mtjax.config.data import DataConfig, SplitName
from mtjax.data.batch import Batch, Row, assemble
from mtjax.data.order import Order, make_order
from mtjax.data.packing import packed_rows
from mtjax.data.rows import read_row
from mtjax.data.store import open_stores


class Loader(Protocol):
    """An iterator of batches that can be put back to where it was."""

    def __iter__(self) -> Iterator[Batch]:
        """The loader itself."""
        ...

    def __next__(self) -> Batch:
        """The next batch. Raises StopIteration when the data is exhausted."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values; what was only prefetched does not count."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a loader with the same data and settings, on any hosts."""
        ...


class _BatchSource:
    """Batches by number, as grain's random-access sources are."""

    def __init__(
        self,
        order: Order,
        read: Callable[[Any], Row],
        collect: Callable[..., Batch],
        sizes: Callable[[int], int],
    ) -> None:
        self._order, self._read, self._collect, self._sizes = order, read, collect, sizes
        self._ends: list[int] = []
        self._lock = threading.Lock()  # prefetching threads share the list

    def rows(self, number: int) -> range:
        """Numbers in the stream of the rows of a batch; empty past the end."""
        with self._lock:
            while len(self._ends) <= number:
                begin = self._ends[-1] if self._ends else 0
                self._ends.append(begin + self._sizes(len(self._ends)))
        begin = self._ends[number - 1] if number else 0
        return range(min(begin, len(self._order)), min(self._ends[number], len(self._order)))

    def __call__(self, number: int) -> Batch | None:
        rows = self.rows(number)
        if not rows:
            return None
        return self._collect(rows, lambda row: self._read(self._order[row]))


class RandomAccessLoader:
    """Batches of an order that can be read anywhere; grain prefetches them in threads."""

    def __init__(self, source: _BatchSource, prefetch: int) -> None:
        self._source, self._prefetch = source, prefetch
        self.set_state({"batch": 0})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        if batch is None:
            raise StopIteration
        self._number += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"batch": self._number}

    def set_state(self, state: Mapping[str, Any]) -> None:
        import grain

        self._number = int(state["batch"])
        options = grain.ReadOptions(
            num_threads=min(self._prefetch, 2), prefetch_buffer_size=self._prefetch
        )
        # An endless range of batch numbers; the source says where the data ends.
        numbers = grain.MapDataset.range(self._number, 2**40)
        batches = numbers.map(lambda number: _Maybe(self._source(number)))
        self._iterator = (m.batch for m in batches.to_iter_dataset(options))


class _Maybe:
    """A batch, or the end: grain drops a bare None."""

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch


class StreamLoader:
    """Batches of rows that come one after the other, from a grain IterDataset."""

    def __init__(
        self, rows: Any, collect: Callable[..., Batch], sizes: Callable[[int], int], prefetch: int
    ) -> None:
        import grain

        if prefetch:
            buffer = prefetch * sizes(0)
            rows = grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=buffer)
        self._iterator = iter(rows)
        self._collect, self._sizes, self._number = collect, sizes, 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = list(itertools.islice(self._iterator, self._sizes(self._number)))
        if not rows:
            raise StopIteration
        self._number += 1
        return self._collect(rows, lambda row: row)

    def get_state(self) -> dict[str, Any]:
        return {"batch": self._number, "rows": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._number = int(state["batch"])
        self._iterator.set_state(state["rows"])


def make_loader(
    data: DataConfig,
    *,
    split: SplitName,
    seq_len: int,
    batch_size: int,
    num_microbatches: int,
    vocab_size: int,
    seed: int,
    num_samples: int | None = None,
    rows: np.ndarray | None = None,
    batch_rows: Callable[[int], int] | None = None,
) -> Loader:
    """Open the data and begin its stream.

    Args:
        split: "train" follows the config's shuffling and epochs; others are read once, in order.
        seq_len: T.
        batch_size: Rows of a global batch.
        num_microbatches: M, a divisor of batch_size.
        vocab_size: Ids must be smaller.
        seed: Of the order.
        num_samples: Rows the training will take (megatron packing sizes its order by it).
        rows: int [B']: which rows of each microbatch this process reads, all if None.
        batch_rows: Rows of batch k, at most batch_size (the rest is padding); batch_size if None.

    Raises:
        ValueError: unreadable or too little data, or an id beyond the vocabulary.
    """
    stores = open_stores(data, split, vocab_size)
    training = split == "train"
    sizes = batch_rows or (lambda _: batch_size)
    collect = partial(
        assemble,
        seq_len=seq_len,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        rows=np.arange(batch_size // num_microbatches) if rows is None else rows,
    )
    checked = data.source != "indexed" or data.scan_tokens
    unchecked_vocab = None if checked else vocab_size
    if data.packing == "first_fit":
        stream = packed_rows(
            data,
            stores,
            seq_len=seq_len,
            seed=seed,
            training=training,
            vocab_size=unchecked_vocab,
        )
        return StreamLoader(stream, collect, sizes, data.prefetch)
    order = make_order(
        data, stores, seq_len=seq_len, seed=seed, training=training, num_samples=num_samples
    )
    read = partial(
        read_row, seq_len=seq_len, separate=data.separate_documents, vocab_size=unchecked_vocab
    )
    return RandomAccessLoader(_BatchSource(order, read, collect, sizes), data.prefetch)
