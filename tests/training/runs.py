"""Tiny runs of the real Trainer in this process, and what they leave behind."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtjax.config import Config, resolve_backends, validate
from mtjax.operation.metrics import read_metrics
from mtjax.recipes import load_recipe
from mtjax.sharding import make_mesh
from mtjax.training import loop
from mtjax.training.loop import Trainer

DEFAULTS: dict[str, Any] = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.ffn_dim": 64,
    "model.attention.num_heads": 2,
    "model.dropout": 0.1,
    "train.batch_size": 8,
    "train.seq_len": 16,
    "train.steps": 6,
    "train.eval_every": 0,
    "train.eval_batches": 2,
    "train.sample_tokens": 0,
    "train.sample_prompt": "",
    "optimizer.schedule.warmup_steps": 2,
    "optimizer.schedule.decay_steps": 100,
    "checkpoint.every_steps": 0,
    "run.metrics.every_steps": 1,
    "run.metrics.tensorboard": False,
    "run.metrics.plot": False,
}
"""Changes of the recipe tiny_gpt that make a step take milliseconds."""


def tiny(directory: str | Path, **changes: Any) -> Config:
    """The recipe tiny_gpt, shrunk, in a run folder; `a__b=1` sets the field a.b."""
    config, _ = load_recipe("tiny_gpt")
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return replaced(config, DEFAULTS | dotted | {"run.directory": str(directory)})


def replaced(config: Any, changes: dict[str, Any]) -> Any:
    """`config` with its dotted fields set, those of one class together."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if rest:
            parts.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    own |= {name: replaced(getattr(config, name), part) for name, part in parts.items()}
    return dataclasses.replace(config, **own)


def as_flags(**changes: Any) -> list[str]:
    """The same changes, and DEFAULTS, as command-line arguments."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    flags = []
    for name, value in (DEFAULTS | dotted).items():
        if isinstance(value, bool):
            head, _, last = name.rpartition(".")
            flags.append(f"--{head}.{'' if value else 'no-'}{last}".replace("_", "-"))
        else:
            flags += [f"--{name}".replace("_", "-"), str(value)]
    return flags


def on_some_devices(config: Config) -> tuple[Config, Any]:
    """In place of `loop.prepare_mesh`, which wants a mesh over all devices: the first ones."""
    mesh = make_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.sizes.values())])
    return resolve_backends(validate(config), "cpu"), mesh


class Finished:
    """What a run left: its last state on the host, the data state, and its metrics."""

    def __init__(self, trainer: Trainer) -> None:
        state, self.data_state = trainer.checkpointer.restore(
            trainer.setup.abstract, trainer.checkpointer.latest_step()
        )
        self.step = int(state.step)
        self.arrays = {
            jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        self.metrics = learning_metrics(trainer.directory)


def learning_metrics(directory: Path) -> list[dict[str, float]]:
    """Records of a run without its timings."""
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read_metrics(directory / "metrics.jsonl")
    ]


def run(config: Config, monkeypatch: Any = None) -> Finished:
    """Train as `config` says, on as many devices as its mesh has if given a monkeypatch."""
    if monkeypatch is not None:
        monkeypatch.setattr(loop, "prepare_mesh", on_some_devices)
    trainer = Trainer(config)
    trainer.run()
    return Finished(trainer)


def assert_same(ours: Finished, theirs: Finished) -> None:
    """Same step, same bits in every array, same data state, same metrics in the file."""
    assert ours.step == theirs.step
    assert ours.arrays.keys() == theirs.arrays.keys()
    for name, array in theirs.arrays.items():
        assert ours.arrays[name].tobytes() == array.tobytes(), name
    assert ours.data_state == theirs.data_state
    assert ours.metrics == theirs.metrics
