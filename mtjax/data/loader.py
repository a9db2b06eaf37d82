"""The loader: a global stream of rows, read for this process, resumed bit for bit."""

import copy
import logging
import weakref
from typing import Any, NoReturn

import grain
import numpy as np

from mtjax.config.data import DataConfig, SplitName
from mtjax.data.batch import Batch, assemble
from mtjax.data.packing import Order, Packed, pack
from mtjax.data.store import open_stores
from mtjax.data.tokenizers import make_tokenizer

logger = logging.getLogger(__name__)


class Loader:
    """Iterator of Batch.

    All processes walk the same stream of rows; each reads the tokens of its own rows. State counts
    what was handed out, not what was prefetched, and does not depend on the number of processes,
    the batch size or the number of microbatches.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        name: str,
        seq_len: int,
        batch_size: int,
        num_microbatches: int,
        num_samples: int | None,
        rows: np.ndarray | None,
        prefetch: int,
    ) -> None:
        """Use make_loader.

        Raises:
            ValueError: Batch size, microbatches and rows do not fit each other.
        """
        if num_microbatches < 1 or batch_size < 1 or batch_size % num_microbatches:
            raise ValueError(
                f"batch_size: got {batch_size}, expected a positive multiple of "
                f"{num_microbatches} microbatches; change either"
            )
        microbatch_size = batch_size // num_microbatches
        self._rows = np.arange(microbatch_size) if rows is None else np.asarray(rows, np.int64)
        if self._rows.size and (self._rows.min() < 0 or self._rows.max() >= microbatch_size):
            raise ValueError(
                f"rows: got {self._rows.tolist()}, expected numbers below {microbatch_size}, the "
                "rows of a microbatch"
            )
        self._packed = packed
        self._name = name
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._num_microbatches = num_microbatches
        limits = [n for n in (num_samples, packed.num_rows) if n is not None]
        self._num_rows = min(limits) if limits else None
        self._prefetch = prefetch
        self._consumed = 0
        self._reading = 0
        self._iterator: Any = None
        self._closer: Any = None
        self._open(batch_size, None)

    @property
    def num_rows(self) -> int | None:
        """Rows this loader hands out in all; None if it never ends or only grain knows the end."""
        return self._num_rows

    @property
    def consumed(self) -> int:
        """Rows handed out so far."""
        return self._consumed

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        """The next global batch; the last one may hold padding rows."""
        return self.next_batch(self._batch_size)

    def next_batch(self, num_rows: int) -> Batch:
        """The next `num_rows` rows of the stream, the rest of the batch being padding.

        For a batch-size ramp. Rows fill the batch in order, microbatch by microbatch. A change of
        num_rows discards what was prefetched, so keep it for many steps.

        Raises:
            ValueError: num_rows is not in [1, batch_size].
            StopIteration: The data is exhausted.
        """
        if not 1 <= num_rows <= self._batch_size:
            raise ValueError(
                f"num_rows: got {num_rows}, expected 1 to {self._batch_size}, the batch size"
            )
        if self._num_rows is not None:
            num_rows = min(num_rows, self._num_rows - self._consumed)
            if not num_rows:
                self._stop()
        if num_rows != self._reading:
            self._open(num_rows, self._iterator.get_state())
        try:
            count, batch = next(self._iterator)
        except StopIteration:
            self._stop()
        self._consumed += count
        return batch

    def skip(self, num_rows: int) -> None:
        """Pass over the next rows of the stream without reading their tokens.

        Raises:
            StopIteration: The data is exhausted before that.
        """
        walker = iter(self._packed.references)
        walker.set_state(self._iterator.get_state())
        if self._num_rows is not None and self._consumed + num_rows > self._num_rows:
            self._stop()
        for _ in range(num_rows):
            next(walker)
        self._consumed += num_rows
        self._open(self._batch_size, walker.get_state())

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able values."""
        return {
            "fingerprint": self._packed.fingerprint,
            "consumed": self._consumed,
            "stream": copy.deepcopy(self._iterator.get_state()),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of get_state.

        Raises:
            ValueError: The state is of a stream with another order.
        """
        if state["fingerprint"] != self._packed.fingerprint:
            raise ValueError(
                f"{self._name} data: got state of a stream {state['fingerprint']}, expected "
                f"{self._packed.fingerprint}: the files, data.*, seq_len or seed (for packing "
                "megatron also train.steps) changed since it was saved; restore them, or start "
                "the data afresh"
            )
        self._consumed = int(state["consumed"])
        self._open(self._batch_size, state["stream"])

    def close(self) -> None:
        """Stop the prefetch thread; also done when the loader is collected, and at exit."""
        self._closer()

    def _open(self, num_rows: int, state: dict[str, Any] | None) -> None:
        if self._closer is not None:
            self._closer()
        packed, settings = (
            self._packed,
            {
                "seq_len": self._seq_len,
                "num_microbatches": self._num_microbatches,
                "batch_size": self._batch_size,
                "rows": self._rows,
            },
        )

        def read(references: list[Any]) -> tuple[int, Batch]:
            return len(references), assemble(references, packed.read, **settings)

        batches = packed.references.batch(num_rows, drop_remainder=False, batch_fn=list).map(read)
        prefetched = grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=self._prefetch
        )
        self._iterator = iter(prefetched)
        # A thread left in grain's C++ code while the interpreter ends aborts the process.
        self._closer = weakref.finalize(self, self._iterator.close)
        if state is not None:
            self._iterator.set_state(copy.deepcopy(state))
        self._reading = num_rows

    def _stop(self) -> NoReturn:
        logger.info("%s data exhausted after %d sequences", self._name, self._consumed)
        raise StopIteration


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
) -> Loader:
    """Open the data of a split and lay it out in batches.

    Splits valid and test are read once, in order (megatron packing: in megatron-core's order), from
    the start of each loader. data.weights apply to them only where num_samples is given, since a
    blend without a length cannot read everything.

    Args:
        data: What to read and how to pack it.
        split: "train", "valid" or "test".
        seq_len: T, inputs per row.
        batch_size: Rows of the global batch, of all microbatches together.
        num_microbatches: M; divides batch_size.
        vocab_size: Of the model: ids from here on are refused.
        seed: Of all shuffles.
        num_samples: End after so many rows; None: when the data ends. The megatron packing needs
            it to know how many epochs to lay out.
        rows: int [B]: which rows of each microbatch this process reads; None: all.

    Raises:
        ValueError: Bad files, empty split, id beyond the vocabulary, sizes that do not fit.
    """
    tokenizer = make_tokenizer(data.tokenizer, data.tokenizer_path, data.eod_token)
    train = split == "train"
    weights = data.weights if train or num_samples is not None else ()
    # megatron-core orders each indexed dataset on its own, blended or not
    apart = bool(weights) or (data.source == "indexed" and data.packing == "megatron")
    stores = open_stores(data, split, tokenizer=tokenizer, vocab_size=vocab_size, join=not apart)
    order = Order(
        seq_len=seq_len,
        seed=seed,
        shuffle=data.shuffle and train,
        epochs=data.epochs if train else 1,
        weights=weights,
        num_samples=num_samples,
    )
    packed = pack(data, stores, order)
    logger.info(
        "%s data: %d tokens in %d source(s), packing %s",
        split,
        sum(store.num_tokens for store in stores),
        len(stores),
        data.packing,
    )
    return Loader(
        packed,
        name=split,
        seq_len=seq_len,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        num_samples=num_samples,
        rows=rows,
        prefetch=data.prefetch,
    )
