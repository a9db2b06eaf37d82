"""Llama 2 7B, with the batch (4 M tokens) and learning rate of arXiv 2307.09288.

Hardware: one host of 8 x H200.
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config llama2_7b.py
    (one process per host; docs/multi-host.md shows the job files)
Expected: not measured yet.
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
from mtjax.models.presets import llama2_7b


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=llama2_7b(),
        mesh=MeshConfig(fsdp=8),
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
            steps=500_000,
            batch_size=1024,
            seq_len=4096,
            microbatches=32,
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4,
            schedule=ScheduleConfig(name="cosine", warmup_steps=2000, final_ratio=0.1),
        ),
        run=RunConfig(directory="runs/llama2_7b"),
    )
