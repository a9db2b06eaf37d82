"""What is done with a checkpoint beside training on: evaluation and generation."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from mtjax.checkpoint.manager import Checkpointer
from mtjax.checkpoint.manifest import build_manifest
from mtjax.config import Config
from mtjax.config.check import require
from mtjax.config.data import SplitName
from mtjax.config.sampling import SamplingConfig
from mtjax.data.tokenizers import make_tokenizer
from mtjax.inference.generate import check_lengths, decoding_shardings, generate
from mtjax.operation.distributed import ending_together, initialize, is_main_process
from mtjax.operation.progress import printable
from mtjax.parallel.stack import Params
from mtjax.precision.te import check_installed
from mtjax.sharding import compute_dtypes
from mtjax.training.compare import check_comparable, compare_precision
from mtjax.training.delayed import described, fallen_layers, keep_layers
from mtjax.training.evaluate import Evaluator
from mtjax.training.loop import prepare_mesh
from mtjax.training.state import make_setup
from mtjax.training.step import COMPUTE_DTYPES


def evaluate(config: Config, split: SplitName, compare: bool = False) -> int:
    """Print the metrics of a checkpoint on a split; returns the exit code.

    `compare`: and how loss and gradients differ from those without quantised products.
    """
    if compare:
        check_comparable(config)
    check_installed(config)
    initialize(config.run.distributed)
    with ending_together():
        checkpointer, step = _open(config, "evaluate")
        resolved, mesh = prepare_mesh(config)
        fallen = fallen_layers(resolved, checkpointer.data_state(step).get("scaling"))
        resolved = keep_layers(resolved, fallen)
        setup = make_setup(resolved, mesh)
        params = checkpointer.restore_params(setup.abstract.params, step)
        metrics = Evaluator(resolved, mesh, setup, split).run(params)
        if is_main_process():
            print(f"checkpoint of step {step}, {split} split, precision {config.precision}")
            if fallen:
                print(described(resolved, fallen))
            for name, value in metrics.items():
                print(f"  {name}  {value:.6g}")
        if compare:
            table = compare_precision(resolved, mesh, setup, params, split)
            if is_main_process():
                print(f"first batch, the same in both\n{table}")
    return 0


def generate_text(config: Config, prompt: str, sampling: SamplingConfig) -> int:
    """Print a text that a checkpoint makes of the prompt; returns the exit code."""
    initialize(config.run.distributed)
    prompt = prompt or config.train.sample_prompt
    require(bool(prompt), "--prompt", prompt, "a text to continue", "give one")
    data = config.data
    tokenizer = make_tokenizer(data.tokenizer, data.tokenizer_path, data.eod_token)
    check_lengths(
        config.model, tokenizer.encode(prompt), sampling.max_tokens, ("--prompt", "--max-tokens")
    )
    with ending_together():
        checkpointer, step = _open(config, "generate")
        resolved, mesh = prepare_mesh(config)
        params = _compute_params(resolved, mesh, checkpointer, step)
        ids = generate(
            resolved.model, params, mesh, tokenizer.encode(prompt), sampling, tokenizer.eod
        )
        if is_main_process():
            print(printable(prompt + tokenizer.decode(ids)))
    return 0


def _open(config: Config, command: str) -> tuple[Checkpointer, int]:
    """The checkpoints of the run, and the step to read.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the config says not to read one, or the run's folder is a file.
    """
    require(
        config.checkpoint.resume != "never",
        "checkpoint.resume",
        "never",
        f"auto or must, since {command} reads a checkpoint",
        "leave it out; it is for training",
    )
    run = Path(config.run.directory)
    require(
        not run.exists() or run.is_dir(),
        "run.directory",
        config.run.directory,
        "the folder of a run, which is no file",
        "choose another path",
    )
    directory = run / "checkpoints"
    manifest = build_manifest(dataclasses.asdict(config), config.mesh.sizes)
    checkpointer = Checkpointer(directory, config.checkpoint, manifest)
    step = checkpointer.step_to_resume()
    if step is None:
        raise FileNotFoundError(
            f"{directory} holds no checkpoint, expected one of this recipe; train first, or set "
            "--run.directory to the run's folder"
        )
    return checkpointer, step


def _compute_params(config: Config, mesh: Mesh, checkpointer: Checkpointer, step: int) -> Params:
    """Parameters in the compute dtype, where decoding uses them."""
    setup = make_setup(config, mesh)
    dtypes = compute_dtypes(setup.boxes, COMPUTE_DTYPES[config.compute_dtype])
    shardings = decoding_shardings(config.model, setup.boxes, mesh)
    abstract = jax.tree.map(
        lambda leaf, dtype, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
        setup.abstract.params,
        dtypes,
        shardings,
    )
    return checkpointer.restore_params(abstract, step)
