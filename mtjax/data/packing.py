"""Packings: how the documents of token stores become rows of one length.

Each packing is a grain dataset of references, cheap to walk, which is the same on every host, and a
function that reads the tokens of a reference, which a host calls for its own rows only.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from mtjax.config.data import DataConfig
from mtjax.data import megatron
from mtjax.data.batch import Row, empty_row
from mtjax.data.store import TokenStore

_UNTHREADED = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""References are computed, not read: threads would only cost."""


@dataclass(frozen=True)
class Packed:
    """The stream of rows of one split."""

    references: grain.IterDataset
    """(store number, what to read), in the global order."""
    read: Callable[[Any], Row]
    """Reads one reference."""
    num_rows: int | None
    """Rows until the data is exhausted; None where it repeats or is only known at the end."""
    fingerprint: str
    """Differs when the order differs."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What decides the rows and their order."""

    seq_len: int
    seed: int
    shuffle: bool
    epochs: int | None
    weights: tuple[float, ...]
    """Shares of the stores; empty to read everything."""
    num_samples: int | None
    """Rows wanted; only the megatron packing depends on it."""


def pack(data: DataConfig, stores: Sequence[TokenStore], order: Order) -> Packed:
    """Arrange the documents of the stores in rows.

    Raises:
        ValueError: A megatron blend without a length, or a store too small for one sequence.
    """
    packings = {"concat": _pack_concat, "first_fit": _pack_first_fit, "megatron": _pack_megatron}
    return packings[data.packing](data, stores, order)


def _seed_of(seed: int, store: int) -> int:
    """A 32-bit seed per store: grain adds the epoch to it, so neighbours must lie far apart."""
    return int(np.random.SeedSequence([seed, store]).generate_state(1)[0])


def _fingerprint(data: DataConfig, order: Order, arrays: Sequence[np.ndarray]) -> str:
    what = (data.packing, data.packing_bins, data.separate_documents)
    check = zlib.crc32(repr((what, order.seq_len, order.seed, order.shuffle)).encode())
    check = zlib.crc32(repr(order.weights).encode(), check)
    for array in arrays:
        check = zlib.crc32(np.ascontiguousarray(array), check)
    return f"{check:08x}"


def fill_row(tokens: np.ndarray, parts: np.ndarray, seq_len: int, separate: bool) -> Row:
    """Turn up to T + 1 consecutive tokens into a row.

    Args:
        tokens: int32 [N + 1], N <= T: inputs and, shifted by one, labels.
        parts: int [N + 1]: which document each token is of; equal neighbours are one document.
        seq_len: T; the rest is padding.
        separate: Keep documents apart: segments, positions from 0, no loss across.
    """
    row = empty_row(seq_len)
    used = len(tokens) - 1
    row.tokens[:used] = tokens[:-1]
    row.labels[:used] = tokens[1:]
    places = np.arange(used, dtype=np.int32)
    if not separate:
        row.weights[:used], row.positions[:used], row.segments[:used] = 1, places, 1
        return row
    same = parts[1:] == parts[:-1]
    row.weights[:used] = same
    begins = np.concatenate(([True], ~same[:-1]))
    row.segments[:used] = np.cumsum(begins)
    row.positions[:used] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return row


def _arrange(counts: Sequence[int], order: Order) -> grain.MapDataset:
    """(store, number) for `counts` rows per store: shuffled, repeated, blended."""
    parts = []
    for number, count in enumerate(counts):
        part = grain.MapDataset.range(count).map(lambda i, store=number: (store, i))
        if order.shuffle:
            part = part.shuffle(seed=_seed_of(order.seed, number))
        parts.append(part.repeat(order.epochs))
    if order.weights:
        return grain.MapDataset.mix(parts, order.weights)
    assert len(parts) == 1, "without weights, stores are joined"
    return parts[0]


def _pack_concat(data: DataConfig, stores: Sequence[TokenStore], order: Order) -> Packed:
    """Cut the tokens, one document after the other, every seq_len; shuffle the cuts.

    Row i reads tokens i * T to i * T + T, so every token but the first is a label once. grain's
    ConcatThenSplit packs alike, but only from the start on: a host could not skip the rows of
    others, nor resume without reading, nor shuffle rows.
    """
    counts = [-(-(store.num_tokens - 1) // order.seq_len) for store in stores]
    ends = [store.starts + store.lengths for store in stores]
    arranged = _arrange(counts, order)

    def read(reference: tuple[int, int]) -> Row:
        number, i = reference
        store = stores[number]
        begin = int(store.starts[0]) + i * order.seq_len
        end = min(begin + order.seq_len + 1, int(ends[number][-1]))
        addresses = np.arange(begin, end)
        parts = np.searchsorted(ends[number], addresses, side="right")
        return fill_row(store.read(addresses), parts, order.seq_len, data.separate_documents)

    return Packed(
        references=arranged.to_iter_dataset(_UNTHREADED),
        read=read,
        num_rows=None if order.epochs is None else len(arranged),
        fingerprint=_fingerprint(data, order, [store.lengths for store in stores]),
    )


class _Pieces:
    """grain source of the token addresses of documents, in pieces of at most T labels."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        labels = np.maximum(store.lengths.astype(np.int64) - 1, 0)
        pieces = -(-labels // seq_len)
        owners = np.repeat(np.arange(len(labels)), pieces)
        firsts = np.cumsum(pieces) - pieces
        offsets = (np.arange(len(owners)) - firsts[owners]) * seq_len
        self._begins = store.starts[owners] + offsets
        self._sizes = np.minimum(seq_len, labels[owners] - offsets)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"address": np.arange(self._begins[i], self._begins[i] + self._sizes[i])}

    def __repr__(self) -> str:
        return f"_Pieces({len(self)})"


def _pack_first_fit(data: DataConfig, stores: Sequence[TokenStore], order: Order) -> Packed:
    """Put whole documents side by side by grain's first-fit packer.

    The packer is given token addresses instead of tokens, so that packing reads nothing. A piece
    holds the inputs of a document; its labels lie one address on, so none crosses a document.
    """
    streams = []
    for number, store in enumerate(stores):
        pieces = grain.MapDataset.source(_Pieces(store, order.seq_len))
        if not len(pieces):
            raise ValueError(f"{store.name}: no document of two tokens or more; check data.paths")
        if order.shuffle:
            pieces = pieces.shuffle(seed=_seed_of(order.seed, number))
        packer = grain.experimental.FirstFitPackIterDataset(
            pieces.repeat(order.epochs).to_iter_dataset(_UNTHREADED),
            length_struct={"address": order.seq_len},
            num_packing_bins=data.packing_bins,
            seed=_seed_of(order.seed, number),
            shuffle_bins=order.shuffle,
        )
        streams.append(packer.map(lambda row, store=number: (store, row)))
    mixed = grain.IterDataset.mix(streams, order.weights) if order.weights else streams[0]

    def read(reference: tuple[int, dict[str, np.ndarray]]) -> Row:
        number, packed = reference
        store, row = stores[number], empty_row(order.seq_len)
        row.segments[:] = packed["address_segment_ids"]
        row.positions[:] = packed["address_positions"]
        used = row.segments > 0
        addresses = packed["address"][used]
        row.tokens[used] = store.read(addresses)
        row.labels[used] = store.read(addresses + 1)
        row.weights[used] = 1
        return row

    fingerprint = _fingerprint(data, order, [store.lengths for store in stores])
    return Packed(references=mixed, read=read, num_rows=None, fingerprint=fingerprint)


def _pack_megatron(data: DataConfig, stores: Sequence[TokenStore], order: Order) -> Packed:
    """Read what megatron-core's GPTDataset and BlendedDataset would, in their order."""
    wanted = _megatron_samples(stores, order)
    blended = len(stores) > 1 or bool(order.weights)
    sizes: list[int | None] = [None] * len(stores) if blended else [wanted]
    weights = megatron.normalize_weights(order.weights) if order.weights else []
    length = 0
    if weights:
        assert wanted is not None
        blend, length = megatron.blend_sizes(weights, wanted)
        sizes = [*blend]
    orders = [
        megatron.build_gpt_indices(
            store.lengths,
            np.arange(len(store.lengths)),
            seq_len=order.seq_len,
            num_samples=size,
            seed=order.seed,
        )
        for store, size in zip(stores, sizes, strict=True)
    ]
    built = [len(indices.shuffle_index) for indices in orders]
    if not blended:
        dataset_index = np.zeros(built[0], np.int16)
        sample_index = np.arange(built[0])
    elif weights:
        dataset_index, sample_index = megatron.build_blending_indices(weights, length)
    elif wanted is None:
        dataset_index, sample_index = megatron.build_exhaustive_blending_indices(built)
    else:
        size = min(wanted, sum(built))
        by_length = megatron.normalize_weights(built)
        dataset_index, sample_index = megatron.build_blending_indices(by_length, size)
    _check_blend(stores, built, dataset_index)
    num_rows = len(dataset_index) if wanted is None else min(wanted, len(dataset_index))
    references = grain.MapDataset.range(num_rows).map(
        lambda i: (int(dataset_index[i]), int(sample_index[i]))
    )

    def read(reference: tuple[int, int]) -> Row:
        number, i = reference
        store = stores[number]
        addresses, parts = _megatron_addresses(store, orders[number], i)
        return fill_row(store.read(addresses), parts, order.seq_len, data.separate_documents)

    arrays = [array for indices in orders for array in indices]
    return Packed(
        references=references.to_iter_dataset(_UNTHREADED),
        read=read,
        num_rows=num_rows,
        fingerprint=_fingerprint(data, order, [*arrays, dataset_index]),
    )


def _megatron_samples(stores: Sequence[TokenStore], order: Order) -> int | None:
    """Rows to ask for: num_samples, capped by the epochs of a single store; None for one epoch."""
    if order.weights and order.num_samples is None:
        raise ValueError(
            "num_samples: got None, expected a number with packing megatron and data.weights; "
            "set train.steps"
        )
    if order.epochs is None or len(stores) > 1:
        return order.num_samples
    if order.epochs == 1 and order.num_samples is None:
        return None
    most = (order.epochs * stores[0].num_tokens - 1) // order.seq_len
    return most if order.num_samples is None else min(most, order.num_samples)


def _check_blend(stores: Sequence[TokenStore], built: list[int], index: np.ndarray) -> None:
    drawn = np.bincount(index, minlength=len(built))
    for store, have, need in zip(stores, built, drawn.tolist(), strict=True):
        if need > have:
            raise ValueError(
                f"{store.name}: the blend draws {need} sequences, expected at most {have} "
                "(megatron-core refuses it too); use packing concat, or a longer run"
            )
        if not have:
            raise ValueError(f"{store.name}: too few tokens for one sequence; shorten seq_len")


def _megatron_addresses(
    store: TokenStore, indices: megatron.GPTIndices, i: int
) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of a sequence's T + 1 tokens and the place of each one's document: int64 [T+1]."""
    i = int(indices.shuffle_index[i])
    (first, begin), (last, end) = indices.sample_index[i : i + 2].tolist()
    documents = indices.document_index[first : last + 1]
    begins, ends = store.starts[documents], store.starts[documents] + store.lengths[documents]
    ends[-1] = begins[-1] + end + 1  # the token shared with the next sequence
    begins[0] += begin
    sizes = ends - begins
    parts = np.repeat(np.arange(first, last + 1), sizes)
    skipped = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    return np.arange(len(parts)) + skipped, parts
