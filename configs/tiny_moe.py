"""The model of tiny_gpt.py with 8 experts of half its width in place of each feed-forward part.

Hardware: any CPU; 2 cores suffice.
Command: python launch.py --config tiny_moe.py
Expected: in about 4 minutes a held-out loss near 2.17 bits per byte (2.20 of tiny_gpt.py, which
    has as many active parameters); the fullest expert of any layer has 1.2 times the mean load.
"""

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=ModelConfig(
            vocab_size=257,  # the byte values and end-of-document
            embed_dim=256,
            num_layers=4,
            ffn_dim=320,  # two of them for each token: the dense twin's 640
            moe=MoeConfig(
                num_experts=8,
                top_k=2,
                capacity_factor=1.25,
                balance_coefficient=0.01,
                z_coefficient=1e-3,
            ),
            attention=AttentionConfig(num_heads=4),
            tied_embeddings=True,
        ),
        # The text is one document: nothing to keep apart.
        data=DataConfig(separate_documents=False),
        train=TrainConfig(
            steps=200,
            batch_size=16,
            seq_len=128,
            unroll_layers=True,
            eval_every=80,
            sample_tokens=200,
            sample_prompt="It is a truth universally acknowledged, that ",
        ),
        # Muon learns most from the few tokens that fit into three minutes.
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=3e-3,
            schedule=ScheduleConfig(name="cosine", warmup_steps=40, final_ratio=0.05),
        ),
        precision="fp32",
        run=RunConfig(directory="runs/tiny_moe"),
    )
