"""The order of megatron-core's GPTDataset and BlendedDataset, bit for bit, in vectorised numpy.

A document index lists documents for all epochs, shuffled. A sample index says where in that list
each sequence begins: sequences of seq_len + 1 tokens that share one token with the next. A shuffle
index permutes the sequences. Reference: megatron-core 0.16, core/datasets.
"""

import math
from typing import NamedTuple

import numpy as np

from mtjax.config.data import SPLITS, SplitName, split_bounds

SURPLUS_RATIO = 0.005
"""Share of sequences that megatron-core builds beyond need in each dataset of a blend."""

SEPARATE_LAST_EPOCH_RATIO = 0.80
"""The last epoch is shuffled apart when it gives fewer than this share of its sequences."""


class GPTIndices(NamedTuple):
    """Order of the sequences drawn from one dataset."""

    document_index: np.ndarray
    """int32 [epochs * documents]: document ids."""
    sample_index: np.ndarray
    """int32 [samples + 1, 2]: place in document_index and token offset where each begins."""
    shuffle_index: np.ndarray
    """uint32 [samples]: the order in which they are read."""


def split_range(num_documents: int, split: str, name: SplitName) -> tuple[int, int]:
    """First and past-the-last document of a split such as "969,30,1"."""
    begin, end = split_bounds(split)[SPLITS.index(name)]
    return round(begin * num_documents), round(end * num_documents)


def count_epochs(tokens_per_epoch: int, seq_len: int, num_samples: int | None) -> int:
    """Fewest epochs whose tokens suffice for `num_samples` sequences; 1 if that is None."""
    if num_samples is None:
        return 1
    return max(1, math.ceil((num_samples * seq_len + 1) / tokens_per_epoch))


def build_document_index(
    documents: np.ndarray, num_epochs: int, state: np.random.RandomState, separate_last: bool
) -> np.ndarray:
    """Repeat and shuffle the documents: int32 [num_epochs * documents]."""
    if separate_last and num_epochs > 1:
        first = build_document_index(documents, num_epochs - 1, state, False)
        return np.concatenate((first, build_document_index(documents, 1, state, False)))
    index = np.tile(documents.astype(np.int32), num_epochs)
    state.shuffle(index)
    return index


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, seq_len: int, drop_last: bool = True
) -> np.ndarray:
    """Where each sequence begins in the listed documents.

    Sequence i begins at token i * seq_len of their concatenation, so that one binary search
    replaces megatron-core's loop over documents.

    Args:
        lengths: int32 [documents of the dataset], in tokens.
        document_index: int32 [listed documents].
        seq_len: Tokens predicted per sequence; one more is read.
        drop_last: Leave out the last sequence where it is shorter.

    Returns:
        [samples + 1, 2], int32 (int64 if an entry needs it): place in document_index, offset.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    usable = int(ends[-1]) - 1 if len(ends) else -1
    if drop_last:
        num_samples = max(usable, 0) // seq_len
    else:  # megatron-core counts these in single precision
        num_samples = math.ceil(np.float32(max(usable, 0)) / np.float32(seq_len))
    begins = np.minimum(np.arange(num_samples + 1, dtype=np.int64) * seq_len, max(usable, 0))
    places = np.searchsorted(ends, begins, side="right")
    offsets = begins - (ends - lengths[document_index])[places]
    largest = max(len(document_index), int(lengths.max(initial=0)))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack((places, offsets), axis=1).astype(dtype)


def build_shuffle_index(
    num_first: int, num_samples: int, state: np.random.RandomState
) -> np.ndarray:
    """Shuffle [0, num_first) and, apart, [num_first, num_samples): uint32 [num_samples]."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    first = np.arange(num_first, dtype=dtype)
    state.shuffle(first)
    if num_first == num_samples:
        return first
    last = np.arange(num_first, num_samples, dtype=dtype)
    state.shuffle(last)
    return np.concatenate((first, last))


def build_gpt_indices(
    lengths: np.ndarray,
    documents: np.ndarray,
    *,
    seq_len: int,
    num_samples: int | None,
    seed: int,
) -> GPTIndices:
    """Build the three indices as GPTDataset does.

    Args:
        lengths: int32 [documents of the dataset], in tokens.
        documents: int [documents of the split], ids in `lengths`.
        seq_len: Tokens predicted per sequence.
        num_samples: Sequences wanted, at least; None for one epoch.
        seed: Of the numpy RandomState that shuffles.

    Raises:
        ValueError: The split has fewer than two tokens.
    """
    tokens_per_epoch = int(lengths[documents].sum(dtype=np.int64))
    if tokens_per_epoch < 2:
        raise ValueError(f"got {tokens_per_epoch} tokens in the split, expected at least 2")
    num_epochs = count_epochs(tokens_per_epoch, seq_len, num_samples)
    num_sans_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_len
    separate_last = False
    if num_epochs > 1:
        assert num_samples is not None
        per_epoch = (tokens_per_epoch - 1) // seq_len
        from_last = num_samples - num_sans_last
        separate_last = from_last < int(SEPARATE_LAST_EPOCH_RATIO * per_epoch)
    state = np.random.RandomState(seed)
    document_index = build_document_index(documents, num_epochs, state, separate_last)
    sample_index = build_sample_index(lengths, document_index, seq_len)
    total = len(sample_index) - 1
    shuffle_index = build_shuffle_index(num_sans_last if separate_last else total, total, state)
    return GPTIndices(document_index, sample_index, shuffle_index)


def normalize_weights(weights: tuple[float, ...] | list[int]) -> list[float]:
    """Divide by the sum, in double precision."""
    values = np.array(weights, np.float64)
    return (values / values.sum()).tolist()


def blend_sizes(weights: list[float], num_samples: int) -> tuple[list[int], int]:
    """Sequences to build in each dataset of a blend, and the length of the blend.

    Args:
        weights: Normalised weights.
        num_samples: Sequences wanted.
    """
    targets = [math.ceil(num_samples * weight) for weight in weights]
    return [math.ceil(target * (1 + SURPLUS_RATIO)) for target in targets], sum(targets)


def build_blending_indices(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw each sequence from the dataset that lags its weight most; the first wins ties.

    Args:
        weights: Normalised weights of D datasets.
        size: Length of the blend.

    Returns:
        Dataset of each sequence, int16 [size], and its number there, int64 [size].
    """
    return _blend(np.array(weights, np.float64), np.full(len(weights), size, np.int64), size)


def build_exhaustive_blending_indices(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """As build_blending_indices, each dataset weighted by its size and read exactly once."""
    limits = np.array(sizes, np.int64)
    return _blend(limits / limits.sum(), limits, int(limits.sum()))


def _blend(weights: np.ndarray, limits: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The greedy loop: each choice depends on all before it, so it is sequential by nature.

    Plain Python floats are the C doubles of megatron-core, and much faster than numpy here.
    """
    shares, most = weights.tolist(), limits.tolist()
    counts = [0] * len(shares)
    open_datasets = [d for d in range(len(shares)) if most[d] > 0]
    dataset_index = np.zeros(size, np.int16)
    sample_index = np.zeros(size, np.int64)
    for n in range(size):
        factor = max(float(n), 1.0)
        lags = [shares[d] * factor - counts[d] for d in open_datasets]
        chosen = open_datasets[lags.index(max(lags))]
        dataset_index[n] = chosen
        sample_index[n] = counts[chosen]
        counts[chosen] += 1
        if counts[chosen] == most[chosen]:
            open_datasets.remove(chosen)
    return dataset_index, sample_index
