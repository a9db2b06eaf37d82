"""What shares a sequence: segments, positions and weights."""

import itertools

import numpy as np
import pytest

from mtjax.config.data import DataConfig
from tests.data.corpora import load, number_tokens, stack, write_documents

PACKINGS = ["concat", "first_fit", "megatron"]
LENGTHS = [5, 11, 3, 8, 23, 1, 14, 9, 2, 17, 6, 12, 4, 7, 10, 30, 5, 9, 13, 21]
DOCUMENTS = number_tokens(LENGTHS)
DOCUMENT_OF = np.repeat(np.arange(1, 21), LENGTHS)  # of token 1, 2, ...


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("corpus") / "a", DOCUMENTS)


def read(prefix, packing, num_batches=30, seq_len=8, **fields):
    data = DataConfig(source="indexed", paths=(prefix,), split="1", packing=packing, **fields)
    return stack(list(itertools.islice(load(data, seq_len=seq_len), num_batches)))


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_label_of_another_document_has_weight(prefix, packing):
    rows = read(prefix, packing)
    used = rows.weights > 0
    np.testing.assert_array_equal(rows.labels[used], rows.tokens[used] + 1)
    np.testing.assert_array_equal(
        DOCUMENT_OF[rows.labels[used] - 1], DOCUMENT_OF[rows.tokens[used] - 1]
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_labels_within_a_document_have_weight_one(prefix, packing):
    rows = read(prefix, packing)
    inside = (rows.labels == rows.tokens + 1) & (rows.tokens > 0)
    inside[inside] = DOCUMENT_OF[rows.labels[inside] - 1] == DOCUMENT_OF[rows.tokens[inside] - 1]
    np.testing.assert_array_equal(rows.weights, inside.astype(np.float32))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_segment_holds_tokens_of_one_document(prefix, packing):
    rows = read(prefix, packing)
    for tokens, segments in zip(rows.tokens, rows.segments, strict=True):
        for segment in range(1, segments.max() + 1):
            part = tokens[segments == segment]
            assert len(set(DOCUMENT_OF[part - 1].tolist())) == 1
            assert np.all(np.diff(part) == 1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_positions_count_from_zero_in_each_segment(prefix, packing):
    rows = read(prefix, packing)
    for positions, segments in zip(rows.positions, rows.segments, strict=True):
        lengths = np.bincount(segments)[1:]
        assert positions[segments > 0].tolist() == [i for n in lengths for i in range(n)]
        assert np.all(np.diff(segments[segments > 0]) >= 0)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seq_len", [4, 8, 64])
def test_first_fit_trains_on_every_token_once_per_epoch(prefix, seq_len, shuffle):
    rows = read(
        prefix, "first_fit", None, seq_len, epochs=1, packing_bins=3, shuffle=shuffle, prefetch=2
    )
    expected = [token for document in DOCUMENTS for token in document[1:]]
    assert sorted(rows.labels[rows.weights > 0].tolist()) == expected


def test_concat_trains_on_every_label_inside_a_document_once_per_epoch(prefix):
    rows = read(prefix, "concat", None, epochs=1)
    covered = 1 + 26 * 8  # tokens of the 26 whole sequences
    expected = [t for document in DOCUMENTS for t in document[1:] if t <= covered]
    assert sorted(rows.labels[rows.weights > 0].tolist()) == expected


def test_first_fit_of_two_documents_by_hand(tmp_path):
    prefix = write_documents(tmp_path / "two", [[1, 2, 3], [4, 5, 6, 7]])
    rows = read(prefix, "first_fit", 1, seq_len=6, shuffle=False, epochs=1)
    assert rows.tokens[0].tolist() == [1, 2, 4, 5, 6, 0]
    assert rows.labels[0].tolist() == [2, 3, 5, 6, 7, 0]
    assert rows.weights[0].tolist() == [1, 1, 1, 1, 1, 0]
    assert rows.positions[0].tolist() == [0, 1, 0, 1, 2, 0]
    assert rows.segments[0].tolist() == [1, 1, 2, 2, 2, 0]


def test_concat_of_two_documents_by_hand(tmp_path):
    prefix = write_documents(tmp_path / "two", [[1, 2, 3], [4, 5, 6, 7]])
    rows = read(prefix, "concat", 1, seq_len=6, shuffle=False, epochs=1)
    assert rows.tokens[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows.labels[0].tolist() == [2, 3, 4, 5, 6, 7]
    assert rows.weights[0].tolist() == [1, 1, 0, 1, 1, 1]
    assert rows.positions[0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows.segments[0].tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("packing", ["concat", "megatron"])
def test_joined_documents_are_one_segment_with_weight_everywhere(prefix, packing):
    rows = read(prefix, packing, 3, separate_documents=False)
    assert rows.weights.min() == 1
    assert set(rows.segments.ravel().tolist()) == {1}
    assert (rows.positions == np.arange(8)).all()


def test_first_fit_cuts_a_long_document_into_pieces_that_share_a_token(tmp_path):
    prefix = write_documents(tmp_path / "long", number_tokens([50]))
    rows = read(prefix, "first_fit", 1, seq_len=16, shuffle=False, epochs=1, packing_bins=8)
    assert (rows.weights.sum(axis=1)[:5].tolist()) == [16, 16, 16, 1, 0]
    assert rows.tokens[:4, 0].tolist() == [1, 17, 33, 49]
    assert rows.labels[:3, -1].tolist() == [17, 33, 49]


def test_one_document_on_both_sides_of_an_epoch_is_two_segments(tmp_path):
    prefix = write_documents(tmp_path / "one", number_tokens([10]))
    rows = read(prefix, "megatron", 1, seq_len=16)
    ends = (rows.tokens == 10) & (rows.labels == 1)
    assert ends.any()
    assert not rows.weights[ends].any()
    assert not rows.positions[rows.tokens == 1].any()
