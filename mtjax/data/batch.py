"""The arrays of one training step, as every source and packing delivers them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """One sequence: each field [T], dtypes as in Batch."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray


class Batch(NamedTuple):
    """One global batch, or the rows of it that this process asked for."""

    tokens: np.ndarray
    """int32 [M, B, T]: input ids; 0 in padding."""
    labels: np.ndarray
    """int32 [M, B, T]: the token that follows each input; 0 in padding."""
    weights: np.ndarray
    """float32 [M, B, T]: loss weights; 0 in padding and where a label is of another document."""
    positions: np.ndarray
    """int32 [M, B, T]: position in the segment, from 0."""
    segments: np.ndarray
    """int32 [M, B, T]: documents of a sequence numbered from 1; 0 is padding."""
    rows: np.ndarray
    """int32 [M, B]: number of each row in the global batch."""


def empty_row(seq_len: int) -> Row:
    """A row of padding only, to be filled from the left."""
    return Row(
        tokens=np.zeros(seq_len, np.int32),
        labels=np.zeros(seq_len, np.int32),
        weights=np.zeros(seq_len, np.float32),
        positions=np.zeros(seq_len, np.int32),
        segments=np.zeros(seq_len, np.int32),
    )


def assemble(
    references: Sequence[Any],
    read: Callable[[Any], Row],
    *,
    seq_len: int,
    num_microbatches: int,
    batch_size: int,
    rows: np.ndarray,
) -> Batch:
    """Read this process's rows of a global batch.

    Args:
        references: The next rows of the stream, at most `batch_size`; missing ones become padding.
        read: Reads the tokens of one reference.
        seq_len: T.
        num_microbatches: M.
        batch_size: Rows of the global batch, M times those of a microbatch.
        rows: int [B]: which rows of each microbatch to read.

    Returns:
        Batch with row b of microbatch m being row m * (batch_size // M) + rows[b] of the batch.
    """
    microbatch_size = batch_size // num_microbatches
    numbers_MB = np.arange(num_microbatches)[:, None] * microbatch_size + rows[None, :]
    padding = empty_row(seq_len)
    picked = [
        read(references[number]) if number < len(references) else padding
        for number in numbers_MB.reshape(-1)
    ]
    shape = (num_microbatches, len(rows), seq_len)
    fields = (np.stack(column).reshape(shape) for column in zip(*picked, strict=True))
    return Batch(**Row(*fields)._asdict(), rows=numbers_MB.astype(np.int32))
