"""Layouts that a config could run in on a number of devices."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from mtjax.config import AttentionConfig, Config, validate
from mtjax.config.mesh import AXES, MeshConfig
from mtjax.planner.memory import estimate_memory, padded_params
from mtjax.planning.flops import count_expert_params


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config with another mesh, and what formulas say of it."""

    config: Config
    memory_bytes: float
    """Per device, estimated."""
    sent_bytes: float
    """Communication per device and step, estimated."""

    @property
    def flags(self) -> str:
        """The command-line options that choose it."""
        train = f"--train.microbatches {self.config.train.microbatches}"
        return f"{mesh_flags(self.config.mesh)} {train}"


def mesh_flags(mesh: MeshConfig) -> str:
    """A mesh as command-line options, axes of size 1 included: they may override a recipe."""
    return " ".join(f"--mesh.{axis} {size}" for axis, size in mesh.sizes.items())


def factorisations(num_devices: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """All ways to write num_devices as an ordered product of num_axes sizes."""
    if num_axes == 1:
        yield (num_devices,)
        return
    for size in (n for n in range(1, num_devices + 1) if num_devices % n == 0):
        for rest in factorisations(num_devices // size, num_axes - 1):
            yield (size, *rest)


def candidates(
    config: Config, num_devices: int, fixed: Mapping[str, int]
) -> tuple[list[Candidate], int]:
    """Valid layouts on `num_devices` devices, least communication first, and how many are not.

    The mesh varies, but for the axes whose size is `fixed`. Microbatches stay as they are, or
    become the most that the batch allows where it has too few rows for them.
    """
    found, invalid = [], 0
    for sizes in factorisations(num_devices, len(AXES)):
        mesh = MeshConfig(**dict(zip(AXES, sizes, strict=True)))
        if any(mesh.sizes[axis] != size for axis, size in fixed.items()):
            continue
        rows = config.train.batch_size // (mesh.data * mesh.fsdp * mesh.expert)
        model = config.model
        if mesh.context == 1:
            model = model.with_exchange(AttentionConfig().exchange)
        microbatches = math.gcd(config.train.microbatches, max(rows, 1))
        train = dataclasses.replace(config.train, microbatches=microbatches)
        try:
            other = validate(dataclasses.replace(config, model=model, mesh=mesh, train=train))
        except ValueError:
            invalid += 1
            continue
        memory_bytes = sum(estimate_memory(other).values())
        found.append(Candidate(other, memory_bytes, sent_bytes(other)))
    return sorted(found, key=lambda c: c.sent_bytes), invalid


def sent_bytes(config: Config) -> float:
    """Communication of one step by textbook volumes, in the compute dtype of two bytes.

    fsdp: two gathers and one scatter of the weights per microbatch (Rajbhandari et al. 2020).
    tensor: four gathers and four scatters of the activations per block, recomputation apart
    (Korthikanti et al. 2022). expert: it splits other weights as fsdp does, and tokens go out and
    back twice (Lepikhin et al. 2020). data: one gather in two bytes, one scatter in four per step.
    context: it splits weights as fsdp does, but experts as expert does; it exchanges keys and
    values, see `_exchanged_bytes`, and sequences meet at experts as they do over tensor.
    pipeline: each pass of a chunk sends the residual stream on; it is summed over the stages behind
    the embedding and before the loss, and on the way back.
    """
    model, train, mesh = config.model, config.train, config.mesh
    weights = padded_params(model) / mesh.pipeline
    experts = count_expert_params(model) / mesh.pipeline
    replicas = mesh.data * mesh.fsdp * mesh.context * mesh.expert
    tokens = train.batch_size * train.seq_len / replicas
    shards = mesh.fsdp * mesh.context * mesh.expert * mesh.tensor
    experts_per_device = experts / (mesh.expert * mesh.context * mesh.tensor)

    fsdp = _share(mesh.fsdp * mesh.context * mesh.expert) * (weights - experts) / mesh.tensor
    fsdp += _share(mesh.fsdp) * experts_per_device
    tensor = (
        _share(mesh.tensor) * 8 * 2 * model.num_layers * tokens * model.embed_dim / mesh.pipeline
    )
    layers = sum(model.moe.has_experts(layer) for layer in range(model.num_layers)) / mesh.pipeline
    moved = 4 * 2 * layers * tokens * model.moe.top_k * model.embed_dim / mesh.tensor
    met = 4 * 2 * layers * tokens * model.embed_dim * (mesh.context - 1)
    pipeline = 0.0
    if mesh.pipeline > 1:
        passes = 2 * config.pipeline.chunks + 4 * 2 * _share(mesh.pipeline)
        pipeline = passes * 2 * tokens * model.embed_dim / mesh.tensor
    return (
        3 * 2 * train.microbatches * fsdp
        + tensor
        + pipeline
        + _exchanged_bytes(config, tokens)
        + _share(mesh.expert * mesh.tensor) * moved
        + met
        + _share(mesh.data) * (2 + 4) * weights / shards
    )


def _share(size: int) -> float:
    """What each of `size` devices sends of an array that all gather, or that is scattered."""
    return (size - 1) / size


def _exchanged_bytes(config: Config, tokens: float) -> float:
    """What attention sends between the shards of sequences; `tokens` are those of one device.

    ring: keys and values go round forward and backward, their gradients in four bytes on the way
    back (Liu et al. 2023). allgather: one gather and one scatter. ulysses: queries, keys, values
    and output are exchanged in both directions (Jacobs et al. 2023). Recomputation apart.
    """
    model, mesh = config.model, config.mesh
    size = mesh.context
    if size == 1:
        return 0.0
    per_head = tokens * model.head_dim * model.num_layers / mesh.tensor / mesh.pipeline
    kv, queries = 2 * model.num_kv_heads * per_head, model.attention.num_heads * per_head
    if model.attention.exchange == "ring":
        return (size - 1) * (2 + 2) * kv + size * 4 * kv
    if model.attention.exchange == "allgather":
        return (size - 1) * (2 + 2) * kv
    copies = max(1.0, size * mesh.tensor / model.num_kv_heads)
    return 2 * 2 * _share(size) * (2 * queries + copies * kv)
