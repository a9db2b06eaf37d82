"""GPT-3 175B, with the batch and learning rate of table 2.1 of arXiv 2005.14165.

Hardware: 128 hosts of 8 x H200: tensor 8 inside a host, fsdp 128 across.
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config gpt3_175b.py
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
from mtjax.models.presets import gpt3_175b


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=gpt3_175b(),
        mesh=MeshConfig(fsdp=128, tensor=8),
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
            steps=95_000,
            batch_size=1536,
            seq_len=2048,
            microbatches=6,
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=6e-5,
            schedule=ScheduleConfig(name="cosine", warmup_steps=115, final_ratio=0.1),
        ),
        run=RunConfig(directory="runs/gpt3_175b"),
    )
