"""Mixtral 8x7B at 4096 tokens: one expert per GPU of a host, fsdp across hosts.

Hardware: 4 to 32 hosts of 8 x H200 (fsdp takes what expert leaves).
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config moe_8x7b.py
    (one process per host; docs/multi-host.md shows the job files)
Expected: not run yet. Compiled without a GPU, a device holds 48.3 GiB on 4 hosts and 6.9 GiB on 32.
"""

from mtjax.config import (
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from mtjax.models.presets import mixtral_8x7b


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=mixtral_8x7b(),
        mesh=MeshConfig(fsdp=-1, expert=8),
        data=DataConfig(
            source="indexed",
            paths=("data/corpus",),
            tokenizer="huggingface",
            tokenizer_path="tokenizer.json",
            split="999,1,0",
            packing="megatron",
            separate_documents=False,
        ),
        train=TrainConfig(
            steps=250_000,
            batch_size=1024,
            seq_len=4096,
            microbatches=4,
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4,
            schedule=ScheduleConfig(name="cosine", warmup_steps=2000, final_ratio=0.1),
        ),
        run=RunConfig(directory="runs/moe_8x7b"),
    )
