"""Which tokens make up each sequence of the stream, by random access: a function of the seed."""

from typing import NamedTuple, Protocol

import numpy as np

from mtjax.config.data import DataConfig
from mtjax.data import megatron
from mtjax.data.store import TokenStore


class Piece(NamedTuple):
    """Consecutive tokens of one store: [begin, end) in its `tokens`."""

    store: TokenStore
    begin: int
    end: int


class Order(Protocol):
    """A stream of sequences, addressed by number."""

    def __len__(self) -> int:
        """Sequences in the stream."""
        ...

    def __getitem__(self, number: int) -> list[Piece]:
        """Pieces of sequence `number`: seq_len + 1 tokens in all, fewer only at an end."""
        ...


class ConcatOrder:
    """All tokens of each path in a row, cut every seq_len; shuffled anew in each epoch by grain.

    Neighbouring sequences share one token: the last label of one is the first input of the next.
    """

    def __init__(
        self,
        data: DataConfig,
        stores: list[TokenStore],
        *,
        seq_len: int,
        seed: int,
        shuffle: bool,
        blend: bool,
        epochs: int | None,
    ) -> None:
        import grain

        self._stores, self._seq_len = stores, seq_len
        counts = [max(store.span[1] - store.span[0] - 1, 0) // seq_len for store in stores]
        if not all(counts):
            short = stores[counts.index(0)]
            raise ValueError(
                f"{short.name}: {short.span[1] - short.span[0]} tokens in the split, expected at "
                f"least train.seq_len + 1 = {seq_len + 1}; shorten train.seq_len or change "
                "data.split"
            )

        def sequences(path: int) -> grain.MapDataset:
            return grain.MapDataset.range(counts[path]).map(lambda number: (path, number))

        def repeated(dataset: grain.MapDataset, key: int) -> grain.MapDataset:
            if shuffle:
                dataset = dataset.shuffle(seed=key)
            return dataset.repeat(epochs)

        paths = [sequences(path) for path in range(len(stores))]
        if data.weights and blend:
            keyed = [repeated(dataset, seed + i) for i, dataset in enumerate(paths)]
            shares = megatron.normalize_weights(data.weights)
            self._sequences = grain.MapDataset.mix(keyed, weights=shares)
        else:
            self._sequences = repeated(grain.MapDataset.concatenate(paths), seed)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, number: int) -> list[Piece]:
        path, sequence = self._sequences[number]
        begin = self._stores[path].span[0] + sequence * self._seq_len
        return [Piece(self._stores[path], begin, begin + self._seq_len + 1)]


class MegatronOrder:
    """The sequences of megatron-core's GPTDataset, or BlendedDataset for several paths."""

    def __init__(
        self,
        data: DataConfig,
        stores: list[TokenStore],
        *,
        seq_len: int,
        seed: int,
        num_samples: int | None,
    ) -> None:
        self._stores, self._seq_len = stores, seq_len

        def build(store: TokenStore, wanted: int | None) -> megatron.GPTIndices:
            try:
                return megatron.build_gpt_indices(
                    store.lengths, store.documents, seq_len=seq_len, num_samples=wanted, seed=seed
                )
            except ValueError as error:
                raise ValueError(f"{store.name}: {error}; change data.split or add data") from error

        if len(stores) == 1:
            self._indices = [build(stores[0], num_samples)]
            size = len(self._indices[0].shuffle_index)
            self._dataset, self._sample = np.zeros(size, np.int16), np.arange(size)
        elif data.weights and num_samples is not None:
            weights = megatron.normalize_weights(data.weights)
            wanted, size = megatron.blend_sizes(weights, num_samples)
            self._indices = [build(s, n) for s, n in zip(stores, wanted, strict=True)]
            self._dataset, self._sample = megatron.build_blending_indices(weights, size)
        else:
            self._indices = [build(store, None) for store in stores]
            self._blend_by_length(num_samples)

    def _blend_by_length(self, num_samples: int | None) -> None:
        sizes = [len(indices.shuffle_index) for indices in self._indices]
        if num_samples is None or num_samples >= sum(sizes):
            blend = megatron.build_exhaustive_blending_indices(sizes)
        else:
            blend = megatron.build_blending_indices(megatron.normalize_weights(sizes), num_samples)
        self._dataset, self._sample = blend

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> list[Piece]:
        store = self._stores[self._dataset[number]]
        documents, samples, shuffle = self._indices[self._dataset[number]]
        row = int(shuffle[self._sample[number]])
        (first, first_offset), (last, last_offset) = (
            samples[row].tolist(),
            samples[row + 1].tolist(),
        )
        pieces = []
        for place in range(first, last + 1):
            document = documents[place]
            start, length = int(store.starts[document]), int(store.lengths[document])
            begin = start + (first_offset if place == first else 0)
            end = start + (last_offset + 1 if place == last else length)
            if end > begin:
                pieces.append(Piece(store, begin, end))
        return pieces


def make_order(
    data: DataConfig,
    stores: list[TokenStore],
    *,
    seq_len: int,
    seed: int,
    training: bool,
    num_samples: int | None,
) -> Order:
    """The stream of a split: for training as configured, otherwise one pass in a fixed order.

    Raises:
        ValueError: a path is too short for one sequence.
    """
    if data.packing == "megatron":
        wanted = num_samples if training else None
        if training and data.epochs is not None:
            tokens = stores[0].span[1] - stores[0].span[0]
            wanted = max((data.epochs * tokens - 1) // seq_len, 1)
        order = MegatronOrder(data, stores, seq_len=seq_len, seed=seed, num_samples=wanted)
        if not len(order):
            raise ValueError(
                f"{', '.join(store.name for store in stores)}: less than train.seq_len + 1 = "
                f"{seq_len + 1} tokens in the split; shorten train.seq_len or change data.split"
            )
        return order
    return ConcatOrder(
        data,
        stores,
        seq_len=seq_len,
        seed=seed,
        shuffle=training and data.shuffle,
        blend=training,
        epochs=data.epochs if training else 1,
    )
