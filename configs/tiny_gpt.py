"""A byte-level language model of 3.1 M parameters, trained on Pride and Prejudice.

Hardware: any CPU; 2 cores suffice.
Command: python launch.py --config tiny_gpt.py
Expected: in about 2 minutes a held-out loss near 2.2 bits per byte (a byte-trigram model of the
    same text has 2.70), and a sample that spells English words.
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
    """The recipe."""
    return Config(
        model=ModelConfig(
            vocab_size=257,  # the byte values and end-of-document
            embed_dim=256,
            num_layers=4,
            ffn_dim=640,
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
        # Muon learns most from the few tokens that fit into two minutes.
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=3e-3,
            schedule=ScheduleConfig(name="cosine", warmup_steps=40, final_ratio=0.05),
        ),
        precision="fp32",
        run=RunConfig(directory="runs/tiny_gpt"),
    )
