"""The stream of batches: order, hosts, prefetch, resume, end."""

import itertools
import json
import time

import numpy as np
import pytest

from mtjax.config.data import DataConfig
from tests.data.corpora import assert_same, load, number_tokens, stack, write_documents

PACKINGS = ["concat", "first_fit", "megatron"]
LENGTHS = [5, 11, 3, 8, 23, 1, 14, 9, 2, 17, 6, 12, 4, 7, 10, 30, 5, 9, 13, 21]  # 210 tokens
TOKENS = sum(LENGTHS)
SEQ_LEN = 8


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("corpus") / "a", number_tokens(LENGTHS))


@pytest.fixture(scope="module")
def config(prefix):
    def build(packing="concat", **fields):
        bins = {"packing_bins": 4} if packing == "first_fit" else {}
        settings = {"split": "1", "prefetch": 0} | bins | fields
        return DataConfig(source="indexed", paths=(prefix,), packing=packing, **settings)

    return build


def first_tokens(batches):
    rows = stack(list(batches))
    return rows.tokens[rows.weights.any(axis=1), 0].tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_hosts_read_between_them_what_one_host_reads(config, packing, hosts, prefetch):
    data = config(packing, prefetch=prefetch)
    one = list(itertools.islice(load(data), 9))
    shares = np.array_split(np.arange(4), hosts)
    parts = [list(itertools.islice(load(data, rows=rows), 9)) for rows in shares]
    for whole, *pieces in zip(one, *parts, strict=True):
        joined = type(whole)(*(np.concatenate(field, 1) for field in zip(*pieces, strict=True)))
        assert_same(joined, whole)


def test_rows_of_a_microbatch_are_consecutive_in_the_stream(config):
    data = config(shuffle=False)
    batch = next(load(data, batch_size=6, num_microbatches=2, rows=np.array([0, 2])))
    assert batch.rows.tolist() == [[0, 2], [3, 5]]
    assert batch.tokens[:, :, 0].tolist() == [[1, 17], [25, 41]]


def test_concat_epochs_are_different_permutations_of_the_same_sequences(config):
    count = (TOKENS - 1) // SEQ_LEN
    batches = list(itertools.islice(load(config(), batch_size=2 * count), 2))
    epochs = np.split(np.array(first_tokens(batches)), 4)
    begins = list(range(1, 1 + count * SEQ_LEN, SEQ_LEN))
    assert all(sorted(epoch.tolist()) == begins for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


def test_first_fit_epochs_order_the_documents_differently(config):
    # One bin at a time keeps the order in which the documents come.
    rows = stack(list(load(config("first_fit", epochs=2, packing_bins=1))))
    tokens = rows.tokens[rows.weights > 0].tolist()
    half = len(tokens) // 2
    assert sorted(tokens[:half]) == sorted(tokens[half:])
    assert tokens[:half] != tokens[half:]


def test_megatron_epochs_hold_every_token_once_each(config):
    rows = stack(list(load(config("megatron", epochs=2, separate_documents=False))))
    counts = np.bincount(rows.tokens[rows.weights > 0])
    assert counts.sum() == (2 * TOKENS - 1) // SEQ_LEN * SEQ_LEN
    assert set(counts[1:].tolist()) <= {1, 2}


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_order_is_a_function_of_the_seed(config, packing):
    def tokens(seed):
        return stack(list(itertools.islice(load(config(packing), seed=seed), 4))).tokens.tolist()

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_without_shuffling_the_sequences_come_in_order_in_each_epoch(config):
    tokens = first_tokens(load(config(shuffle=False, epochs=2)))
    assert tokens == 2 * list(range(1, 1 + 26 * 8, 8))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_prefetch_does_not_change_the_batches(config, packing, prefetch):
    plain = list(itertools.islice(load(config(packing)), 12))
    ahead = list(itertools.islice(load(config(packing, prefetch=prefetch)), 12))
    for got, expected in zip(ahead, plain, strict=True):
        assert_same(got, expected)


def resume(data, state, **more):
    loader = load(data, **more)
    loader.set_state(json.loads(json.dumps(state)))
    return loader


# Three epochs of 26 to 40 rows in batches of 4: the epochs end inside the twenty batches.
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_resume_at_any_batch_goes_on_as_if_uninterrupted(config, packing, prefetch):
    data = config(packing, epochs=3, prefetch=prefetch)
    loader = load(data, batch_size=4)
    states, batches = [loader.get_state()], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.get_state())
    assert len(batches) == len(states) - 1 >= 19
    for begin in range(20):
        rest = list(resume(data, states[begin], batch_size=4))
        assert len(rest) == len(batches) - begin
        for got, expected in zip(rest, batches[begin:], strict=True):
            assert_same(got, expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_second_resume_goes_on_as_if_uninterrupted(config, packing):
    data = config(packing, prefetch=2)
    batches = list(itertools.islice(load(data, batch_size=4), 16))
    for first, second in [(0, 0), (1, 3), (3, 1), (5, 6)]:
        loader = load(data, batch_size=4)
        for _ in range(first):
            next(loader)
        loader = resume(data, loader.get_state(), batch_size=4)
        for _ in range(second):
            next(loader)
        loader = resume(data, loader.get_state(), batch_size=4)
        for expected in batches[first + second :][:4]:
            assert_same(next(loader), expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_loader_can_be_put_back_after_it_has_read_on(config, packing):
    loader = load(config(packing, prefetch=2))
    next(loader)
    state = json.dumps(loader.get_state())
    expected = [next(loader) for _ in range(3)]
    loader.set_state(json.loads(state))
    for batch in expected:
        assert_same(next(loader), batch)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_resume_on_another_number_of_hosts_keeps_the_order(config, packing):
    data = config(packing, prefetch=2)
    whole = list(itertools.islice(load(data), 6))
    loader = load(data, rows=np.array([0, 1]))
    for _ in range(3):
        next(loader)
    loader = resume(data, loader.get_state(), rows=np.array([3]))
    for expected in whole[3:]:
        np.testing.assert_array_equal(next(loader).tokens, expected.tokens[:, 3:])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_last_batch_is_filled_up_with_rows_of_no_weight(config, prefetch):
    batches = list(load(config(epochs=1, prefetch=prefetch, separate_documents=False)))
    used = [int((batch.weights.sum(-1) == SEQ_LEN).sum()) for batch in batches]
    assert used == [8, 8, 8, 2]  # 26 sequences in batches of 8
    last = batches[-1]
    assert last.weights.sum() == 2 * SEQ_LEN
    assert not last.tokens[1].any()
    assert not last.labels[1].any()
    assert not last.segments[1].any()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_exhausted_data_stops_and_stays_stopped(config, packing, prefetch):
    loader = load(config(packing, epochs=1, prefetch=prefetch))
    assert len(list(itertools.islice(loader, 50))) < 50
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_state_at_the_end_of_the_data_is_the_end(config, packing):
    data = config(packing, epochs=1, prefetch=2)
    loader = load(data)
    list(loader)
    with pytest.raises(StopIteration):
        next(resume(data, loader.get_state()))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_ramp_of_the_batch_size_takes_fewer_rows_of_the_same_stream(config, packing):
    data = config(packing, prefetch=2)
    sizes = [2, 4, 4, 6, 8, 8]
    ramp = list(itertools.islice(load(data, batch_rows=lambda k: sizes[min(k, 5)]), 6))
    plain = stack(list(itertools.islice(load(data), 4)))
    begin = 0
    for batch, size in zip(ramp, sizes, strict=True):
        rows = stack([batch])
        np.testing.assert_array_equal(rows.tokens[:size], plain.tokens[begin : begin + size])
        assert not rows.weights[size:].any()
        begin += size


def test_threads_that_prefetch_agree_on_the_rows_of_a_ramp(config):
    def slowly(number):
        time.sleep(0.001)  # lets the other thread in
        return 2 + number % 3

    plain = list(itertools.islice(load(config(), batch_rows=lambda k: 2 + k % 3), 30))
    ahead = list(itertools.islice(load(config(prefetch=4), batch_rows=slowly), 30))
    for got, expected in zip(ahead, plain, strict=True):
        assert_same(got, expected)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    a = write_documents(folder / "a", number_tokens(LENGTHS))
    return a, write_documents(folder / "b", number_tokens(2 * LENGTHS, first=1001))


@pytest.mark.parametrize(
    ("packing", "shuffle"),
    [("concat", True), ("concat", False), ("first_fit", True), ("first_fit", False),
     ("megatron", True)],
)  # fmt: skip
def test_blending_draws_from_each_path_by_its_weight(pair, packing, shuffle):
    data = DataConfig(
        source="indexed",
        paths=pair,
        weights=(6.0, 2.0),
        split="1",
        packing=packing,
        shuffle=shuffle,
    )
    batches = list(itertools.islice(load(data, num_samples=400), 50))
    tokens = stack(batches).tokens
    if packing == "first_fit":  # counts documents, which both paths hold in the same lengths
        assert np.mean(tokens[tokens > 0] < 1000) == pytest.approx(0.75, abs=0.03)
    else:
        assert np.sum(tokens[:, 0] < 1000) == 300


def test_without_weights_each_path_is_read_once_per_epoch(pair):
    data = DataConfig(source="indexed", paths=pair, split="1", epochs=1)
    starts = first_tokens(load(data))
    begins = list(range(1, 1 + 26 * 8, 8)) + list(range(1001, 1001 + 52 * 8, 8))
    assert sorted(starts) == begins


@pytest.mark.parametrize("packing", PACKINGS)
def test_train_and_valid_share_no_token_and_valid_ends(config, packing):
    data = config(packing, split="80,20,0", prefetch=2)
    train = stack(list(itertools.islice(load(data), 18)))
    valid = stack(list(load(data, split="valid")))
    # The last four documents of twenty: 5 + 9 + 13 + 21 tokens.
    assert set(valid.tokens[valid.tokens > 0].tolist()) <= set(range(TOKENS - 48 + 1, TOKENS + 1))
    assert TOKENS - 48 - SEQ_LEN < train.labels.max() <= TOKENS - 48


def test_valid_is_one_pass_in_order(config):
    valid = stack(list(load(config(split="80,20,0"), split="valid")))
    begins = valid.tokens[valid.weights.any(axis=1), 0]
    assert begins.tolist() == [163, 171, 179, 187, 195]  # (48 - 1) // 8 sequences


@pytest.mark.parametrize("packing", PACKINGS)
def test_valid_starts_anew_each_time_whatever_the_seed_of_training(config, packing):
    data = config(packing, split="50,50,0")
    first, second = (list(load(data, split="valid", num_samples=n)) for n in (8, 16))
    for got, expected in zip(first, second, strict=True):
        assert_same(got, expected)


def test_splits_of_a_text_are_its_consecutive_parts(tmp_path):
    text = "\n\n".join(f"Paragraph {i} of a text." for i in range(40))
    path = tmp_path / "text.txt"
    path.write_text(text)
    data = DataConfig(paths=(str(path),), split="70,20,10", shuffle=False, epochs=1)
    parts = []
    for split in ("train", "valid", "test"):
        rows = stack(list(load(data, split=split, seq_len=1)))
        used = rows.weights[:, 0] > 0
        ids = [rows.tokens[0, 0], *rows.labels[used, 0]]
        parts.append(bytes(i for i in ids if i < 256).decode())
    assert "".join(parts) == text
    # Paragraphs of 24 and 25 characters, 988 in all: characters 692 and 889 are in the 29th and
    # in the blank line behind the 36th, and a cut moves on to the next paragraph.
    assert [part.count("Paragraph") for part in parts] == [29, 8, 3]
