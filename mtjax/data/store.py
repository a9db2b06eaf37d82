"""Tokenised documents of one path and split, in memory or memory-mapped."""

from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

import numpy as np

from mtjax.config.data import SPLITS, DataConfig, SplitName, split_bounds
from mtjax.data.documents import check_path, read_blocks, read_text
from mtjax.data.indexed import IndexedDataset
from mtjax.data.megatron import split_range
from mtjax.data.tokenizers import Tokenizer, make_tokenizer

EMBEDDED_TEXT = "pride_and_prejudice.txt"
_SCAN_TOKENS = 1 << 24  # tokens looked at in one go


class TokenStore(NamedTuple):
    """Documents of one path and split; ids of documents count within the whole path."""

    name: str
    """Path, for messages."""
    tokens: np.ndarray
    """[tokens of the path]: every document, one behind the other."""
    lengths: np.ndarray
    """int32 [documents of the path], in tokens."""
    starts: np.ndarray
    """int64 [documents of the path]: first token of each document in `tokens`."""
    documents: np.ndarray
    """int64 [documents of the split]: their ids, in a row."""

    @property
    def span(self) -> tuple[int, int]:
        """First and past-the-last token of the split, which is contiguous."""
        if not len(self.documents):
            return 0, 0
        first, last = self.documents[0], self.documents[-1]
        return int(self.starts[first]), int(self.starts[last] + self.lengths[last])


def open_stores(data: DataConfig, split: SplitName, vocab_size: int) -> list[TokenStore]:
    """Open each path, tokenising it unless it is indexed.

    Raises:
        ValueError: a file is missing or unreadable, a token id is not below `vocab_size` (names
            file, document and id), or no path has a token in the split.
    """
    if data.source == "indexed":
        stores = [_open_indexed(path, data.split, split) for path in data.paths]
        if data.scan_tokens:
            for store in stores:
                # Training starts first: it answers for the other splits as well.
                whole = (0, len(store.tokens))
                check_ids(store, *(whole if split == "train" else store.span), vocab_size)
    else:
        tokenizer = make_tokenizer(data.tokenizer, data.tokenizer_path, data.eod_token)
        stores = [
            _tokenise(data, path, split, tokenizer, vocab_size) for path in data.paths or ("",)
        ]
    if not any(store.span[1] - store.span[0] for store in stores):
        raise ValueError(
            f"data: the {split} split ({data.split}) of {', '.join(s.name for s in stores)} holds "
            "no token, expected some; change data.split or add data"
        )
    return stores


def check_ids(store: TokenStore, begin: int, end: int, vocab_size: int) -> None:
    """Refuse ids that the model lacks: a lookup on the device would clamp them silently.

    Raises:
        ValueError: naming file, document and id.
    """
    for first in range(begin, end, _SCAN_TOKENS):
        part = store.tokens[first : min(first + _SCAN_TOKENS, end)]
        bad = np.flatnonzero((part < 0) | (part >= vocab_size))
        if len(bad):
            place = first + int(bad[0])
            document = int(np.searchsorted(store.starts, place, side="right")) - 1
            raise ValueError(
                f"{store.name}, document {document}: token id {int(store.tokens[place])} at token "
                f"{place - int(store.starts[document])}, expected ids from 0 to {vocab_size - 1}; "
                "raise model.vocab_size, or prepare the data with the model's tokenizer"
            )


def _open_indexed(path: str, split: str, name: SplitName) -> TokenStore:
    dataset = IndexedDataset(path)
    # A GPT document is one sequence; splits count sequences, as megatron-core does.
    documents = np.arange(*split_range(len(dataset), split, name))
    return TokenStore(dataset.prefix, dataset.tokens, dataset.lengths, dataset.starts, documents)


def _tokenise(
    data: DataConfig, path: str, split: SplitName, tokenizer: Tokenizer, vocab_size: int
) -> TokenStore:
    """Encode a file's documents of one split; each ends with the end-of-document id."""
    name = path or f"the text that ships with mtjax ({EMBEDDED_TEXT})"
    if data.source == "text":
        text = _read(path)
        # Training starts first: it answers for the ids of the other splits as well.
        others = [other for other in SPLITS if split == "train" and other != split]
        for part in (*others, split):
            documents = _encode_text(text, _text_range(text, data.split, part), tokenizer)
            store = _join(name, documents, 0, len(documents))
            check_ids(store, 0, len(store.tokens), vocab_size)
        return store
    documents = list(_encode_documents(data, path, tokenizer))
    store = _join(name, documents, *split_range(len(documents), data.split, split))
    check_ids(store, 0, len(store.tokens), vocab_size)
    return store


def _join(name: str, documents: list[np.ndarray], first: int, last: int) -> TokenStore:
    """A store of all documents, with a split of those from `first` to before `last`."""
    lengths = np.array([len(document) for document in documents], np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    return TokenStore(name, tokens, lengths, starts, np.arange(first, last))


def _encode_text(text: str, part: tuple[int, int], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The one document of a text, or none; only the last part ends with the document."""
    begin, end = part
    ids = tokenizer.encode(text[begin:end]) if end > begin else []
    if ids and end == len(text):
        ids.append(tokenizer.eod)
    return [np.array(ids, np.int32)] if ids else []


def _encode_documents(data: DataConfig, path: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    ids: list[int] = []
    for block in read_blocks(data.source, path, data.text_field):
        ids += tokenizer.encode(block.text)
        if block.last:
            yield np.array([*ids, tokenizer.eod], np.int32)
            ids = []


def _read(path: str) -> str:
    if path:
        return read_text(check_path("text", path))
    return (resources.files("mtjax.data") / "corpora" / EMBEDDED_TEXT).read_text(encoding="utf-8")


def _text_range(text: str, split: str, name: SplitName) -> tuple[int, int]:
    """First and past-the-last character of a split, moved to the next paragraph."""
    begin, end = split_bounds(split)[SPLITS.index(name)]

    def cut(share: float) -> int:
        place = round(share * len(text))
        paragraph = text.find("\n\n", place)
        if place == 0 or place == len(text) or paragraph < 0:
            return len(text) if place else 0
        return paragraph + 2

    return (0, 0) if begin == end else (cut(begin), cut(end))
