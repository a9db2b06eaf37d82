"""What a mesh that splits sequences asks of model and training."""

from mtjax.config.check import require
from mtjax.config.mesh import MeshConfig
from mtjax.config.model import AttentionConfig, ModelConfig
from mtjax.config.training import TrainConfig


def check_context(model: ModelConfig, train: TrainConfig, mesh: MeshConfig) -> None:
    """Check the context axis of a mesh; an axis of -1 (the rest) counts as 1.

    Raises:
        ValueError: a setting is of no use without the axis, or does not go with it.
    """
    attention = model.attention
    size, tensor = max(mesh.context, 1), max(mesh.tensor, 1)
    if mesh.context == 1:
        require(
            attention.exchange == AttentionConfig().exchange,
            "model.attention.exchange",
            attention.exchange,
            f"the default ({AttentionConfig().exchange!r}), because nothing is exchanged while "
            "mesh.context is 1",
            "drop it or set mesh.context",
        )
        return
    splits = [("mesh.context x mesh.tensor", size * tensor)]
    if attention.exchange == "ring":
        splits.append(("2 x mesh.context with the ring exchange", 2 * size))
    for what, parts in splits:
        require(
            train.seq_len % parts == 0,
            "train.seq_len",
            train.seq_len,
            f"a multiple of {what} ({parts})",
            "change it, or shrink mesh.context",
        )
    _check_exchange(model, size, tensor)


def _check_exchange(model: ModelConfig, size: int, tensor: int) -> None:
    attention = model.attention
    if attention.exchange != "ulysses":
        return
    require(
        attention.num_heads % (size * tensor) == 0,
        "model.attention.num_heads",
        attention.num_heads,
        f"a multiple of mesh.context x mesh.tensor ({size * tensor}) with the ulysses exchange",
        "shrink mesh.context or set model.attention.exchange to ring",
    )
    held = max(model.num_kv_heads // tensor, 1)
    require(
        held % size == 0 or size % held == 0,
        "model.attention.num_kv_heads",
        model.num_kv_heads,
        f"a multiple or a divisor of mesh.context ({size}) on each of mesh.tensor ({tensor}) with "
        "the ulysses exchange",
        "change mesh.context or set model.attention.exchange to ring",
    )
