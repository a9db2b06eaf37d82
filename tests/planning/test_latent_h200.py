"""What XLA makes of latent attention on one host of 8 H200, read from the program."""

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    TrainConfig,
)
from mtjax.planner.program import build_step
from mtjax.planning.targets import parse_target

pytestmark = pytest.mark.nightly

LAYERS, EMBED, SEQ, BATCH = 4, 1024, 512, 8
MLA = MlaConfig(kv_rank=128, q_rank=192, nope_dim=64, rope_dim=32, value_dim=64)
BF16 = 2


@pytest.fixture(scope="module")
def summary(h200_mesh):
    config = Config(
        model=ModelConfig(
            vocab_size=4096,
            embed_dim=EMBED,
            num_layers=LAYERS,
            ffn_dim=2048,
            attention=AttentionConfig(num_heads=16, mla=MLA),
        ),
        mesh=MeshConfig(fsdp=2, tensor=4),
        data=DataConfig(separate_documents=False),
        train=TrainConfig(seq_len=SEQ, batch_size=BATCH),
    )
    return build_step(config, parse_target("h200:1x8")).program.summary


def test_latents_are_gathered_over_tensor_and_not_the_residual_stream(summary):
    """Into attention goes a third of what goes into the feed-forward part."""
    forward = [
        c
        for c in summary.collectives("all-gather", axis="tensor", inside_loop=True)
        if "transpose" not in c.op_name
    ]
    tokens = BATCH // 2 * SEQ

    def total(collectives):
        return sum(c.output_bytes * c.executions for c in collectives)

    latents = [c for c in forward if "/attention/" in c.op_name]
    assert total(latents) == LAYERS * tokens * (128 + 192 + 32) * BF16
    assert total(forward) - total(latents) == LAYERS * tokens * EMBED * BF16
