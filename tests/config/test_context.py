"""What doesn't fit a mesh that splits sequences is refused before any device is touched."""

import pytest

from mtjax.config import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    TrainConfig,
    on_layout,
    resolve_backends,
    validate,
)
from mtjax.config.mesh import parse_layout


def config(context=4, tensor=1, seq_len=64, model=(), **attention):
    heads = {"num_heads": 8, "num_kv_heads": 8}
    return Config(
        model=ModelConfig(**dict(model), attention=AttentionConfig(**(heads | attention))),
        train=TrainConfig(seq_len=seq_len),
        mesh=MeshConfig(context=context, tensor=tensor),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context": 1, "exchange": "ulysses"},
            r"exchange: got 'ulysses', expected the default \('ring'\).*mesh.context is 1; drop it",
        ),
        (
            {"seq_len": 60},
            r"train.seq_len: got 60, expected a multiple of 2 x mesh.context with the ring "
            r"exchange \(8\); change it",
        ),
        (
            {"seq_len": 36, "tensor": 2, "exchange": "allgather"},
            r"train.seq_len: got 36, expected a multiple of mesh.context x mesh.tensor \(8\)",
        ),
        (
            {"context": 8, "tensor": 2, "exchange": "ulysses"},
            r"num_heads: got 8, expected a multiple of mesh.context x mesh.tensor \(16\).*to ring",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 6, "model": {"embed_dim": 96}, "exchange": "ulysses"},
            r"num_kv_heads: got 6, expected a multiple or a divisor of mesh.context \(4\)",
        ),
        (
            {"model": {"moe": MoeConfig(num_experts=6, top_k=2)}},
            r"num_experts: got 6, expected a multiple of mesh.expert x mesh.context x mesh.tensor",
        ),
        (
            {"model": {"embed_dim": 272}, "context": 32, "exchange": "allgather"},
            r"model.embed_dim: got 272, expected a multiple of mesh.fsdp x mesh.context",
        ),
    ],
)
def test_what_does_not_fit_split_sequences_is_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config(**changes))


def test_cudnn_is_refused_where_queries_start_amid_the_keys():
    with pytest.raises(ValueError, match=r"backend: got 'cudnn', expected xla or auto.*allgather"):
        resolve_backends(validate(config(backend="cudnn", exchange="allgather")), "gpu")


@pytest.mark.parametrize(
    ("exchange", "backend"), [("ring", "cudnn"), ("ulysses", "cudnn"), ("allgather", "xla")]
)
def test_auto_takes_cudnn_for_the_exchanges_that_it_supports(exchange, backend):
    found = resolve_backends(validate(config(exchange=exchange)), "gpu")
    assert found.model.attention.backend == backend


def test_a_layout_names_its_exchange_and_drops_it_without_the_axis():
    ulysses = on_layout(config(), parse_layout("context=2,exchange=ulysses"))
    assert ulysses.model.attention.exchange == "ulysses"
    plain = on_layout(ulysses, parse_layout("fsdp=4"))
    assert validate(plain).model.attention.exchange == "ring"
    with pytest.raises(ValueError, match=r"got exchange 'rings'.*ring, allgather, ulysses"):
        parse_layout("context=2,exchange=rings")
