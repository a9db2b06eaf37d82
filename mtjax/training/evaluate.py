"""Loss on a held-out split, in nats per token and bits per byte."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.config.check import require
from mtjax.config.data import SPLITS, SplitName, split_bounds
from mtjax.data.tokenizers import make_tokenizer
from mtjax.parallel.stack import Params
from mtjax.training.feed import Feed
from mtjax.training.state import Setup
from mtjax.training.step import StepInput, abstract_batch, evaluation_loss


def has_held_out(config: Config) -> bool:
    """Whether a run evaluates: a number of batches is set, and a share of the data is held out."""
    begin, end = split_bounds(config.data.split)[SPLITS.index("valid")]
    return config.train.eval_batches > 0 and end > begin


class Evaluator:
    """Opens the split once and compiles at the first run; each run reads it from its start.

    Raises:
        ValueError: the split holds too little.
    """

    def __init__(self, config: Config, mesh: Mesh, setup: Setup, split: SplitName = "valid"):
        self._config, self._mesh, self._setup, self._split = config, mesh, setup, split
        batches = config.train.eval_batches
        require(batches > 0, "train.eval_batches", batches, "at least 1 to evaluate", "raise it")
        self._feed = Feed(config, mesh, split, batches * config.train.batch_size)
        self._start = self._feed.loader.get_state()
        self._step: Callable[[Params, StepInput], Any] | None = None

    def run(self, params: Params) -> dict[str, float]:
        """Metrics over at most train.eval_batches batches of the split.

        Raises:
            ValueError: the split holds no sequence.
        """
        train, data = self._config.train, self._config.data
        if self._step is None:
            tokenizer = make_tokenizer(data.tokenizer, data.tokenizer_path, data.eod_token)
            token_bytes = _padded(tokenizer.token_bytes(), self._config.model.vocab_size)
            self._step = _compile(self._config, self._mesh, self._setup, token_bytes)
        self._feed.loader.set_state(self._start)
        totals = np.zeros(3)
        for _ in range(train.eval_batches):
            try:
                batch, _ = self._feed.next()
            except StopIteration:
                break
            totals += np.array([float(x) for x in self._step(params, batch)])
        loss_sum, tokens, num_bytes = totals
        if tokens == 0:
            raise ValueError(
                f"data.split: the {self._split} split holds no sequence of {train.seq_len} tokens, "
                "expected at least one; enlarge it or shorten train.seq_len"
            )
        loss = loss_sum / tokens
        metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
        if num_bytes:
            metrics["eval/bits_per_byte"] = loss_sum / math.log(2) / num_bytes
        return metrics | {"eval/tokens": tokens}


def _padded(token_bytes: np.ndarray, size: int) -> np.ndarray:
    """Bytes per id for every id of the model; ids that the tokenizer lacks stand for none."""
    out = np.zeros(size, np.int32)
    out[: len(token_bytes)] = token_bytes[:size]
    return out


def _compile(
    config: Config, mesh: Mesh, setup: Setup, token_bytes: np.ndarray
) -> Callable[[Params, StepInput], Any]:
    """(params, batch) -> sums of cross entropy, weighted tokens and their bytes."""

    def sums(params: Params, batch: StepInput) -> tuple[jax.Array, jax.Array, jax.Array]:
        loss_sum = evaluation_loss(config, setup, mesh, params, batch)
        counted = batch.weights > 0
        num_bytes = jnp.sum(jnp.where(counted, jnp.asarray(token_bytes)[batch.labels], 0))
        return loss_sum, jnp.sum(batch.weights), num_bytes

    with jax.set_mesh(mesh):
        step = jax.jit(sums).lower(setup.abstract.params, abstract_batch(config, mesh))
        return step.compile()
