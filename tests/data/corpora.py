"""Small corpora in which each token id occurs once, so that an id tells its document and place."""

import numpy as np

from mtjax.data.indexed import IndexedWriter
from mtjax.data.loader import make_loader

VOCAB_SIZE = 4000


def write_documents(prefix, documents, dtype=np.int32):
    """Write one indexed dataset of the given token lists; returns the prefix."""
    with IndexedWriter(str(prefix), dtype) as writer:
        for tokens in documents:
            writer.add_sequence(tokens)
            writer.end_document()
    return str(prefix)


def number_tokens(lengths, first=1):
    """Documents of these lengths whose tokens are first, first + 1, ... without a gap."""
    ends = first + np.cumsum(lengths)
    return [list(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]


def load(data, *, seq_len=8, batch_size=8, num_microbatches=2, seed=7, split="train", **more):
    """make_loader with small defaults."""
    settings = {"vocab_size": VOCAB_SIZE, "num_samples": 150} | more
    return make_loader(
        data,
        split=split,
        seq_len=seq_len,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        seed=seed,
        **settings,
    )


def assert_same(got, expected):
    """Two batches agree in every field."""
    for name, array in expected._asdict().items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)
        assert getattr(got, name).dtype == array.dtype


def stack(batches):
    """Each field of the batches as rows in the order of the stream: [rows, T]."""
    fields = [
        np.concatenate([f.reshape(-1, *f.shape[2:]) for f in c]) for c in zip(*batches, strict=True)
    ]
    return type(batches[0])(*fields)
