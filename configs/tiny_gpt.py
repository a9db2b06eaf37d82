"""A byte-level language model of 2.6 M parameters on Pride and Prejudice.

Hardware: any CPU; 2 cores suffice.
Command: python launch.py --config tiny_gpt.py
Expected: to be measured.
"""

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=257,
            embed_dim=192,
            num_layers=4,
            ffn_dim=512,
            attention=AttentionConfig(num_heads=6),
            tied_embeddings=True,
        ),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(
            steps=400,
            batch_size=16,
            seq_len=256,
            unroll_layers=True,
            eval_every=100,
            sample_tokens=200,
            sample_prompt="It is a truth universally acknowledged, that ",
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            beta2=0.98,
            schedule=ScheduleConfig(name="cosine", warmup_steps=40, final_ratio=0.05),
        ),
        precision="fp32",
        run=RunConfig(directory="runs/tiny_gpt"),
    )
