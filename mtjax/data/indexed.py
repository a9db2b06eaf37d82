"""Megatron indexed datasets: a .bin of raw tokens and an .idx that says where sequences lie.

The .idx is little-endian: magic, u64 version 1, u8 dtype code, u64 number of sequences, u64 number
of document indices, i32 lengths in tokens, i64 offsets in bytes, i64 document indices (the first
sequence of each document, and the total), optional i8 modes. A GPT document is one sequence.
"""

import itertools
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def best_dtype(vocab_size: int) -> type[np.number]:
    """Token dtype megatron-core picks: uint16 for a vocabulary below 65500, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


def strip_suffix(path: str) -> str:
    """The prefix of a dataset, given that or one of its two files."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


class IndexedDataset:
    """Read-only view of a dataset, memory-mapped.

    Attributes:
        tokens: [number of tokens], the whole .bin.
        lengths: int32 [sequences], in tokens.
        starts: int64 [sequences], first token of each sequence in `tokens`.
        documents: int64 [documents + 1], first sequence of each document, and the total.
        modes: int8 [sequences] or None.
    """

    def __init__(self, prefix: str) -> None:
        """Map both files.

        Raises:
            ValueError: A file is missing, is not of this format, or they do not fit each other.
        """
        self.prefix = strip_suffix(prefix)
        index, data = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        for file in (index, data):
            if not file.is_file():
                raise ValueError(
                    f"{file}: no such file; give the prefix of a .bin/.idx pair, or write one "
                    "with `launch.py prepare`"
                )
        dtype, num_sequences, num_documents = _read_header(index)
        buffer = np.memmap(index, np.uint8, mode="r")
        sizes = {"lengths": 4 * num_sequences, "offsets": 8 * num_sequences}
        sizes["documents"] = 8 * num_documents
        expected = HEADER.size + sum(sizes.values())
        if len(buffer) not in (expected, expected + num_sequences):
            raise ValueError(
                f"{index}: got {len(buffer)} bytes, expected {expected} for {num_sequences} "
                f"sequences and {num_documents} document indices (or {num_sequences} more, with "
                "modes); the file is cut off or damaged, write it again"
            )
        edges = np.cumsum([HEADER.size, *sizes.values()])
        fields = [buffer[a:b] for a, b in itertools.pairwise(edges)]
        self.lengths = fields[0].view("<i4")
        offsets = fields[1].view("<i8")
        self.documents = fields[2].view("<i8")
        has_modes = num_sequences and len(buffer) > expected
        self.modes = buffer[expected:].view(np.int8) if has_modes else None
        self.starts = self._check_offsets(index, offsets, np.dtype(dtype).itemsize)
        self.tokens = self._map_tokens(data, dtype)

    def _check_offsets(self, index: Path, offsets: np.ndarray, item_bytes: int) -> np.ndarray:
        starts = np.zeros(len(self.lengths), np.int64)
        np.cumsum(self.lengths[:-1], dtype=np.int64, out=starts[1:])
        if (self.lengths < 0).any() or not np.array_equal(starts * item_bytes, offsets):
            raise ValueError(
                f"{index}: byte offsets do not add up from the sequence lengths; the file is "
                "damaged, write it again"
            )
        return starts

    def _map_tokens(self, data: Path, dtype: type[np.number]) -> np.ndarray:
        item_bytes = np.dtype(dtype).itemsize
        expected = int(self.lengths.sum(dtype=np.int64)) * item_bytes
        got = data.stat().st_size
        if got != expected:
            raise ValueError(
                f"{data}: got {got} bytes, expected {expected} by its .idx; the two files are "
                "not of one dataset, or the copy was cut off"
            )
        if not expected:  # a file of no bytes cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(data, np.dtype(dtype).newbyteorder("<"), mode="r")

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Tokens of one sequence."""
        start = self.starts[sequence]
        return self.tokens[start : start + self.lengths[sequence]]


def _read_header(index: Path) -> tuple[type[np.number], int, int]:
    with index.open("rb") as stream:
        head = stream.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{index}: begins with {head[: len(MAGIC)]!r}, expected {MAGIC!r}; not a Megatron index"
        )
    if len(head) < HEADER.size:
        raise ValueError(f"{index}: the header is cut off; write the file again")
    _, version, code, num_sequences, num_documents = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{index}: got version {version}, expected {VERSION}; convert the data")
    if code not in DTYPES:
        raise ValueError(f"{index}: got dtype code {code}, expected one of {sorted(DTYPES)}")
    return DTYPES[code], num_sequences, num_documents


class IndexedWriter:
    """Writes a dataset; a context manager that removes both files if its block fails."""

    def __init__(self, prefix: str, dtype: type[np.number], *, with_modes: bool = False) -> None:
        """Open the .bin.

        Raises:
            ValueError: A dtype that the format has no code for.
        """
        if dtype not in CODES:
            names = sorted(known.__name__ for known in CODES)
            raise ValueError(f"dtype: got {dtype}, expected one of {names}")
        self.prefix = strip_suffix(prefix)
        self.dtype = dtype
        self.num_tokens = 0
        self._lengths: list[int] = []
        self._documents = [0]
        self._modes: list[int] | None = [] if with_modes else None
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._data: BinaryIO = open(f"{self.prefix}.bin", "wb")  # noqa: SIM115 closed in __exit__

    def add_sequence(self, tokens: np.ndarray | list[int], mode: int = 0) -> None:
        """Append a sequence to the current document.

        Raises:
            ValueError: An id does not fit the dtype.
        """
        values = np.asarray(tokens)
        if values.size and np.issubdtype(self.dtype, np.integer):
            limits = np.iinfo(np.dtype(self.dtype).name)
            if values.min() < limits.min or values.max() > limits.max:
                raise ValueError(
                    f"{self.prefix}.bin: got ids {values.min()} to {values.max()}, expected "
                    f"{limits.min} to {limits.max} ({limits.dtype}); choose a wider dtype"
                )
        self._data.write(np.ascontiguousarray(values, self.dtype).tobytes())
        self._lengths.append(values.size)
        self.num_tokens += values.size
        if self._modes is not None:
            self._modes.append(mode)

    def end_document(self) -> None:
        """Close the current document."""
        self._documents.append(len(self._lengths))

    def add_dataset(self, prefix: str) -> None:
        """Append a whole dataset of the same dtype.

        Raises:
            ValueError: The dtypes, or the presence of modes, differ.
        """
        other = IndexedDataset(prefix)
        if other.tokens.dtype != self.dtype or (other.modes is None) != (self._modes is None):
            raise ValueError(
                f"{other.prefix}: got {other.tokens.dtype}, modes {other.modes is not None}; "
                f"expected {np.dtype(self.dtype)}, modes {self._modes is not None}; "
                "prepare both alike"
            )
        offset = len(self._lengths)
        self._lengths.extend(other.lengths.tolist())
        self._documents.extend((other.documents[1:] + offset).tolist())
        if self._modes is not None and other.modes is not None:
            self._modes.extend(other.modes.tolist())
        self.num_tokens += len(other.tokens)
        with open(f"{other.prefix}.bin", "rb") as stream:
            shutil.copyfileobj(stream, self._data)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._data.close()
        if error_type is not None:
            Path(f"{self.prefix}.bin").unlink()
            return
        lengths = np.array(self._lengths, np.int32)
        starts = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        starts *= np.dtype(self.dtype).itemsize
        head = (MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents))
        with open(f"{self.prefix}.idx", "wb") as stream:
            stream.write(HEADER.pack(*head))
            stream.write(lengths.tobytes())
            stream.write(starts.tobytes())
            stream.write(np.array(self._documents, np.int64).tobytes())
            if self._modes is not None:
                stream.write(np.array(self._modes, np.int8).tobytes())
