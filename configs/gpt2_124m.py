"""GPT-2 small (124 M parameters), trained as in nanoGPT's well-known reproduction on OpenWebText.

Hardware: 8 x H200 (or any 8 GPUs with 40 GB and more).
Data: python launch.py prepare --source parquet --paths openwebtext/*.parquet \
    --tokenizer tiktoken --tokenizer-path r50k_base.tiktoken --output data/openwebtext --workers 32
Command: python launch.py --config gpt2_124m.py
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
from mtjax.models.presets import gpt2_124m


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=gpt2_124m(),
        mesh=MeshConfig(data=8),
        data=DataConfig(
            source="indexed",
            paths=("data/openwebtext",),
            tokenizer="tiktoken",
            tokenizer_path="r50k_base.tiktoken",
            split="99,1,0",
            packing="megatron",
            separate_documents=False,
        ),
        train=TrainConfig(
            steps=600_000, batch_size=480, seq_len=1024, microbatches=5, eval_every=1000
        ),
        optimizer=OptimizerConfig(
            learning_rate=6e-4,
            schedule=ScheduleConfig(name="cosine", warmup_steps=2000, final_ratio=0.1),
        ),
        run=RunConfig(directory="runs/gpt2_124m"),
    )
