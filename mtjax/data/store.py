"""Token stores: the documents of one split of one source, ready for packing."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from mtjax.config.data import SPLITS, DataConfig, SplitName, split_bounds
from mtjax.data.documents import check_path, read_blocks, read_text, split_blocks
from mtjax.data.indexed import IndexedDataset, best_dtype
from mtjax.data.megatron import split_range
from mtjax.data.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

SCAN_TOKENS = 1 << 24
"""Tokens looked at together when ids are checked: 64 MiB of int32."""
EMBEDDED_TEXT = "pride_and_prejudice.txt"


class JoinedTokens:
    """Several token arrays read as one, without copying them."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._begins = np.cumsum([0, *(len(part) for part in parts)])

    def __getitem__(self, addresses: np.ndarray) -> np.ndarray:
        """Tokens at addresses, int64 [...] -> int32 [...]."""
        owners = np.searchsorted(self._begins, addresses, side="right") - 1
        tokens = np.empty(addresses.shape, np.int32)
        for owner in np.unique(owners):
            mine = owners == owner
            tokens[mine] = self._parts[owner][addresses[mine] - self._begins[owner]]
        return tokens


@dataclass(frozen=True)
class TokenStore:
    """Documents that lie one behind the other in an array of tokens."""

    name: str
    """File or prefix, for messages."""
    tokens: np.ndarray | JoinedTokens
    """Integers, indexed by token address."""
    starts: np.ndarray
    """int64 [documents]: address of each document's first token."""
    lengths: np.ndarray
    """int32 [documents], in tokens."""
    first_document: int = 0
    """Number of the first document in the file, for messages."""
    read_limit: int | None = None
    """Refuse ids from here on while reading; None where a scan has seen them all."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum(dtype=np.int64))

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """Tokens at addresses: int64 [N] -> int32 [N].

        Raises:
            ValueError: An id is beyond `read_limit`.
        """
        tokens = self.tokens[addresses]
        if self.read_limit is not None:
            bad = find_bad_id(tokens, self.read_limit)
            if bad is not None:
                self._refuse(int(addresses[bad]), int(tokens[bad]), self.read_limit)
        return tokens.astype(np.int32, copy=False)

    def scan(self, vocab_size: int) -> None:
        """Look at every token once.

        Raises:
            ValueError: An id is not in [0, vocab_size); names file, document and id.
        """
        assert isinstance(self.tokens, np.ndarray)
        limits = np.iinfo(self.tokens.dtype)
        if not self.num_tokens or (limits.min == 0 and limits.max < vocab_size):
            return
        end = int(self.starts[-1] + self.lengths[-1])
        for begin in range(int(self.starts[0]), end, SCAN_TOKENS):
            chunk = self.tokens[begin : min(begin + SCAN_TOKENS, end)]
            bad = find_bad_id(chunk, vocab_size)
            if bad is not None:
                self._refuse(begin + bad, int(chunk[bad]), vocab_size)

    def _refuse(self, address: int, token: int, vocab_size: int) -> None:
        document = int(np.searchsorted(self.starts, address, side="right")) - 1
        raise ValueError(
            f"{self.name}, document {self.first_document + document}: got token id {token}, "
            f"expected 0 to {vocab_size - 1} (the model's vocabulary); use the tokenizer the data "
            "was prepared with and a model with its vocabulary size"
        )


def find_bad_id(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Place of the first id outside [0, vocab_size), or None."""
    if not len(tokens) or (tokens.max() < vocab_size and tokens.min() >= 0):
        return None
    return int(np.argmax((tokens >= vocab_size) | (tokens < 0)))


def open_stores(
    data: DataConfig, split: SplitName, *, tokenizer: Tokenizer, vocab_size: int, join: bool
) -> list[TokenStore]:
    """Open or tokenise the documents of a split.

    Args:
        data: Sources and split sizes.
        split: Which part.
        tokenizer: For text, jsonl and parquet.
        vocab_size: Of the model; ids from here on are refused.
        join: Return one store with the documents of all paths.

    Returns:
        One store per path, or a single one.

    Raises:
        ValueError: Missing or bad file, empty split, id beyond the vocabulary.
    """
    if data.source == "indexed":
        stores = [_open_indexed(data, path, split, vocab_size) for path in data.paths]
    else:
        paths = data.paths or ("",)
        stores = [_tokenise(data, path, split, tokenizer, vocab_size) for path in paths]
    if join and len(stores) > 1:
        stores = [join_stores(stores)]
    for store in stores:
        if store.num_tokens < 2:
            raise ValueError(
                f"{store.name}: got {store.num_tokens} tokens in split {split} "
                f"({data.split!r}), expected at least 2; the corpus is empty or too small for "
                "that split: change data.split or data.paths"
            )
    return stores


def join_stores(stores: Sequence[TokenStore]) -> TokenStore:
    """One store with the documents of several, in order."""
    parts, starts, begin = [], [], 0
    for store in stores:
        assert isinstance(store.tokens, np.ndarray)
        first = int(store.starts[0]) if len(store.starts) else 0
        parts.append(store.tokens[first : first + store.num_tokens])
        starts.append(store.starts - first + begin)
        begin += store.num_tokens
    return TokenStore(
        name=f"{stores[0].name} and {len(stores) - 1} more",
        tokens=JoinedTokens(parts),
        starts=np.concatenate(starts),
        lengths=np.concatenate([store.lengths for store in stores]),
        read_limit=stores[0].read_limit,
    )


def _open_indexed(data: DataConfig, path: str, split: SplitName, vocab_size: int) -> TokenStore:
    dataset = IndexedDataset(path)
    if not np.issubdtype(dataset.tokens.dtype, np.integer):
        raise ValueError(
            f"{dataset.prefix}.idx: got dtype {dataset.tokens.dtype}, expected integer tokens"
        )
    begin, end = split_range(len(dataset), data.split, split)
    store = TokenStore(
        name=f"{dataset.prefix}.bin",
        tokens=dataset.tokens,
        starts=dataset.starts[begin:end],
        lengths=dataset.lengths[begin:end],
        first_document=begin,
        read_limit=None if data.scan_tokens else vocab_size,
    )
    if data.scan_tokens:
        store.scan(vocab_size)
    return store


def _tokenise(
    data: DataConfig, path: str, split: SplitName, tokenizer: Tokenizer, vocab_size: int
) -> TokenStore:
    if data.source == "text":
        name, text = (path, read_text(check_path("text", path))) if path else _embedded()
        part = take_text(text, *split_bounds(data.split)[SPLITS.index(split)])
        first_document, texts = 0, [part] if part else []
    else:
        name = path
        blocks: list[str] = []
        all_texts: list[str] = []
        for block in read_blocks(data.source, path, data.text_field):
            blocks.append(block.text)
            if block.last:
                all_texts.append("".join(blocks))
                blocks = []
        first_document, end = split_range(len(all_texts), data.split, split)
        texts = all_texts[first_document:end]
    dtype = best_dtype(tokenizer.vocab_size)
    documents = [_encode(text, tokenizer, dtype) for text in texts]
    lengths = np.array([len(tokens) for tokens in documents], np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    tokens = np.concatenate(documents) if documents else np.zeros(0, dtype)
    store = TokenStore(name, tokens, starts, lengths, first_document)
    store.scan(vocab_size)
    logger.info(
        "%s, %s: %d documents, %d tokens in memory", name, split, len(texts), store.num_tokens
    )
    return store


def _encode(text: str, tokenizer: Tokenizer, dtype: type[np.number]) -> np.ndarray:
    """Token ids of a document and its end, dtype [tokens]."""
    ids: list[np.ndarray] = []
    for block in split_blocks(0, text.splitlines(keepends=True)):
        ids.append(np.array(tokenizer.encode(block.text), dtype))
    return np.concatenate([*ids, np.array([tokenizer.eod], dtype)])


def _embedded() -> tuple[str, str]:
    file = resources.files("mtjax.data") / "corpora" / EMBEDDED_TEXT
    return f"mtjax/data/corpora/{EMBEDDED_TEXT}", file.read_text(encoding="utf-8")


def take_text(text: str, begin: float, end: float) -> str:
    """The part of a text between two shares of its characters, cut between paragraphs.

    Cuts depend on the share alone, so neighbouring parts neither overlap nor leave a gap.
    """
    return text[_cut(text, begin) : _cut(text, end)]


def _cut(text: str, share: float) -> int:
    """First paragraph (else line) that begins at or after a share of the text."""
    place = round(share * len(text))
    if place in (0, len(text)):
        return place
    for separator in ("\n\n", "\n"):
        found = text.find(separator, place)
        if found >= 0:
            place = found + len(separator)
            while text.startswith("\n", place):  # blank lines stay with what they end
                place += 1
            return place
    return len(text)
