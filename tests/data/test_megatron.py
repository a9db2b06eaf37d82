"""The order of megatron-core, against goldens made by megatron-core 0.16.1 itself."""

from pathlib import Path

import numpy as np
import pytest

from mtjax.config.data import DataConfig
from mtjax.data import megatron
from mtjax.data.indexed import IndexedDataset, IndexedWriter
from mtjax.data.loader import make_loader

GOLDEN = Path(__file__).parents[1] / "golden"
SEED = 1234  # of make_megatron_data.py


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "megatron_data.npz")


@pytest.mark.parametrize("seq_len", [16, 33])
@pytest.mark.parametrize("num_samples", [None, 5, 61, 130, 151, 170, 400])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_document_sample_and_shuffle_index_are_those_of_gpt_dataset(
    golden, seq_len, num_samples, split
):
    dataset = IndexedDataset(str(GOLDEN / "megatron_data_a"))
    documents = np.arange(*megatron.split_range(len(dataset), "80,15,5", split))
    indices = megatron.build_gpt_indices(
        dataset.lengths, documents, seq_len=seq_len, num_samples=num_samples, seed=SEED
    )
    for name in ("document", "sample", "shuffle"):
        expected = golden[f"gpt/{seq_len}/{num_samples}/{split}/{name}"]
        got = getattr(indices, f"{name}_index")
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_goldens_hold_a_last_epoch_that_is_shuffled_apart_and_one_that_is_not(golden):
    lengths = IndexedDataset(str(GOLDEN / "megatron_data_a")).lengths
    tokens = int(lengths[slice(*megatron.split_range(len(lengths), "80,15,5", "train"))].sum())

    def last_epoch_is_apart(num_samples):
        shuffle = golden[f"gpt/16/{num_samples}/train/shuffle"]
        epochs = megatron.count_epochs(tokens, 16, num_samples)
        before = ((epochs - 1) * tokens - 1) // 16
        return epochs > 1 and set(shuffle[:before].tolist()) == set(range(before))

    assert {last_epoch_is_apart(n) for n in (61, 130, 151, 170, 400)} == {True, False}


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("seq_len", [3, 4, 9])
def test_sample_index_walks_empty_documents_as_the_reference_does(golden, seq_len, drop_last):
    lengths = np.array([5, 0, 7, 1, 0, 12, 3], np.int32)
    order = np.array([2, 1, 0, 3, 6, 4, 5], np.int32)
    got = megatron.build_sample_index(lengths, order, seq_len, drop_last)
    np.testing.assert_array_equal(got, golden[f"sample_helper/{seq_len}/{drop_last}"])


@pytest.mark.parametrize(
    ("key", "weights"),
    [("ties", [0.25] * 4), ("tiny", [0.001, 0.999]), ("three", [0.1, 0.2, 0.7])],
)
def test_blending_indices_are_those_of_the_reference(golden, key, weights):
    dataset, sample = megatron.build_blending_indices(weights, 500)
    np.testing.assert_array_equal(dataset, golden[f"blend_helper/{key}/dataset"])
    np.testing.assert_array_equal(sample, golden[f"blend_helper/{key}/sample"])


@pytest.mark.parametrize(("name", "separate"), [("joined", False), ("separate", True)])
def test_loader_delivers_the_arrays_of_gpt_dataset(golden, name, separate):
    data = DataConfig(
        source="indexed",
        paths=(str(GOLDEN / "megatron_data_a"),),
        split="80,15,5",
        packing="megatron",
        separate_documents=separate,
    )
    loader = make_loader(
        data,
        split="train",
        seq_len=16,
        batch_size=40,
        num_microbatches=1,
        vocab_size=100,
        seed=SEED,
        num_samples=40,
    )
    batch = next(loader)
    np.testing.assert_array_equal(batch.tokens[0], golden[f"rows/{name}/tokens"])
    np.testing.assert_array_equal(batch.labels[0], golden[f"rows/{name}/labels"])
    np.testing.assert_array_equal(batch.weights[0], golden[f"rows/{name}/loss_mask"])
    np.testing.assert_array_equal(batch.positions[0], golden[f"rows/{name}/position_ids"])


@pytest.mark.parametrize(
    ("key", "weights", "num_samples"),
    [
        ("weighted", (0.2, 0.5, 0.3), 100),
        ("uneven", (7.0, 1.0, 1.0), 333),
        ("by_length", (), 60),
        ("exhaustive", (), None),
    ],
)
def test_loader_delivers_the_sequences_of_blended_dataset(golden, key, weights, num_samples):
    data = DataConfig(
        source="indexed",
        paths=tuple(str(GOLDEN / f"megatron_data_{name}") for name in "abc"),
        weights=weights,
        split="80,15,5",
        packing="megatron",
    )
    loader = make_loader(
        data,
        split="train",
        seq_len=16,
        batch_size=50,
        num_microbatches=1,
        vocab_size=100,
        seed=SEED,
        num_samples=num_samples,
    )
    np.testing.assert_array_equal(next(loader).tokens[0], golden[f"blend/{key}/tokens"])


@pytest.mark.parametrize("name", ["a", "b", "c", "modes"])
def test_writer_gives_the_bytes_of_the_reference(tmp_path, name):
    reference = GOLDEN / f"megatron_data_{name}"
    dataset = IndexedDataset(str(reference))
    dtype = dataset.tokens.dtype.type
    with IndexedWriter(str(tmp_path / "out"), dtype, with_modes=name == "modes") as writer:
        for begin, end in zip(dataset.documents[:-1], dataset.documents[1:], strict=True):
            for sequence in range(begin, end):
                mode = 0 if dataset.modes is None else int(dataset.modes[sequence])
                writer.add_sequence(dataset[sequence], mode)
            writer.end_document()
    for suffix in (".bin", ".idx"):
        written = (tmp_path / f"out{suffix}").read_bytes()
        assert written == reference.with_suffix(suffix).read_bytes()


def test_reader_gives_what_the_reference_wrote_with_modes():
    dataset = IndexedDataset(str(GOLDEN / "megatron_data_modes"))
    assert [dataset[i].tolist() for i in range(3)] == [[70000, 1, 2], [3], [4, 5]]
    assert dataset.documents.tolist() == [0, 2, 2, 3]
    assert dataset.modes.tolist() == [1, 0, 1]


def test_adding_two_datasets_equals_writing_their_sequences(tmp_path):
    parts = [IndexedDataset(str(GOLDEN / f"megatron_data_{name}")) for name in "ac"]
    with IndexedWriter(str(tmp_path / "added"), np.uint16) as writer:
        for part in parts:
            writer.add_dataset(part.prefix)
    with IndexedWriter(str(tmp_path / "written"), np.uint16) as writer:
        for part in parts:
            for sequence in range(len(part)):
                writer.add_sequence(part[sequence])
                writer.end_document()
    for suffix in ("bin", "idx"):
        added = (tmp_path / f"added.{suffix}").read_bytes()
        assert added == (tmp_path / f"written.{suffix}").read_bytes()
