"""What a plan is made for: GPUs of a cluster, or virtual CPU devices of this machine."""

import dataclasses

from mtjax.config import Config, resolve_backends, validate
from mtjax.config.check import require
from mtjax.planner.report import RESERVED_BYTES
from mtjax.planning.targets import Target, parse_target


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices to compile for, and the GPU whose memory and rates count."""

    target: Target | None
    """None for plain CPU devices."""
    num_devices: int
    virtual: bool
    """Compiled for CPU devices, though a target may be known."""
    notes: tuple[str, ...] = ()
    """What makes plans for this place less than plans for the real devices."""

    @property
    def devices(self) -> Target | int:
        """What the step is compiled for."""
        return self.num_devices if self.virtual or self.target is None else self.target

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of a device that a program may use; None where it is not known."""
        return None if self.target is None else self.target.gpu.memory_bytes - RESERVED_BYTES

    def __str__(self) -> str:
        return f"cpu:{self.num_devices}" if self.target is None else str(self.target)

    def resolve(self, config: Config) -> Config:
        """The config with its mesh laid out on the devices.

        Raises:
            ValueError: the mesh doesn't use them all, the config doesn't divide by it, or the
                devices lack what it asks for.
        """
        mesh = config.mesh.resolve(self.num_devices, str(self))
        config = validate(dataclasses.replace(config, mesh=mesh))
        # Here, because the process that compiles could only say it with a traceback.
        if self.target is None:
            resolve_backends(config, "cpu")
        else:
            resolve_backends(config, "gpu", self.target.gpu.compute_capability)
        return config


def check_plannable(config: Config) -> None:
    """Check that a step can be compiled without the GPUs it is for.

    Raises:
        ValueError: it can't.
    """
    require(
        config.quantize.backend != "te",
        "quantize.backend",
        "te",
        "xla for a plan, as TransformerEngine asks the GPU that it runs on how to multiply",
        "plan with --quantize.backend xla, which gathers the same arrays",
    )


def parse_place(text: str) -> Place:
    """Read --target: a cluster as `parse_target` does, or "cpu:N".

    Without a CUDA plugin the step is compiled for virtual CPU devices, and a note says so.

    Raises:
        ValueError: malformed, or unknown GPU.
    """
    name, _, size = text.strip().partition(":")
    if name.lower() == "cpu":
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"target: got {text!r}, expected cpu:<devices>; write cpu:8")
        note = "Compiled for virtual CPU devices: memory, dtypes and fusion differ from a GPU's."
        return Place(None, int(size), True, (note,))
    target = parse_target(text)
    from mtjax.planning.compile import cuda_plugin_missing

    missing = cuda_plugin_missing()
    if missing is None:
        return Place(target, target.num_devices, False)
    note = f"Compiled for virtual CPU devices, not for {target}: {missing}"
    return Place(target, target.num_devices, True, (note,))
