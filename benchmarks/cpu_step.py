"""mtjax's training step beside a bare jax.numpy one, on CPU, in one run.

Prints one table: median step time (the variants take turns, so that a noisy machine disturbs all
alike), compile time, time from the start of the process to the end of the first step, import
time, and peak memory, the last four each in a process of its own; then the start-up cost of the
command line. Exits with 1 when mtjax's step takes over 1.05 times the faster bare form, `--help`
over 1.5 s of CPU time, or importing mtjax over 1 s on top of jax.

    python benchmarks/cpu_step.py [--rounds 20]
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROCESS_START = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("mtjax", "bare scanned", "bare unrolled")
BATCH, SEQ_LEN, VOCAB = 8, 256, 512
MAX_RATIO, MAX_HELP_S, MAX_IMPORT_S = 1.05, 1.5, 1.0

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def tokens_and_labels():
    """Random ids, int32 [B, T] each."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ_LEN + 1)).astype(np.int32)
    return ids[:, :-1], ids[:, 1:]


def make_mtjax() -> tuple[Callable[[], object], float]:
    """A call that runs one step and returns its loss, and the compile time in s."""
    import jax
    import numpy as np

    from mtjax.config import (
        AttentionConfig,
        Config,
        DataConfig,
        ModelConfig,
        OptimizerConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from mtjax.training.compiled import compile_step
    from mtjax.training.loop import prepare_mesh
    from mtjax.training.state import create_state, make_setup
    from mtjax.training.step import Limits, StepInput, abstract_batch

    config = Config(
        model=ModelConfig(
            vocab_size=VOCAB,
            embed_dim=256,
            num_layers=4,
            ffn_dim=1024,
            attention=AttentionConfig(num_heads=4),
        ),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(batch_size=BATCH, seq_len=SEQ_LEN, unroll_layers=True),
        optimizer=OptimizerConfig(schedule=ScheduleConfig(name="constant")),
        precision="fp32",
    )
    config, mesh = prepare_mesh(config)
    setup = make_setup(config, mesh)
    compiled = compile_step(config, mesh, setup)
    state = create_state(config, mesh, setup)
    tokens, labels = (ids[None] for ids in tokens_and_labels())
    batch = StepInput(
        tokens=tokens,
        labels=labels,
        weights=np.ones_like(tokens, np.float32),
        positions=np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), tokens.shape),
        segments=None,
        rows=np.arange(BATCH, dtype=np.int32)[None],
        active=None,
    )
    batch = jax.tree.map(
        lambda x, a: jax.device_put(x, a.sharding), batch, abstract_batch(config, mesh)
    )
    limits = Limits(np.float32(np.inf), np.float32(np.inf))

    def run():
        nonlocal state
        state, metrics = compiled.run(state, batch, limits)
        return metrics["train/loss"]

    return run, compiled.compile_s


def make_bare(unrolled: bool) -> tuple[Callable[[], object], float]:
    """As `make_mtjax`, of the hand-written step."""
    import bare_step
    import jax

    state = bare_step.init_state(jax.random.key(0))
    tokens, labels = tokens_and_labels()
    started = time.perf_counter()
    compiled = bare_step.train_step.lower(state, tokens, labels, unrolled).compile()
    compile_s = time.perf_counter() - started

    def run():
        nonlocal state
        state, loss = compiled(state, tokens, labels)
        return loss

    return run, compile_s


def make(variant: str) -> tuple[Callable[[], object], float]:
    return make_mtjax() if variant == "mtjax" else make_bare(variant == "bare unrolled")


def child(variant: str) -> None:
    """Start up, compile and take one step; print what each took as JSON."""
    import jax

    imported_jax = time.perf_counter()
    if variant == "mtjax":
        importlib.import_module("mtjax.training.loop")
    import_s = time.perf_counter() - imported_jax
    run, compile_s = make(variant)
    jax.block_until_ready(run())
    print(
        json.dumps(
            {
                "import_s": import_s,
                "compile_s": compile_s,
                "first_step_s": time.perf_counter() - PROCESS_START,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


def cpu_seconds(command: list[str]) -> float:
    """CPU time, user and system, of a finished child process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_steps(rounds: int) -> dict[str, float]:
    """Median step time in s of each variant, taking turns."""
    import jax

    runs = {variant: make(variant)[0] for variant in VARIANTS}
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            times[variant].append(time.perf_counter() - started)
    return {variant: statistics.median(values) for variant, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="steps per variant")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    alone = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--child", variant]
        alone[variant] = json.loads(subprocess.check_output(command, cwd=ROOT))
    steps = measure_steps(args.rounds)
    print(f"{'':<14} {'step':>8} {'compile':>8} {'to first step':>14} {'import':>8} {'peak':>9}")
    for variant in VARIANTS:
        row = alone[variant]
        print(
            f"{variant:<14} {steps[variant]:>6.3f} s {row['compile_s']:>6.2f} s "
            f"{row['first_step_s']:>12.2f} s {row['import_s']:>6.2f} s "
            f"{row['peak_bytes'] / 2**20:>5.0f} MiB"
        )
    ratio = steps["mtjax"] / min(steps["bare scanned"], steps["bare unrolled"])
    help_s = cpu_seconds([sys.executable, "launch.py", "--config", "tiny_gpt.py", "--help"])
    import_s = alone["mtjax"]["import_s"]
    checks = [
        ("step, mtjax / faster bare form", ratio, MAX_RATIO, ""),
        ("launch.py --help, CPU time", help_s, MAX_HELP_S, " s"),
        ("import of mtjax on top of jax", import_s, MAX_IMPORT_S, " s"),
    ]
    for name, value, limit, unit in checks:
        verdict = "ok" if value <= limit else "TOO MUCH"
        print(f"{name}: {value:.3f}{unit} (at most {limit}{unit}) {verdict}")
    return int(any(value > limit for _, value, limit, _ in checks))


if __name__ == "__main__":
    raise SystemExit(main())
