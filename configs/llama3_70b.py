"""Llama 3 70B at 8192 tokens, with the batch and learning rate of arXiv 2407.21783.

Hardware: 8 hosts of 8 x H200: tensor 8 inside a host, fsdp 8 across.
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config llama3_70b.py
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
from mtjax.models.presets import llama3_70b


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=llama3_70b(),
        mesh=MeshConfig(fsdp=8, tensor=8),
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
            steps=1_200_000,
            batch_size=512,
            seq_len=8192,
            microbatches=16,
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4,
            schedule=ScheduleConfig(name="cosine", warmup_steps=8000, final_ratio=0.1),
        ),
        run=RunConfig(directory="runs/llama3_70b"),
    )
