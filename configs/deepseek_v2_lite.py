"""DeepSeek-V2-Lite at 4096 tokens: 8 of 64 experts per GPU of a host, fsdp across hosts.

Hardware: 1 to 16 hosts of 8 x H200 (fsdp takes what expert leaves).
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config deepseek_v2_lite.py
    (one process per host; docs/multi-host.md shows the job files)
Published: 5.7 T tokens, rate constant but for two drops near the end (here a linear descent); one
    weight for the balance of experts.
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
from mtjax.models.presets import deepseek_v2_lite, without_yarn


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=without_yarn(deepseek_v2_lite()),
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
            steps=302_000,
            batch_size=4608,
            seq_len=4096,
            microbatches=36,
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=4.2e-4,
            beta2=0.95,
            schedule=ScheduleConfig(
                name="wsd", warmup_steps=2000, wsd_decay_ratio=0.2, final_ratio=0.1
            ),
        ),
        run=RunConfig(directory="runs/deepseek_v2_lite"),
    )
