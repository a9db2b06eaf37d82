"""Try meshes from Python: memory, collectives and training loss of one small model on each.

    python examples/mesh_experiment.py

Runs on eight virtual CPU devices; on a machine with eight GPUs, drop the two settings below.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import dataclasses
from collections import Counter

from mtjax.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from mtjax.planner.program import build_step
from mtjax.training.parity import compare, run_layout

BASE = Config(
    model=ModelConfig(vocab_size=257, embed_dim=64, num_layers=2, ffn_dim=256),
    data=DataConfig(separate_documents=False),
    train=TrainConfig(steps=3, batch_size=16, seq_len=64, microbatches=2),
    precision="fp32",
)
MESHES = (
    MeshConfig(fsdp=8),
    MeshConfig(fsdp=2, tensor=4),
    MeshConfig(data=2, fsdp=2, tensor=2),
)


def main() -> None:
    """Print one block per mesh."""
    alone = run_layout(BASE, 1, steps=3)
    print(f"one device: losses {alone.losses}")
    for mesh in MESHES:
        config = dataclasses.replace(BASE, mesh=mesh)
        program = build_step(config, 8).program
        traffic: Counter[str] = Counter()
        for collective in program.summary.all_collectives:
            name = f"{collective.kind} over {','.join(collective.axes)}"
            traffic[name] += round(collective.wire_bytes * collective.executions / 1024)
        found = compare(alone, run_layout(config, 8, steps=3), zero_ratio=1e-4)
        print(f"\n{', '.join(f'{axis}={n}' for axis, n in mesh.sizes.items() if n > 1)}")
        print(f"  memory: {program.memory.total_bytes / 2**20:.2f} MiB per device")
        print("  sent:   " + "; ".join(f"{kib} KiB {name}" for name, kib in traffic.most_common(3)))
        print(f"  weights {'bit-equal' if found.params_equal else 'DIFFER'}, loss within", end=" ")
        print(f"{found.loss:.1e}, gradients within {found.gradient:.1e} of one device")


if __name__ == "__main__":
    main()
