"""Step time of a Llama-shaped model on the devices present: cuDNN beside XLA attention, and
quantised products beside bf16.

The variants take turns in one process, so that their ratios hold on a noisy machine. The default
shape, 1.35 B parameters at 4096 tokens, is meant for one GPU with 80 GB and more.

    python benchmarks/device_step.py
    JAX_PLATFORMS=cpu python benchmarks/device_step.py --embed 64 --layers 2 --seq 64 --batch 2
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config import AttentionConfig, Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from mtjax.planning.flops import CONVENTION, count_params, flops_per_token
from mtjax.planning.targets import peak_flops
from mtjax.training.compiled import compile_step
from mtjax.training.loop import prepare_mesh
from mtjax.training.state import create_state, make_setup
from mtjax.training.step import Limits, abstract_batch


def make_config(args: argparse.Namespace, backend: str, precision: str) -> Config:
    """A Llama block of the asked width, heads of 64."""
    heads = args.embed // 64 or 1
    model = ModelConfig(
        vocab_size=32000,
        embed_dim=args.embed,
        num_layers=args.layers,
        ffn_dim=args.embed * 7 // 2,
        attention=AttentionConfig(num_heads=heads, backend=backend),
    )
    return Config(
        model=model,
        mesh=MeshConfig(fsdp=-1),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(seq_len=args.seq, batch_size=args.batch, remat="selective"),
        precision=precision,
    )


def make_run(config: Config):
    """A call that runs one step and waits for it, and what the compiler says of memory."""
    config, mesh = prepare_mesh(config)
    setup = make_setup(config, mesh)
    compiled = compile_step(config, mesh, setup)
    state = create_state(config, mesh, setup)
    rng = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == jnp.float32:
            return jax.device_put(np.ones(leaf.shape, np.float32), leaf.sharding)
        ids = rng.integers(0, config.train.seq_len, leaf.shape).astype(np.int32)
        return jax.device_put(ids, leaf.sharding)

    batch = jax.tree.map(fill, abstract_batch(config, mesh))
    limits = Limits(np.float32(np.inf), np.float32(np.inf))

    def run() -> float:
        nonlocal state
        started = time.perf_counter()
        state, metrics = compiled.run(state, batch, limits)
        assert np.isfinite(float(metrics["train/loss"]))
        return time.perf_counter() - started

    return run, compiled.memory


def compare(variants: dict[str, Config], rounds: int) -> None:
    """Time steps of each in turns; print times, and ratios to the first."""
    runs = {name: make_run(config) for name, config in variants.items()}
    times: dict[str, list[float]] = {name: [run()] for name, (run, _) in runs.items()}
    for _ in range(rounds):
        for name, (run, _) in runs.items():
            times[name].append(run())
    first, *others = variants
    model, train = variants[first].model, variants[first].train
    tokens = train.batch_size * train.seq_len
    work = flops_per_token(model, train.seq_len) * tokens / jax.device_count()
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind, "bfloat16")
    print(
        f"{count_params(model) / 1e9:.2f} B parameters, {jax.device_count()} x {device.device_kind}"
    )
    for name, values in times.items():
        step = statistics.median(values[1:])
        mfu = "n/a" if peak is None else f"{work / step / peak:.1%}"
        print(
            f"{name:<18} step {step:.4f} s  {tokens / step:,.0f} tokens/s  MFU of bf16 {mfu}  "
            f"{runs[name][1]}"
        )
    for name in others:
        pairs = zip(times[name][1:], times[first][1:], strict=True)
        print(f"{name} / {first}, step by step: {statistics.median(a / b for a, b in pairs):.3f}")
    print(f"FLOPs: {CONVENTION}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embed", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8 * jax.device_count())
    parser.add_argument("--rounds", type=int, default=10, help="steps per variant")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    best = "cudnn" if on_gpu else "xla"
    variants = [(best, p) for p in ("bf16", "fp8", "fp8_delayed", "fp8_rowwise")]
    variants += [("xla", "bf16")] if on_gpu else []
    compare({" ".join(variant): make_config(args, *variant) for variant in variants}, args.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
