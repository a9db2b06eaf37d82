"""DeepSeek-V3 at 4096 tokens: experts over 4 hosts, fsdp beyond, one more token predicted.

Hardware: 32 hosts of 8 x H200.
Data: python launch.py prepare --source parquet --paths corpus/*.parquet \
    --tokenizer huggingface --tokenizer-path tokenizer.json --output data/corpus --workers 64
Command: python launch.py --config deepseek_v3.py
    (one process per host; docs/multi-host.md shows the job files)
Published: 14.8 T tokens, a batch of 3072 that grows to 15360 over the first 469 B, rate constant
    for 10 T, then down to a tenth by a cosine (here linear). Multi-token prediction weighs 0.1
    after 10 T, and the biases rest in the last 500 B: change both when a run resumes.
Expected: not run yet. Compiled without a GPU, a device holds 107.7 of its 139 GiB: set
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
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
from mtjax.models.presets import deepseek_v3, without_yarn


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=without_yarn(deepseek_v3()),
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
            steps=241_000,
            batch_size=15360,
            seq_len=4096,
            microbatches=30,
            batch_ramp=BatchRampConfig(start=3072, increment=3072, steps=12_400),
            remat="full",
            eval_every=1000,
        ),
        optimizer=OptimizerConfig(
            learning_rate=2.2e-4,
            beta2=0.95,
            schedule=ScheduleConfig(
                name="wsd", warmup_steps=2000, wsd_decay_ratio=0.3, final_ratio=0.1
            ),
        ),
        run=RunConfig(directory="runs/deepseek_v3"),
    )
