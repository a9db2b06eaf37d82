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

    A window pattern of length p gives L // p repeats of p blocks, and one group for the rest.
    """
    specs = tuple(BlockSpec(model, window) for window in model.windows)
    period = min(len(model.attention.windows) or 1, len(specs))
    repeat, rest = divmod(len(specs), period)
    groups = [BlockGroup(0, specs[:period], repeat)]
    if rest:
        groups.append(BlockGroup(repeat * period, specs[repeat * period :], 1))
    return groups
