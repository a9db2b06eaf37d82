"""From pieces of documents to one sequence of inputs, labels, weights, positions and segments."""

import numpy as np

from mtjax.data.batch import Row, empty_row
from mtjax.data.order import Piece
from mtjax.data.store import check_ids


def read_row(pieces: list[Piece], *, seq_len: int, separate: bool, vocab_size: int | None) -> Row:
    """Read seq_len + 1 tokens (or fewer, then padded) of the pieces.

    Args:
        separate: Number the documents as segments, restart positions, and give no weight to a
            label of another document.
        vocab_size: Refuse ids from here on; None where the store has been checked before.

    Raises:
        ValueError: an id beyond the vocabulary.
    """
    for piece in pieces:
        if vocab_size is not None:
            check_ids(piece.store, piece.begin, piece.end, vocab_size)
    ids = np.concatenate([piece.store.tokens[piece.begin : piece.end] for piece in pieces])
    if separate:
        documents = np.concatenate([_document_of(piece) for piece in pieces])
        # Two pieces in a row may come from the same document of another epoch.
        edges = np.cumsum([0, *(piece.end - piece.begin for piece in pieces)])[1:-1]
        changes = np.diff(documents, prepend=documents[:1]) != 0
        changes[edges] = True
        segments = 1 + np.cumsum(changes)
    else:
        segments = np.ones(len(ids), np.int64)
    row = empty_row(seq_len)
    count = min(len(ids) - 1, seq_len)
    row.tokens[:count] = ids[:count]
    row.labels[:count] = ids[1 : count + 1]
    row.weights[:count] = segments[:count] == segments[1 : count + 1]
    row.segments[:count] = segments[:count]
    row.positions[:count] = positions_of(segments[:count])
    return row


def positions_of(segments: np.ndarray) -> np.ndarray:
    """Place of each token in its segment, from 0; `segments` [T] holds runs of equal numbers."""
    places = np.arange(len(segments))
    begins = np.diff(segments, prepend=0) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0))


def _document_of(piece: Piece) -> np.ndarray:
    places = np.arange(piece.begin, piece.end)
    return np.searchsorted(piece.store.starts, places, side="right")
