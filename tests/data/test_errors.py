"""What is refused, and that the message says where and what to do."""

import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mtjax.config.data import DataConfig
from mtjax.data.indexed import IndexedDataset
from tests.data.corpora import load, number_tokens, write_documents

PACKINGS = ["concat", "first_fit", "megatron"]


def refused(match, data, **more):
    with pytest.raises(ValueError, match=match):
        list(itertools.islice(load(data, **more), 30))


@pytest.mark.parametrize(
    ("source", "name"),
    [("text", "absent.txt"), ("jsonl", "absent.jsonl"), ("parquet", "absent.parquet")],
)
def test_a_missing_file_is_named(tmp_path, source, name):
    data = DataConfig(source=source, paths=(str(tmp_path / name),))
    refused(f"{name}: no such file; check data.paths", data)


@pytest.mark.parametrize(
    ("source", "name"), [("text", "a.txt"), ("jsonl", "a.jsonl"), ("parquet", "a.parquet")]
)
def test_a_folder_in_place_of_a_file_says_what_to_name(tmp_path, source, name):
    (tmp_path / name).write_text("")
    data = DataConfig(source=source, paths=(str(tmp_path),))
    refused(
        rf"{tmp_path}: a folder, expected files .* in data\.paths, .*/\*.{name[2:]} .*\(1 ", data
    )


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_in_place_of_lines_is_named(tmp_path, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=indent))
    data = DataConfig(source="jsonl", paths=(str(path),))
    refused(r"a.json, line 1: the file is a JSON array, expected one object per line", data)


def test_a_missing_half_of_an_indexed_pair_is_named(tmp_path):
    prefix = write_documents(tmp_path / "a", number_tokens([9]))
    Path(f"{prefix}.bin").unlink()
    refused(r"a\.bin: no such file; give the prefix", DataConfig(source="indexed", paths=(prefix,)))


def test_an_extension_of_another_source_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    refused(
        r"got extension '.txt', expected .jsonl", DataConfig(source="jsonl", paths=(str(path),))
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_empty_corpus_is_refused(tmp_path, packing):
    prefix = write_documents(tmp_path / "a", [])
    data = DataConfig(source="indexed", paths=(prefix,), packing=packing)
    refused(r"the train split \(90,10,0\) of .*a holds no token", data)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_text_is_refused(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_text(text)
    refused("holds no token|expected at least", DataConfig(paths=(str(path),)))


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait")
    refused(r"a.txt: not UTF-8", DataConfig(paths=(str(path),)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "no text"}', r"line 2: got \['body'\], expected an object with field 'text'"),
        ('["text"]', "line 2: got list, expected an object with field 'text'"),
        ('{"text": ', "line 2: not JSON"),
        ('{"text": 5}', "line 2: field 'text' is int, expected a string"),
        ('{"text": "\\ud800"}', "line 2: no valid Unicode text"),
    ],
)
def test_a_jsonl_line_without_text_is_refused_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    refused(f"a.jsonl, {message}", DataConfig(source="jsonl", paths=(str(path),)))


def test_blank_lines_of_jsonl_count_in_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n\nbad\n')
    refused("a.jsonl, line 4: not JSON", DataConfig(source="jsonl", paths=(str(path),)))


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return DataConfig(source="parquet", paths=(str(path),))


def test_a_missing_parquet_column_is_refused_with_those_there_are(tmp_path):
    data = write_parquet(tmp_path / "a.parquet", id=[1], body=["text"])
    refused(r"a.parquet: got columns \['id', 'body'\], expected 'text'", data)


def test_a_parquet_row_without_text_is_refused_by_number(tmp_path):
    data = write_parquet(tmp_path / "a.parquet", text=["a", None])
    refused("a.parquet, row 1: 'text' is NoneType, not a string", data)


def test_a_foreign_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not parquet at all")
    refused("a.parquet: not a Parquet file", DataConfig(source="parquet", paths=(str(path),)))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_a_wrong_number_of_weights_is_refused(weights):
    with pytest.raises(ValueError, match=r"expected one weight per path \(2\) or none"):
        DataConfig(source="indexed", paths=("a", "b"), weights=weights)


def test_a_weight_of_zero_is_refused():
    with pytest.raises(ValueError, match="expected weights above 0"):
        DataConfig(source="indexed", paths=("a", "b"), weights=(1.0, 0.0))


@pytest.mark.parametrize("split", ["a", "1,2,3,4", "0,0", "-1,2", "nan", ""])
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(ValueError, match=r"data\.split: got"):
        DataConfig(split=split)


def damage(tmp_path, change):
    prefix = write_documents(tmp_path / "a", number_tokens([5, 6]))
    index = Path(f"{prefix}.idx")
    index.write_bytes(change(index.read_bytes()))
    return prefix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:20], "the header is cut off"),
        # 34 of header, 4 + 8 per sequence, 8 per document index.
        (lambda b: b[:-3], "got 79 bytes, expected 82 for 2 sequences and 3 document indices"),
        (lambda b: b"PK\x03\x04" + b[4:], "not a Megatron index"),
        (lambda b: b"", "not a Megatron index"),
        (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "got version 2, expected 1"),
        (lambda b: b[:17] + b"\x09" + b[18:], "got dtype code 9"),
        (lambda b: b[:34] + struct.pack("<i", 4) + b[38:], "byte offsets do not add up"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=rf"a\.idx: .*{message}"):
        IndexedDataset(damage(tmp_path, change))


def test_tokens_that_are_cut_off_are_refused(tmp_path):
    prefix = write_documents(tmp_path / "a", number_tokens([5, 6]))
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"a\.bin: got 40 bytes, expected 44 by its \.idx"):
        IndexedDataset(prefix)


# Document 2 of 4 holds id 999 as its token 1.
BAD = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 999, 15, 16, 17, 18], [19, 20, 21, 22]]
MESSAGE = r"a, document 2: token id 999 at token 1, expected ids from 0 to 99"


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_id_beyond_the_vocabulary_is_refused_at_start(tmp_path, packing):
    prefix = write_documents(tmp_path / "a", BAD)
    data = DataConfig(source="indexed", paths=(prefix,), split="1", packing=packing)
    with pytest.raises(ValueError, match=MESSAGE):
        load(data, seq_len=4, vocab_size=100)


def test_an_id_in_the_validation_part_is_refused_when_training_starts(tmp_path):
    prefix = write_documents(tmp_path / "a", BAD)
    data = DataConfig(source="indexed", paths=(prefix,), split="50,50,0")
    with pytest.raises(ValueError, match=MESSAGE):
        load(data, seq_len=4, vocab_size=100)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_without_a_scan_an_id_beyond_the_vocabulary_is_refused_when_read(
    tmp_path, packing, prefetch
):
    prefix = write_documents(tmp_path / "a", BAD)
    data = DataConfig(
        source="indexed",
        paths=(prefix,),
        split="1",
        packing=packing,
        scan_tokens=False,
        prefetch=prefetch,
    )
    loader = load(data, seq_len=4, vocab_size=100)
    with pytest.raises(ValueError, match=MESSAGE):
        list(itertools.islice(loader, 30))


def test_a_negative_id_is_refused(tmp_path):
    prefix = write_documents(tmp_path / "a", [[1, 2, -1, 3, 4, 5]])
    data = DataConfig(source="indexed", paths=(prefix,), split="1")
    refused("document 0: token id -1 at token 2", data, seq_len=4, vocab_size=100)


def test_a_text_whose_ids_are_beyond_the_vocabulary_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("plain text, then caf\u00e9")  # bytes 195, 169 at place 20
    message = r"a.txt, document 0: token id 195 at token 20, expected ids from 0 to 127"
    refused(message, DataConfig(paths=(str(path),), split="1"), vocab_size=128)


def test_the_validation_part_of_a_text_is_checked_when_training_starts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("plain text\n\n" * 9 + "caf\u00e9")
    message = "document 0: token id 195 at token 15"  # the cut is before the last two paragraphs
    refused(message, DataConfig(paths=(str(path),), split="80,20,0"), vocab_size=128)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_document_of_jsonl_is_named_by_its_number_in_the_file(tmp_path, huggingface_file, split):
    path = tmp_path / "a.jsonl"
    texts = ["x", "y", "z", "x", "y", "z the"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(
        source="jsonl",
        paths=(str(path),),
        split="50,50,0",
        tokenizer="huggingface",
        tokenizer_path=huggingface_file,
    )
    # End of document is 0 and bytes are 1 to 256, so that only merged ids are beyond 256.
    with pytest.raises(ValueError, match=r"a.jsonl, document 5: token id \d+ at token 1"):
        load(data, seq_len=2, vocab_size=257, split=split)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_split_too_small_for_one_sequence_is_refused(tmp_path, split):
    prefix = write_documents(tmp_path / "a", number_tokens([8, 8]))
    data = DataConfig(source="indexed", paths=(prefix,), split="50,50,0")
    refused(
        r"a: 8 tokens in the split, expected at least train.seq_len \+ 1 = 9", data, split=split
    )
    next(load(data, split=split, seq_len=7))


def test_megatron_packing_refuses_a_held_out_split_too_small_for_one_sequence(tmp_path):
    prefix = write_documents(tmp_path / "a", number_tokens([8, 8]))
    data = DataConfig(source="indexed", paths=(prefix,), split="50,50,0", packing="megatron")
    refused(r"a: less than train.seq_len \+ 1 = 9 tokens in the split", data, split="valid")
    next(load(data, split="valid", seq_len=7))


def test_one_of_two_paths_too_small_is_named(tmp_path):
    long = write_documents(tmp_path / "long", number_tokens([40]))
    short = write_documents(tmp_path / "short", number_tokens([4]))
    data = DataConfig(source="indexed", paths=(long, short), split="1")
    refused("short: 4 tokens in the split", data)


def test_first_fit_without_a_document_of_two_tokens_is_refused(tmp_path):
    prefix = write_documents(tmp_path / "a", [[1], [2], [3]])
    data = DataConfig(source="indexed", paths=(prefix,), split="1", packing="first_fit")
    refused("no document of at least 2 tokens", data)


def test_megatron_packing_refuses_a_split_of_one_token(tmp_path):
    prefix = write_documents(tmp_path / "a", [[1]])
    data = DataConfig(source="indexed", paths=(prefix,), split="1", packing="megatron")
    refused("a: got 1 tokens in the split, expected at least 2", data)


def test_an_empty_split_is_refused(tmp_path):
    prefix = write_documents(tmp_path / "a", number_tokens([40]))
    data = DataConfig(source="indexed", paths=(prefix,), split="100,0,0")
    refused("the valid split .* holds no token", data, split="valid")


def test_the_message_keeps_the_id_of_a_wide_dtype(tmp_path):
    prefix = write_documents(tmp_path / "a", [[1, 2**40, 3, 4, 5]], np.int64)
    refused(f"token id {2**40}", DataConfig(source="indexed", paths=(prefix,), split="1"))
