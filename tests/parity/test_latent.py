"""Latent attention on every layout: loss and gradients are those of one device.

Latents are small and whole on each device of `tensor`; heads are split.
"""

import dataclasses

import pytest

from mtjax.config import AttentionConfig, MlaConfig, RopeConfig
from tests.parity.layouts import assert_gradients_are_those_of_one_device, changed

YARN = RopeConfig(
    scaling="yarn", factor=4.0, original_max_positions=32, mscale=1.2, mscale_all_dim=0.9
)


def latent(q_rank, packed=False, train=(), attention=(), **model):
    mla = MlaConfig(kv_rank=16, q_rank=q_rank, nope_dim=6, rope_dim=4, value_dim=8)
    base = changed(packed=packed, train=train, rope=YARN, dropout=0.0, **model)
    heads = AttentionConfig(num_heads=8, mla=mla, **dict(attention))
    return dataclasses.replace(base, model=dataclasses.replace(base.model, attention=heads))


FEATURES = {
    "V3, packed": latent(24, packed=True),
    "V2-Lite, windows": latent(0, attention={"windows": (5, 0), "out_bias": True}),
    "dropout, remat": latent(
        24, attention={"dropout": 0.1}, train={"remat": "selective", "remat_save": ("latent",)}
    ),
}
CASES = [("V3, packed", "fsdp=2,tensor=4,microbatches=4")]
NIGHTLY = [
    ("V3, packed", "fsdp=2,context=2,tensor=2,exchange=ring"),
    *(("V3, packed", layout) for layout in ("tensor=2", "tensor=8", "data=8", "fsdp=8")),
    *(
        ("V3, packed", f"context=4,microbatches=2,exchange={exchange}")
        for exchange in ("ring", "allgather", "ulysses")
    ),
    ("V3, packed", "data=2,pipeline=2,tensor=2,microbatches=4"),
    ("V3, packed", "pipeline=2,context=2,tensor=2,microbatches=4"),
    ("V2-Lite, windows", "data=2,fsdp=2,tensor=2"),
    ("V2-Lite, windows", "context=4,tensor=2,exchange=ring"),
    ("dropout, remat", "data=2,fsdp=2,tensor=2,microbatches=2"),
    ("dropout, remat", "context=2,tensor=2,exchange=allgather"),
]
CASES += [pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY]


@pytest.mark.parametrize(("feature", "layout"), CASES)
def test_loss_and_gradients_are_those_of_one_device(feature, layout):
    assert_gradients_are_those_of_one_device(FEATURES[feature], layout)
