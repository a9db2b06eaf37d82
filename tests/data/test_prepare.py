"""The `prepare` command: from text files to a .bin/.idx pair."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mtjax.config.data import PrepareConfig
from mtjax.data import documents
from mtjax.data.indexed import IndexedDataset
from mtjax.data.prepare import main
from mtjax.data.tokenizers import make_tokenizer

ROOT = Path(__file__).parents[2]

TEXTS = ["First one.\n", "caf\u00e9 \u2028 and a\x0cform feed", "", "the third\r\nof the three\n\n"]
KEPT = [text for text in TEXTS if text]


def write_jsonl(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts))
    return str(path)


def prepare(tmp_path, *paths, name="out", **fields):
    prefix = str(tmp_path / name)
    assert main(PrepareConfig(paths=paths, output=prefix, **fields)) == 0
    return prefix


def read(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_jsonl_gives_a_document_per_line_that_ends_with_eod(tmp_path):
    prefix = prepare(tmp_path, write_jsonl(tmp_path / "a.jsonl"))
    assert read(prefix) == [[*text.encode(), 256] for text in KEPT]
    assert IndexedDataset(prefix).documents.tolist() == [0, 1, 2, 3]


def test_parquet_gives_a_document_per_row(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": range(4), "body": TEXTS}), path)
    prefix = prepare(tmp_path, str(path), source="parquet", text_field="body")
    assert read(prefix) == [[*text.encode(), 256] for text in KEPT]


def test_a_text_file_is_one_document(tmp_path):
    paths = []
    for number, text in enumerate(KEPT):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(text.encode())
        paths.append(str(path))
    prefix = prepare(tmp_path, *paths, source="text")
    assert read(prefix) == [[*text.encode(), 256] for text in KEPT]


def test_files_keep_the_order_in_which_they_are_named(tmp_path):
    b = write_jsonl(tmp_path / "b.jsonl", ["b"])
    a = write_jsonl(tmp_path / "a.jsonl", ["a"])
    assert read(prepare(tmp_path, b, a)) == [[98, 256], [97, 256]]


def test_eod_can_be_left_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["ab"])
    assert read(prepare(tmp_path, path, append_eod=False)) == [[97, 98]]


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_documents_decode_to_their_texts(tmp_path, request, kind):
    file = request.getfixturevalue(f"{kind}_file")
    path = write_jsonl(tmp_path / "a.jsonl")
    prefix = prepare(tmp_path, path, tokenizer=kind, tokenizer_path=file)
    tokenizer = make_tokenizer(kind, file)
    assert [tokenizer.decode(ids) for ids in read(prefix)] == KEPT
    assert all(ids[-1] == tokenizer.eod for ids in read(prefix))


def test_one_and_three_workers_write_the_same_bytes(tmp_path, tiktoken_file):
    path = write_jsonl(tmp_path / "a.jsonl", [f"the text number {i}\n" * i for i in range(1, 90)])
    fields = {"tokenizer": "tiktoken", "tokenizer_path": tiktoken_file}
    one = prepare(tmp_path, path, name="one", workers=1, **fields)
    three = prepare(tmp_path, path, name="three", workers=3, **fields)
    for suffix in (".bin", ".idx"):
        assert Path(one + suffix).read_bytes() == Path(three + suffix).read_bytes()
    assert len(IndexedDataset(one)) == 89


def test_a_long_document_in_blocks_stays_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", 20)
    text = "".join(f"line {i}\n" for i in range(30))
    path = write_jsonl(tmp_path / "a.jsonl", [text, "short"])
    assert read(prepare(tmp_path, path)) == [[*text.encode(), 256], [*b"short", 256]]


def test_blocks_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", 20)
    text = "".join(f"line {i}\n" for i in range(10))
    path = tmp_path / "a.txt"
    path.write_text(text)
    blocks = list(documents.read_blocks("text", str(path), "text"))
    assert [len(block.text) for block in blocks] == [21, 21, 21, 7]  # lines of 7 characters
    assert [block.last for block in blocks] == [False, False, False, True]
    assert "".join(block.text for block in blocks) == text


def outputs(tmp_path):
    return [path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_leaves_no_output_file(tmp_path, workers):
    path = tmp_path / "a.jsonl"
    write_jsonl(path)
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(ValueError, match=r"a.jsonl, line 5: not JSON"):
        prepare(tmp_path, str(path), workers=workers)
    assert outputs(tmp_path) == []


def test_a_failure_keeps_the_output_of_an_earlier_run(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", ["ab"])
    prefix = prepare(tmp_path, good)
    with pytest.raises(ValueError, match="field"):
        prepare(tmp_path, good, write_jsonl(tmp_path / "bad.jsonl", field="other"))
    assert read(prefix) == [[97, 98, 256]]
    assert sorted(outputs(tmp_path)) == ["out.bin", "out.idx"]


def test_a_corpus_without_text_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(ValueError, match="hold no text, expected at least one document"):
        prepare(tmp_path, path)
    assert outputs(tmp_path) == []


def test_a_missing_input_is_refused_before_any_work(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"absent.jsonl: no such file"):
        prepare(tmp_path, path, str(tmp_path / "absent.jsonl"))
    assert outputs(tmp_path) == []


def test_the_command_line_shows_progress_and_reports_documents_and_tokens(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "cde"])
    launch = Path(__file__).parents[2] / "launch.py"
    command = [sys.executable, str(launch), "prepare", "--paths", path]
    command += ["--output", str(tmp_path / "out"), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "2 documents, 7 tokens" in done.stdout
    assert "100% of input" in done.stdout + done.stderr
    assert read(str(tmp_path / "out")) == [[97, 98, 256], [99, 100, 101, 256]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paths", "absent.jsonl"], "absent.jsonl: no such file; check --paths (source jsonl)"),
        (["--paths", "docs"], "docs: a folder, expected files for source jsonl; name them in --p"),
        (
            ["--paths", "a.jsonl", "--tokenizer-path", "x"],
            " tokenizer_path: got 'x', expected empty",
        ),
    ],
)
def test_what_the_command_line_refuses_is_named_as_it_was_typed(tmp_path, arguments, message):
    command = [sys.executable, "launch.py", "prepare", *arguments]
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("\u2502", " ").split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stop_signal_leaves_no_half_written_file_and_one_line(tmp_path, number, workers):
    path = write_jsonl(tmp_path / "a.jsonl", ["ab" * 5000] * 20000)
    command = [sys.executable, "launch.py", "prepare", "--paths", path]
    command += ["--output", str(tmp_path / "out"), "--workers", str(workers)]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "out.partial.bin").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert err == "ended by a stop signal before it was done\n"
    assert outputs(tmp_path) == []
