"""Documents in text, JSON lines and Parquet files, in blocks small enough to tokenise."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK_CHARS = 1 << 20
"""A text longer than this is tokenised in blocks that end with a line, so that workers share one
large file and no tokenizer meets a gigabyte at once."""

SUFFIXES = {"jsonl": (".jsonl", ".ndjson", ".json"), "parquet": (".parquet", ".pq")}


class Block(NamedTuple):
    """A piece of a document."""

    document: int
    """Number of the document in its file, from 0."""
    text: str
    """The piece, never empty."""
    last: bool
    """The document ends here."""


def check_path(source: str, path: str, option: str = "data.paths") -> Path:
    """Refuse a file that is absent or that `source` would not read; `option` named it.

    Raises:
        ValueError: Names the file, what was expected and the fix.
    """
    suffixes = SUFFIXES.get(source, ())
    if Path(path).is_dir():
        patterns = [f"*{suffix}" for suffix in suffixes or (".txt",)]
        found = sum(len(list(Path(path).glob(pattern))) for pattern in patterns)
        raise ValueError(
            f"{path}: a folder, expected files for source {source}; name them in {option}, for "
            f"example {Path(path) / patterns[0]} without quotes ({found} "
            f"{' or '.join(patterns)} there)"
        )
    if suffixes and Path(path).suffix not in suffixes:
        raise ValueError(
            f"{path}: got extension {Path(path).suffix!r}, expected {' or '.join(suffixes)} for "
            f"source {source}; rename the file or choose another source"
        )
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; check {option} (source {source})")
    return Path(path)


def read_blocks(source: str, path: str, text_field: str) -> Iterator[Block]:
    """Yield a file's documents in order; documents without text are left out.

    Args:
        source: "text" (the file is one document), "jsonl" or "parquet" (one per row).
        path: The file.
        text_field: Field or column with the text.

    Raises:
        ValueError: Unreadable file or row; names the file and the line or row.
    """
    file = check_path(source, path)
    if source == "text":
        yield from split_blocks(0, _read_lines(file))
        return
    texts = _read_jsonl(file, text_field) if source == "jsonl" else _read_parquet(file, text_field)
    for document, text in enumerate(texts):
        yield from split_blocks(document, text.splitlines(keepends=True))


def split_blocks(document: int, lines: Iterable[str]) -> Iterator[Block]:
    """Group the lines of one document into blocks of about BLOCK_CHARS characters."""
    pending: list[str] = []
    size = 0
    for line in lines:
        if size >= BLOCK_CHARS:
            yield Block(document, "".join(pending), False)
            pending, size = [], 0
        pending.append(line)
        size += len(line)
    if size:
        yield Block(document, "".join(pending), True)


def read_text(file: Path) -> str:
    """Read a UTF-8 file with its line ends as they are.

    Raises:
        ValueError: Not UTF-8; names the byte.
    """
    return "".join(_read_lines(file))


def _read_lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error.reason}); convert it to UTF-8") from error


def _is_record(line: bytes) -> bool:
    """Whether a line that begins with [ is one row among others, and no array of objects."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return not (row and isinstance(row[0], dict))


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            # One array over the whole file, on one line or many: what json.dump writes.
            if number == 1 and line.lstrip().startswith(b"[") and not _is_record(line):
                raise ValueError(
                    f"{where}: the file is a JSON array, expected one object per line; write each "
                    f'entry on its own line, such as {{"{text_field}": ...}}'
                )
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error}); expected one object") from error
            if not isinstance(row, dict) or text_field not in row:
                got = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{where}: got {got}, expected an object with field {text_field!r}; "
                    "set text_field"
                )
            if not isinstance(row[text_field], str):
                got = type(row[text_field]).__name__
                raise ValueError(f"{where}: field {text_field!r} is {got}, expected a string")
            try:
                row[text_field].encode("utf-8")
            except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
                raise ValueError(f"{where}: no valid Unicode text ({error.reason})") from error
            yield row[text_field]


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a Parquet file ({error})") from error
    with table:
        columns = table.schema_arrow.names
        if text_field not in columns:
            raise ValueError(
                f"{file}: got columns {columns}, expected {text_field!r}; set text_field"
            )
        row = 0
        for batch in table.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    got = type(text).__name__
                    raise ValueError(f"{file}, row {row}: {text_field!r} is {got}, not a string")
                yield text
                row += 1
