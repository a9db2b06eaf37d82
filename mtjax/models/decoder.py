"""A decoder-only transformer as groups of repeated blocks between embedding and head."""

from dataclasses import dataclass

from mtjax.config.model import ModelConfig
from mtjax.layers.block import BlockSpec


@dataclass(frozen=True)
class BlockGroup:
    """`unit` blocks in a row, the whole repeated `repeat` times; scanned as one loop."""

    first_layer: int
    unit: tuple[BlockSpec, ...]
    repeat: int

    def layer_index(self, repeat: int, position: int) -> int:
        """Index in the whole model of one block of this group."""
        return self.first_layer + repeat * len(self.unit) + position


def block_groups(model: ModelConfig) -> list[BlockGroup]:
    """The model's blocks, grouped so that each group repeats one pattern.

    Windows and experts that recur after p layers give n // p repeats of p blocks, and one group
    for the rest; dense layers below those with experts are grouped by themselves.
    """
    specs = tuple(
        BlockSpec(model, window, model.moe.has_experts(layer))
        for layer, window in enumerate(model.windows)
    )
    groups = []
    for first, stop, period in model.layer_runs:
        repeat, rest = divmod(stop - first, period)
        groups.append(BlockGroup(first, specs[first : first + period], repeat))
        if rest:
            groups.append(BlockGroup(stop - rest, specs[stop - rest : stop], 1))
    return groups


def mtp_spec(model: ModelConfig) -> BlockSpec:
    """The block of each module of multi-token prediction: like the model's last one."""
    last = model.num_layers - 1
    return BlockSpec(model, model.windows[last], model.moe.has_experts(last))
