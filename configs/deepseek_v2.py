"""DeepSeek-V2 at 4096 tokens: experts over 4 hosts, fsdp beyond.

Hardware: 32 hosts of 8 x H200.
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config deepseek_v2.py
    (one process per host; docs/multi-host.md shows the job files)
Published: 8.1 T tokens, a batch of 2304 that grows to 9216 over the first 225 B, rate constant but
    for two drops at 60 % and 90 % (here a linear descent from 60 % on); a third balance loss, of
    what devices receive, is not here.
Expected: not measured yet.
"""

from mtjax.config import (
    BatchRampConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from mtjax.models.presets import deepseek_v2, without_yarn


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=without_yarn(deepseek_v2()),
        mesh=MeshConfig(fsdp=8, expert=32),
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
            steps=217_000,
            batch_size=9216,
            seq_len=4096,
            microbatches=36,
            batch_ramp=BatchRampConfig(start=2304, increment=2304, steps=9_500),
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=2.4e-4,
            beta2=0.95,
            schedule=ScheduleConfig(
                name="wsd", warmup_steps=2000, wsd_decay_ratio=0.4, final_ratio=0.1
            ),
        ),
        run=RunConfig(directory="runs/deepseek_v2"),
    )
