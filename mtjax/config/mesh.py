"""How devices are arranged. No field here changes a number the training computes."""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, get_args

from mtjax.config.check import config_class
from mtjax.config.model import Exchange
from mtjax.config.pipeline import SCHEDULES, PipelineSchedule

AXES = ("data", "fsdp", "pipeline", "context", "expert", "tensor")
"""Mesh axes, outermost first: tensor innermost, on the fastest links."""


@config_class("mesh")
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int = 1
    """Replicas of the compute weights, optimizer state split among them (ZeRO-1); -1: the rest."""
    fsdp: int = 1
    """Shards of weights, gradients and optimizer state (ZeRO-3); -1: the rest."""
    pipeline: int = 1
    """Stages that hold consecutive layers; see the settings in `pipeline`; -1: the rest."""
    context: int = 1
    """Shards of each sequence, keys and values exchanged as model.attention.exchange says; also
    shards of the experts, and for other weights a further fsdp axis; -1: the rest."""
    expert: int = 1
    """Shards of the experts, tokens exchanged by all-to-all; elsewhere a second fsdp axis. Only
    for models with experts; -1: the rest."""
    tensor: int = 1
    """Shards of heads, feed-forward and vocabulary, with sequence parallelism; -1: the rest."""

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"mesh.{axis}: got {size}, expected a positive size or -1 for the rest of the "
                    "devices; set it to 1 to leave the axis out"
                )
        if list(self.sizes.values()).count(-1) > 1:
            raise ValueError(
                f"mesh: got -1 for more than one axis ({self.sizes}), expected at most one; "
                "give the size of the others"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}

    def resolve(self, num_devices: int, target: str | None = None) -> "MeshConfig":
        """Replace -1 by what is left of `num_devices`; the product must use all of them.

        `target` names the cluster they belong to, if they are not those of this machine.

        Raises:
            ValueError: the sizes don't multiply to `num_devices`.
        """
        sizes = self.sizes
        fixed = math.prod(size for size in sizes.values() if size != -1)
        free = [axis for axis, size in sizes.items() if size == -1]
        if free and num_devices % fixed == 0:
            return dataclasses.replace(self, **{free[0]: num_devices // fixed})
        if free or fixed != num_devices:
            shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
            where, remedy = f"{num_devices} of {target}", "or change the target"
            if target is None:
                where = f"{num_devices} present"
                flag = "XLA_FLAGS=--xla_force_host_platform_device_count"
                remedy = f"or run with {flag}={fixed} on CPU"
            raise ValueError(
                f"mesh: got {shape or 'all axes 1'} = {fixed} devices"
                f"{' times the rest' if free else ''}, expected to use the {where}; "
                f"change an axis, set one to -1 for the rest (--mesh.data -1), {remedy}"
            )
        return self


@dataclass(frozen=True)
class Layout:
    """A mesh, and what goes with it, as one line of a comparison; None: as the config says."""

    text: str
    mesh: MeshConfig
    microbatches: int | None
    schedule: PipelineSchedule | None
    chunks: int | None
    exchange: Exchange | None = None

    @property
    def num_devices(self) -> int:
        """Devices that the mesh uses."""
        return math.prod(self.mesh.sizes.values())


def parse_layout(text: str) -> Layout:
    """Parse "data=2,tensor=4,microbatches=4" or "pipeline=4,schedule=gpipe,microbatches=8".

    Raises:
        ValueError: an unknown name, or a size that is no positive integer.
    """
    sizes: dict[str, int] = {}
    schedule: PipelineSchedule | None = None
    exchange: Exchange | None = None
    names = (*AXES, "microbatches", "chunks")
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "schedule":
            schedule = _one_of(SCHEDULES, name, value, text)
            continue
        if name == "exchange":
            exchange = _one_of(get_args(Exchange), name, value, text)
            continue
        if name not in names or not value.isdigit() or int(value) < 1:
            close = difflib.get_close_matches(name, (*names, "schedule", "exchange"), n=1)
            hint = f"did you mean {close[0]}=N?" if close else f"names are {', '.join(names)}"
            raise ValueError(f"mesh: got {part!r} in {text!r}, expected name=size; {hint}")
        sizes[name] = int(value)
    microbatches, chunks = sizes.pop("microbatches", None), sizes.pop("chunks", None)
    return Layout(text, MeshConfig(**sizes), microbatches, schedule, chunks, exchange)


def _one_of(choices: tuple[Any, ...], name: str, value: str, text: str) -> Any:
    if value in choices:
        return value
    raise ValueError(
        f"mesh: got {name} {value!r} in {text!r}, expected one of {', '.join(choices)}; correct it"
    )
