"""`launch.py prepare`: tokenise a corpus into a Megatron .bin/.idx pair."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtjax.config.data import PrepareConfig
from mtjax.data.documents import Block, check_path, read_blocks
from mtjax.data.indexed import IndexedWriter, best_dtype
from mtjax.data.tokenizers import Tokenizer, make_tokenizer

TASK_CHARS = 1 << 18
"""Blocks handed to a worker together, at least; small documents would drown in messages."""
TASKS_PER_WORKER = 4
"""Tasks under way per worker: bounds memory, whatever the size of the corpus."""


class PrepareSummary(NamedTuple):
    """What was written."""

    num_documents: int
    num_tokens: int
    text_bytes: int
    """UTF-8 bytes of the text tokenised."""
    elapsed_s: float


class _Task(NamedTuple):
    blocks: list[Block]
    read_bytes: int
    """File bytes read when the task was made."""


def prepare(config: PrepareConfig) -> PrepareSummary:
    """Tokenise the input files, in order, and write <output>.bin and <output>.idx.

    Documents without text are left out. The output does not depend on the number of workers.

    Raises:
        ValueError: Missing or bad input (names file and line), or no document with text.
    """
    begin_s = time.perf_counter()
    tokenizer = make_tokenizer(config.tokenizer, config.tokenizer_path, config.eod_token)
    files = [check_path(config.source, path) for path in config.paths]
    total_bytes = sum(file.stat().st_size for file in files)
    num_documents = text_bytes = 0
    from rich.progress import Progress  # not needed to import this module in a worker

    with (
        Progress() as bar,
        IndexedWriter(config.output, best_dtype(tokenizer.vocab_size)) as writer,
    ):
        progress = bar.add_task("tokenising", total=total_bytes)
        pieces: list[np.ndarray] = []
        for task, tokens in _tokenise(config, tokenizer):
            for block, ids in zip(task.blocks, tokens, strict=True):
                pieces.append(ids)
                text_bytes += len(block.text.encode())
                if block.last:
                    if config.append_eod:
                        pieces.append(np.array([tokenizer.eod], ids.dtype))
                    writer.add_sequence(np.concatenate(pieces))
                    writer.end_document()
                    pieces = []
                    num_documents += 1
            bar.update(progress, completed=task.read_bytes)
        if not num_documents:
            raise ValueError(f"{', '.join(config.paths)}: no document with text; check the files")
        bar.update(progress, completed=total_bytes)
    elapsed_s = time.perf_counter() - begin_s
    return PrepareSummary(num_documents, writer.num_tokens, text_bytes, elapsed_s)


def main(config: PrepareConfig) -> int:
    """Run prepare and print a summary; returns the exit status."""
    done = prepare(config)
    size_bytes = Path(f"{config.output}.bin").stat().st_size
    print(
        f"{config.output}.bin/.idx: {done.num_documents} documents, {done.num_tokens} tokens, "
        f"{size_bytes} bytes, {done.text_bytes / done.num_tokens:.2f} bytes of text per token, "
        f"{done.elapsed_s:.1f} s"
    )
    return 0


def _make_tasks(config: PrepareConfig) -> Iterator[_Task]:
    read_bytes = 0

    def count(size_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += size_bytes

    blocks: list[Block] = []
    size = 0
    for path in config.paths:
        for block in read_blocks(config.source, path, config.text_field, count):
            blocks.append(block)
            size += len(block.text)
            if size >= TASK_CHARS:
                yield _Task(blocks, read_bytes)
                blocks, size = [], 0
    if blocks:
        yield _Task(blocks, read_bytes)


def _tokenise(
    config: PrepareConfig, tokenizer: Tokenizer
) -> Iterator[tuple[_Task, list[np.ndarray]]]:
    """Tasks and their tokens, in the order of the input."""
    dtype = best_dtype(tokenizer.vocab_size)
    if config.workers == 1:
        for task in _make_tasks(config):
            yield task, [np.array(tokenizer.encode(block.text), dtype) for block in task.blocks]
        return
    settings = (config.tokenizer, config.tokenizer_path, config.eod_token)
    pending: deque[tuple[_Task, Future[list[np.ndarray]]]] = deque()
    # spawn: a fork of a process with threads (JAX, tokenizers) can hang
    with ProcessPoolExecutor(config.workers, get_context("spawn"), _start, settings) as pool:
        for task in _make_tasks(config):
            pending.append((task, pool.submit(_encode, [block.text for block in task.blocks])))
            if len(pending) >= TASKS_PER_WORKER * config.workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()


_worker_tokenizer: Tokenizer | None = None


def _start(kind: str, path: str, eod_token: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = make_tokenizer(kind, path, eod_token)  # type: ignore[arg-type]


def _encode(texts: list[str]) -> list[np.ndarray]:
    assert _worker_tokenizer is not None
    dtype = best_dtype(_worker_tokenizer.vocab_size)
    return [np.array(_worker_tokenizer.encode(text), dtype) for text in texts]
