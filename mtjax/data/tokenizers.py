"""Tokenizers behind one protocol: bytes, Hugging Face tokenizers, sentencepiece, tiktoken."""

import base64
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtjax.config.data import TokenizerName


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    """Largest id plus 1."""
    eod: int
    """Id that ends a document."""
    bos: int | None
    """Id that begins a document, where the tokenizer has one."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; incomplete UTF-8 shows as replacement characters."""
        ...

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: UTF-8 bytes of text each id stands for, 0 for special tokens.

        Exact for bytes, tiktoken, and byte-level Hugging Face tokenizers; sentencepiece adds one
        byte per encoded text when the model has a dummy prefix, and does not see what its
        normaliser drops.
        """
        ...


def count_target_bytes(labels: np.ndarray, weights: np.ndarray, token_bytes: np.ndarray) -> int:
    """UTF-8 bytes of the tokens that count in the loss: the divisor of bits per byte.

    Args:
        labels: int [...]: target ids.
        weights: [...]: loss weights; a target with weight 0 does not count.
        token_bytes: int32 [V], from Tokenizer.token_bytes.
    """
    return int(token_bytes[labels[weights > 0]].sum(dtype=np.int64))


class ByteTokenizer:
    """The 256 byte values, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    bos: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int32)


EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class HuggingFaceTokenizer:
    """A tokenizer.json, with the special tokens of the tokenizer_config.json beside it."""

    def __init__(self, path: Path, eod_token: str) -> None:
        from tokenizers import Tokenizer as HFTokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{file}: no such file; expected a Hugging Face tokenizer.json")
        try:
            self._tokenizer = HFTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: not a Hugging Face tokenizer.json ({error})") from error
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values()) + 1
        special = _read_special_tokens(file.parent / "tokenizer_config.json")
        names = (eod_token,) if eod_token else (special.get("eos_token", ""), *EOD_NAMES)
        self.eod = _first_known(names, self._ids, file)
        self.bos = self._ids.get(special.get("bos_token", ""))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        spec = json.loads(self._tokenizer.to_str())
        byte_level = '"ByteLevel"' in json.dumps(spec["decoder"])
        added = {token["id"]: token for token in spec["added_tokens"]}
        counts = np.zeros(self.vocab_size, np.int32)
        for piece, i in self._ids.items():
            if i in added:
                counts[i] = 0 if added[i]["special"] else len(piece.encode())
            else:  # byte-level pieces hold one printable character per byte
                counts[i] = len(piece) if byte_level else _count_piece_bytes(piece)
        return counts


def _read_special_tokens(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    found = {name: config.get(name) for name in ("bos_token", "eos_token")}
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in found.items()}
    return {k: v for k, v in names.items() if v}


def _first_known(names: tuple[str, ...], ids: dict[str, int], file: Path) -> int:
    for name in names:
        if name in ids:
            return ids[name]
    tried = [name for name in names if name]
    raise ValueError(f"{file}: has none of {tried} to end a document; set eod_token to its name")


def _count_piece_bytes(piece: str) -> int:
    """UTF-8 bytes of a sentencepiece-style piece: U+2581 is a space, <0xAB> one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("\u2581", " ").encode())


class SentencePieceTokenizer:
    """A sentencepiece .model file."""

    def __init__(self, path: Path, eod_token: str) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path}: not a sentencepiece model ({error})") from error
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.piece_to_id(eod_token) if eod_token else self._model.eos_id()
        unknown = bool(eod_token) and self.eod == self._model.unk_id()
        if self.eod < 0 or unknown:
            raise ValueError(
                f"{path}: has no end-of-document piece {eod_token!r}; set eod_token to a piece "
                "of the model"
            )
        bos = self._model.bos_id()
        self.bos = bos if bos >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def token_bytes(self) -> np.ndarray:
        model = self._model
        special = (model.is_control, model.is_unknown, model.is_unused)
        counts = [
            0 if any(test(i) for test in special) else _count_piece_bytes(model.id_to_piece(i))
            for i in range(self.vocab_size)
        ]
        return np.array(counts, np.int32)


R50K_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TIKTOKEN_ENCODINGS: dict[str, tuple[str, int | None]] = {
    "r50k_base": (R50K_PATTERN, 50256),
    "p50k_base": (R50K_PATTERN, 50256),
    "cl100k_base": (CL100K_PATTERN, 100257),
    "o200k_base": (O200K_PATTERN, 199999),
}
"""Ranks file name -> (pattern, id of <|endoftext|>), which a ranks file itself does not hold."""


class TiktokenTokenizer:
    """A .tiktoken ranks file: base64 token and rank per line.

    A file that keeps the name of a published encoding gets its pattern and end-of-document id;
    any other the cl100k pattern (as Llama 3 and Qwen use) and the first id after the ranks.
    """

    bos: int | None = None

    def __init__(self, path: Path, eod_token: str) -> None:
        import tiktoken

        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected a .tiktoken ranks file")
        ranks = _read_ranks(path)
        pattern, eod = TIKTOKEN_ENCODINGS.get(path.stem, (CL100K_PATTERN, None))
        self.eod = max(ranks.values()) + 1 if eod is None else eod
        self._encoding = tiktoken.Encoding(
            path.stem,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={eod_token or "<|endoftext|>": self.eod},
        )
        self._ranks = ranks
        self.vocab_size = self._encoding.max_token_value + 1

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i != self.eod])

    def token_bytes(self) -> np.ndarray:
        counts = np.zeros(self.vocab_size, np.int32)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts


def _read_ranks(file: Path) -> dict[bytes, int]:
    # tiktoken's own reader caches by path, so it would miss that a local file has changed.
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"{file}, line {number}: not a tiktoken rank ({error}); expected "
                "'base64-token rank'"
            ) from error
    if not ranks:
        raise ValueError(f"{file}: no ranks; expected 'base64-token rank' lines")
    return ranks


def make_tokenizer(kind: TokenizerName, path: str = "", eod_token: str = "") -> Tokenizer:
    """Load a tokenizer.

    Args:
        kind: "bytes", "huggingface", "sentencepiece" or "tiktoken".
        path: Its file; for huggingface also the folder that holds tokenizer.json.
        eod_token: Name of the end-of-document token; empty: the tokenizer's own.

    Raises:
        ValueError: Unknown kind, missing or unreadable file, or no end-of-document token.
    """
    if kind == "bytes":
        return ByteTokenizer()
    loaders: dict[str, Any] = {
        "huggingface": HuggingFaceTokenizer,
        "sentencepiece": SentencePieceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
    if kind not in loaders:
        raise ValueError(f"tokenizer: got {kind!r}, expected bytes or one of {sorted(loaders)}")
    return loaders[kind](Path(path), eod_token)
