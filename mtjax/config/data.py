"""What is trained on: sources, tokenizer, packing and order; and the `prepare` command."""

import itertools
import re
from typing import Literal

from mtjax.config.check import config_class, require, require_defaults

SourceName = Literal["text", "jsonl", "parquet", "indexed"]
TokenizerName = Literal["bytes", "huggingface", "sentencepiece", "tiktoken"]
PackingName = Literal["concat", "first_fit", "megatron"]
SplitName = Literal["train", "valid", "test"]

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


def split_bounds(split: str) -> list[tuple[float, float]]:
    """Turn "969,30,1" into the share of the data at which each split begins and ends.

    Parsed and added up as megatron-core does, so that rounded document counts agree to the last.

    Args:
        split: Up to three numbers, relative sizes of train, valid and test.

    Returns:
        Three (begin, end) pairs in [0, 1]; begin == end for an empty split.

    Raises:
        ValueError: Not one to three non-negative numbers with a positive sum.
    """
    fix = 'write relative sizes of train, valid and test such as "969,30,1"'
    parts = [part.strip() for part in split.split(",")]
    ok = len(parts) <= len(SPLITS) and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", p) for p in parts)
    require(ok, "data.split", split, "one to three non-negative numbers", fix)
    sizes = [float(part) for part in parts] + [0.0] * (len(SPLITS) - len(parts))
    require(sum(sizes) > 0, "data.split", split, "at least one size above 0", fix)
    total = sum(sizes)
    edges = [0.0]
    for size in sizes:
        edges.append(edges[-1] + size / total)
    return list(itertools.pairwise(edges))


def _check_tokenizer(prefix: str, config: "DataConfig | PrepareConfig") -> None:
    needs_path = config.tokenizer != "bytes"
    expected = "a file" if needs_path else "empty, since bytes needs no file"
    require(
        bool(config.tokenizer_path) == needs_path,
        f"{prefix}tokenizer_path",
        config.tokenizer_path,
        expected,
        f"set {prefix}tokenizer_path, or choose another {prefix}tokenizer",
    )
    require(
        needs_path or not config.eod_token,
        f"{prefix}eod_token",
        config.eod_token,
        "empty, since bytes has its own end of document",
        "drop it",
    )
    require(
        config.source in ("jsonl", "parquet") or config.text_field == "text",
        f"{prefix}text_field",
        config.text_field,
        f"the default, because source {config.source} has no fields",
        "drop it",
    )


@config_class("data")
class DataConfig:
    """Training and evaluation data."""

    source: SourceName = "text"
    """Kind of files: plain text, JSON lines, Parquet, or indexed (Megatron .bin/.idx, as written
    by `prepare`). The first three are tokenised into memory at start: use `prepare` above 1 GB."""
    paths: tuple[str, ...] = ()
    """Files; for indexed, path prefixes without .bin/.idx. None at all with source text means the
    text that ships with mtjax, Pride and Prejudice."""
    weights: tuple[float, ...] = ()
    """Share of the training sequences drawn from each path, above 0, in any unit. None: every
    path is read in full, once per epoch."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) that holds a document's text."""
    tokenizer: TokenizerName = "bytes"
    """bytes (256 values and end-of-document), huggingface (tokenizer.json), sentencepiece (.model)
    or tiktoken (.tiktoken ranks). For indexed data, the one the data was prepared with."""
    tokenizer_path: str = ""
    """File of the tokenizer; empty for bytes."""
    eod_token: str = ""
    """End-of-document token by name; empty: the tokenizer's own."""
    split: str = "90,10,0"
    """Relative sizes of train, valid and test: contiguous parts of each path, in documents (for
    text, in characters, cut between paragraphs)."""
    packing: PackingName = "concat"
    """concat: all tokens in a row, cut into sequences, which are shuffled. first_fit: whole
    documents side by side, padded; longer ones are cut. megatron: the order of megatron-core's
    GPTDataset and BlendedDataset, bit for bit."""
    packing_bins: int = 64
    """first_fit: sequences open at a time, at least 1; more means less padding."""
    separate_documents: bool = True
    """Documents that share a sequence do not see each other: own segment, positions from 0, no
    loss where a label belongs to the next one. Off: one segment (Megatron's default)."""
    shuffle: bool = True
    """Shuffle the training sequences (first_fit: the documents), differently in each epoch."""
    epochs: int | None = None
    """Passes over the training data, at least 1; None repeats for ever (with megatron packing, as
    long as train.steps needs; but several paths without weights are read once). With weights, the
    data ends as soon as one path has been read this often."""
    prefetch: int = 2
    """Batches prepared ahead in a thread, 0 or more."""
    scan_tokens: bool = True
    """indexed: read every token once at start to refuse ids beyond the vocabulary. Off: each
    sequence is checked as it is read (for data too large to scan at each start)."""

    def __post_init__(self) -> None:
        require(
            bool(self.paths) or self.source == "text",
            "data.paths",
            self.paths,
            f"at least one path for source {self.source}",
            "set data.paths",
        )
        require(
            len(self.weights) in (0, len(self.paths)),
            "data.weights",
            self.weights,
            f"one weight per path ({len(self.paths)}) or none",
            "give as many weights as paths",
        )
        require(
            all(weight > 0 for weight in self.weights),
            "data.weights",
            self.weights,
            "weights above 0",
            "leave out the paths you do not want",
        )
        require(bool(self.text_field), "data.text_field", self.text_field, "a name", "set it")
        _check_tokenizer("data.", self)
        if self.packing != "first_fit":
            require_defaults(self, "data", ["packing_bins"], f"data.packing is {self.packing!r}")
        if self.source != "indexed":
            require_defaults(self, "data", ["scan_tokens"], f"data.source is {self.source!r}")
        split_bounds(self.split)
        for name, least in (("packing_bins", 1), ("prefetch", 0)):
            value = getattr(self, name)
            require(value >= least, f"data.{name}", value, f"{least} or more", "raise it")
        require(
            self.epochs is None or self.epochs >= 1,
            "data.epochs",
            self.epochs,
            "1 or more, or None",
            "leave it out to repeat for ever",
        )
        self._check_packing()

    def _check_packing(self) -> None:
        require(
            self.separate_documents or self.packing != "first_fit",
            "data.separate_documents",
            self.separate_documents,
            "True with packing first_fit",
            "choose packing concat to let documents see each other",
        )
        require(
            self.shuffle or self.packing != "megatron",
            "data.shuffle",
            self.shuffle,
            "True with packing megatron, whose order is a shuffle",
            "choose packing concat for unshuffled data",
        )
        require(
            self.epochs is None or self.packing != "megatron" or len(self.paths) <= 1,
            "data.epochs",
            self.epochs,
            "None with packing megatron and several paths",
            "set train.steps instead",
        )


@config_class("")
class PrepareConfig:
    """Tokenise a corpus into a Megatron .bin/.idx pair."""

    paths: tuple[str, ...]
    """Input files, read in this order."""
    output: str
    """Prefix of the two files written: <output>.bin and <output>.idx."""
    source: Literal["text", "jsonl", "parquet"] = "jsonl"
    """Kind of input: text (one document per file), jsonl or parquet (one document per row)."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) that holds a document's text."""
    tokenizer: TokenizerName = "bytes"
    """bytes, huggingface (tokenizer.json), sentencepiece (.model) or tiktoken (.tiktoken)."""
    tokenizer_path: str = ""
    """File of the tokenizer; empty for bytes."""
    eod_token: str = ""
    """End-of-document token by name; empty: the tokenizer's own."""
    append_eod: bool = True
    """End each document with the end-of-document token."""
    workers: int = 1
    """Processes that tokenise, 1 or more; the output does not depend on it."""

    def __post_init__(self) -> None:
        require(bool(self.paths), "paths", self.paths, "at least one input file", "name one")
        require(bool(self.output), "output", self.output, "a path prefix", "name one")
        require(bool(self.text_field), "text_field", self.text_field, "a name", "set it")
        require(self.workers >= 1, "workers", self.workers, "1 or more", "raise it")
        _check_tokenizer("", self)
