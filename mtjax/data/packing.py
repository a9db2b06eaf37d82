"""Whole documents side by side in a sequence, by grain's first-fit packing."""

from typing import Any

import numpy as np

from mtjax.config.data import DataConfig
from mtjax.data.batch import Row
from mtjax.data.order import Piece
from mtjax.data.store import TokenStore, check_ids


def packed_rows(
    data: DataConfig,
    stores: list[TokenStore],
    *,
    seq_len: int,
    seed: int,
    training: bool,
    vocab_size: int | None,
) -> Any:
    """A grain IterDataset of Rows; documents longer than seq_len + 1 tokens are cut.

    Raises:
        ValueError: no document has two tokens.
    """
    import grain

    pieces = [[piece for d in store.documents for piece in _cut(store, d, seq_len)]
              for store in stores]  # fmt: skip
    if not any(pieces):
        raise ValueError(
            f"{stores[0].name}: no document of at least 2 tokens in the split; change data.split "
            "or add data"
        )
    shuffle, epochs = training and data.shuffle, data.epochs if training else 1

    def dataset(group: list[Piece], key: int) -> grain.MapDataset:
        out = grain.MapDataset.source(group)
        if shuffle:
            out = out.shuffle(seed=key)
        return out.repeat(epochs)

    if data.weights and training:
        keyed = [dataset(group, seed + i) for i, group in enumerate(pieces)]
        mixed = grain.MapDataset.mix(keyed, weights=list(data.weights))
    else:
        mixed = dataset([piece for group in pieces for piece in group], seed)

    def read(piece: Piece) -> dict[str, np.ndarray]:
        if vocab_size is not None:
            check_ids(piece.store, piece.begin, piece.end, vocab_size)
        ids = np.asarray(piece.store.tokens[piece.begin : piece.end], np.int32)
        return {"tokens": ids[:-1], "labels": ids[1:]}

    packed = grain.experimental.FirstFitPackIterDataset(
        mixed.map(read).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"tokens": seq_len, "labels": seq_len},
        num_packing_bins=data.packing_bins,
        seed=seed,
        shuffle_bins=shuffle,
    )
    return packed.map(_to_row)


def _cut(store: TokenStore, document: int, seq_len: int) -> list[Piece]:
    """A document as pieces of at most seq_len + 1 tokens that share one token with the next."""
    start = int(store.starts[document])
    end = start + int(store.lengths[document])
    return [
        Piece(store, begin, min(begin + seq_len + 1, end))
        for begin in range(start, end - 1, seq_len)
    ]


def _to_row(packed: dict[str, np.ndarray]) -> Row:
    segments = packed["tokens_segment_ids"].astype(np.int32)
    return Row(
        tokens=packed["tokens"].astype(np.int32),
        labels=packed["labels"].astype(np.int32),
        weights=(segments > 0).astype(np.float32),
        positions=packed["tokens_positions"].astype(np.int32),
        segments=segments,
    )
