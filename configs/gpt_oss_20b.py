"""gpt-oss-20b at 4096 tokens: 4 of 32 experts per GPU of a host, fsdp across hosts.

Hardware: 1 to 8 hosts of 8 x H200 (fsdp takes what expert leaves).
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config gpt_oss_20b.py
    (one process per host; docs/multi-host.md shows the job files)
Expected: not measured yet; by `plan`, 113 GiB per H200 on one host, all attention by cuDNN.
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
from mtjax.models.presets import gpt_oss_20b


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=gpt_oss_20b(),
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
            steps=500_000,
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
        run=RunConfig(directory="runs/gpt_oss_20b"),
    )
