"""The .bin/.idx pair: what is written is read, for any documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.data.indexed import DTYPES, IndexedDataset, IndexedWriter, best_dtype

INTEGERS = [dtype for dtype in DTYPES.values() if np.issubdtype(dtype, np.integer)]


@st.composite
def datasets(draw):
    dtype = draw(st.sampled_from(INTEGERS))
    limits = np.iinfo(dtype)
    ids = st.integers(int(limits.min), int(limits.max))
    document = st.lists(st.lists(ids, max_size=6), max_size=3)
    return dtype, draw(st.lists(document, max_size=6)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(datasets())
def test_any_documents_come_back_as_they_were_written(tmp_path_factory, dataset):
    dtype, documents, with_modes = dataset
    prefix = str(tmp_path_factory.mktemp("any") / "data")
    sequences = [tokens for document in documents for tokens in document]
    with IndexedWriter(prefix, dtype, with_modes=with_modes) as writer:
        number = 0
        for document in documents:
            for tokens in document:
                writer.add_sequence(tokens, mode=number % 3)
                number += 1
            writer.end_document()
    read = IndexedDataset(prefix)
    assert [read[i].tolist() for i in range(len(read))] == sequences
    assert read.tokens.dtype == dtype
    assert np.diff(read.documents).tolist() == [len(document) for document in documents]
    modes = [i % 3 for i in range(len(sequences))] if with_modes and sequences else None
    assert (None if read.modes is None else read.modes.tolist()) == modes


def test_two_tokens_give_the_bytes_of_the_format(tmp_path):
    with IndexedWriter(str(tmp_path / "out"), np.uint16) as writer:
        writer.add_sequence([258, 3])
        writer.end_document()
    assert (tmp_path / "out.bin").read_bytes() == bytes([2, 1, 3, 0])
    index = b"MMIDIDX\0\0" + bytes([1] + 7 * [0]) + bytes([8])  # version 1, uint16
    index += bytes([1] + 7 * [0]) + bytes([2] + 7 * [0])  # 1 sequence, 2 document indices
    index += bytes([2, 0, 0, 0]) + bytes(8)  # length 2 at offset 0
    index += bytes(8) + bytes([1] + 7 * [0])  # documents 0, 1
    assert (tmp_path / "out.idx").read_bytes() == index


@pytest.mark.parametrize(
    ("size", "dtype"), [(257, np.uint16), (65499, np.uint16), (65500, np.int32)]
)
def test_the_dtype_follows_the_vocabulary(size, dtype):
    assert best_dtype(size) is dtype


def test_an_id_that_does_not_fit_the_dtype_is_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="got ids 70000 to 70000, expected 0 to 65535"),
        IndexedWriter(str(tmp_path / "out"), np.uint16) as writer,
    ):
        writer.add_sequence([70000])
    assert list(tmp_path.iterdir()) == []
