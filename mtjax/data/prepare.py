"""The `prepare` command: a corpus tokenised into a Megatron .bin/.idx pair."""

import multiprocessing
import multiprocessing.pool
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtjax.config.data import PrepareConfig, TokenizerName
from mtjax.data.documents import Block, check_path, read_blocks
from mtjax.data.indexed import IndexedWriter, best_dtype, strip_suffix
from mtjax.data.tokenizers import Tokenizer, make_tokenizer

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Job(NamedTuple):
    tokenizer: TokenizerName
    path: str
    eod_token: str
    block: Block


@cache
def _tokenizer(kind: TokenizerName, path: str, eod_token: str) -> Tokenizer:
    """One per worker process."""
    return make_tokenizer(kind, path, eod_token)


def _encode(job: _Job) -> tuple[np.ndarray, bool]:
    """Token ids of a block, and whether its document ends with it."""
    ids = _tokenizer(job.tokenizer, job.path, job.eod_token).encode(job.block.text)
    return np.array(ids, np.int32), job.block.last


def main(config: PrepareConfig) -> int:
    """Tokenise `config.paths` into `config.output`.bin and .idx; returns the exit code.

    Documents keep their order, so the output does not depend on the number of workers. Both files
    appear only when complete.

    Raises:
        ValueError: a file or a row can't be read, or holds no text.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    tokenizer = _tokenizer(config.tokenizer, config.tokenizer_path, config.eod_token)
    for path in config.paths:
        check_path(config.source, path, "--paths")
    total_bytes = sum(Path(path).stat().st_size for path in config.paths)
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}% of input, {task.fields[documents]} documents"),
        TimeElapsedColumn(),
    )
    temporary = f"{strip_suffix(config.output)}.partial"
    with (
        _removed_on_failure(temporary),
        _workers(config.workers) as pool,
        Progress(*columns) as progress,
        IndexedWriter(temporary, best_dtype(tokenizer.vocab_size)) as writer,
    ):
        task = progress.add_task("", total=total_bytes, documents=0)
        documents = 0
        parts: list[np.ndarray] = []
        for block, (ids, last) in _encoded(config, pool):
            parts.append(ids)
            progress.advance(task, len(block.text.encode()))
            if last:
                if config.append_eod:
                    parts.append(np.array([tokenizer.eod], np.int32))
                writer.add_sequence(np.concatenate(parts))
                writer.end_document()
                parts, documents = [], documents + 1
                progress.update(task, documents=documents)
        if not documents:
            raise ValueError(
                f"paths: {', '.join(config.paths)} hold no text, expected at least one document; "
                "check text_field and source"
            )
        progress.update(task, completed=total_bytes)
    output = strip_suffix(config.output)
    for suffix in (".bin", ".idx"):
        Path(temporary + suffix).replace(output + suffix)
    print(f"{documents} documents, {writer.num_tokens} tokens: {output}.bin, {output}.idx")
    return 0


@contextmanager
def _removed_on_failure(prefix: str) -> Iterator[None]:
    """As the writer does itself, but also for a signal just behind its opening of a file."""
    try:
        yield
    except BaseException:
        for suffix in (".bin", ".idx"):
            Path(prefix + suffix).unlink(missing_ok=True)
        raise


def _encoded(
    config: PrepareConfig, pool: multiprocessing.pool.Pool | None
) -> Iterator[tuple[Block, tuple[np.ndarray, bool]]]:
    """Each block with its token ids, in order."""
    settings = (config.tokenizer, config.tokenizer_path, config.eod_token)
    blocks = (
        block
        for path in config.paths
        for block in read_blocks(config.source, path, config.text_field)
    )
    if pool is None:
        for block in blocks:
            yield block, _encode(_Job(*settings, block))
        return
    # imap reads ahead without limit; a bounded window keeps memory in check.
    window: list[tuple[Block, multiprocessing.pool.AsyncResult]] = []
    for block in blocks:
        window.append((block, pool.apply_async(_encode, (_Job(*settings, block),))))
        if len(window) > 8 * config.workers:
            block, result = window.pop(0)
            yield block, result.get()
    for block, result in window:
        yield block, result.get()


@contextmanager
def _workers(number: int) -> Iterator[multiprocessing.pool.Pool | None]:
    """Processes that leave stop signals to this one, or None if it does the work itself.

    Ctrl-C reaches the whole process group, and a parent that stops while it starts a worker breaks
    the pipe which that worker reads: both wait until the workers stand. To be entered before other
    threads run, which a signal could reach instead.
    """
    if number == 1:
        yield None
        return
    resource_tracker.ensure_running()  # whose start would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        # spawn: the parent may hold threads (grain, rich), which fork would copy in a broken state.
        with multiprocessing.get_context("spawn").Pool(number, _leave_to_parent) as pool:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            yield pool
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _leave_to_parent() -> None:
    """In a worker, which starts with the parent's blocked signals; SIGTERM is how a pool ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
