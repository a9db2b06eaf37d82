"""How long a compiled program takes on a target, by a roofline over its schedule.

Each kernel takes the longer of its FLOPs at the peak rate and its bytes at memory bandwidth
(Williams et al. 2009). Kernels run one after another in schedule order; asynchronous collectives
run beside them, one at a time, and a done waits for its collective. Loops repeat their body.
"""

from collections import Counter
from dataclasses import dataclass, field

from mtjax.planning.cost import Cost, instruction_cost
from mtjax.planning.hlo import KINDS, Collective, collective_at
from mtjax.planning.hlo_text import (
    Computation,
    Instruction,
    Module,
    Site,
    called_computations,
    parse_module,
    trip_count,
)
from mtjax.planning.targets import Target

ASSUMPTIONS = (
    "every kernel reaches the peak FLOP/s of its dtype or the full bandwidth of device memory, "
    "whichever takes longer",
    "collectives reach the full bandwidth of NVLink within a domain and of one network card per "
    "GPU beyond it, by ring algorithms; no latency and no contention",
    "asynchronous collectives run beside kernels without slowing them, one at a time",
    "launch overhead, clock throttling, the input pipeline and stragglers are left out",
)
"""What the estimate rests on: it bounds the step time from below."""


@dataclass
class Timing:
    """Seconds of one run of a program or a part of it."""

    total_s: float = 0.0
    kernels_s: dict[str, float] = field(default_factory=dict)
    """Time of kernels by kind: gemm, attention, memory."""
    collectives_s: dict[str, float] = field(default_factory=dict)
    """Time of collectives by the axes they run over, hidden or not."""
    exposed_s: dict[str, float] = field(default_factory=dict)
    """Time that kernels wait for collectives, by axes."""
    flops: dict[str, float] = field(default_factory=dict)
    """Matrix-product and attention FLOPs by the dtype that sets their rate."""
    uncounted_loops: int = 0
    """Loops whose trip count is not known: their body is counted once."""

    def add(self, other: "Timing", times: int = 1) -> None:
        """Runs `other`, `times` times, after what is here."""
        self.total_s += times * other.total_s
        for mine, theirs in (
            (self.kernels_s, other.kernels_s),
            (self.collectives_s, other.collectives_s),
            (self.exposed_s, other.exposed_s),
            (self.flops, other.flops),
        ):
            for key, value in theirs.items():
                _count(mine, key, times * value)
        self.uncounted_loops += other.uncounted_loops


def estimate(hlo: str, target: Target, mesh_shape: dict[str, int]) -> Timing:
    """Time of a scheduled program on `target`.

    Args:
        hlo: `compiled.as_text()`.
        mesh_shape: mesh axis -> size, outermost first; names the axes of collectives.
    """
    module = parse_module(hlo)
    return _Clock(module, target, mesh_shape).run(module.entry)


def kernel_seconds(cost: Cost, target: Target) -> float:
    """Roofline of one kernel."""
    compute_s = sum(flops / peak_rate(target, dtype) for dtype, flops in cost.flops.items())
    return max(compute_s, cost.num_bytes / target.gpu.memory_bandwidth)


def peak_rate(target: Target, dtype: str) -> float:
    """FLOP/s of matrix products by rate dtype; one that the GPU lacks runs as bf16."""
    gpu = target.gpu
    rate = {
        "fp32": gpu.peak_fp32,
        "tf32": gpu.peak_tf32,
        "bf16": gpu.peak_bf16,
        "int8": gpu.peak_int8,
        "fp8": gpu.peak_fp8,
        "fp4": gpu.peak_fp4,
    }[dtype]
    return rate or gpu.peak_bf16


def collective_seconds(collective: Collective, target: Target) -> float:
    """Bandwidth bound of one collective, over NVLink within domains and the network between.

    In a group with r members in each of d domains, the network cards of a domain share what comes
    from the other d - 1: a gather of `whole` bytes moves whole * (d - 1) / d / r over each.
    """
    domain, gpu = target.nvlink_domain, target.gpu
    if collective.kind == "collective-permute":
        crosses = any(a // domain != b // domain for a, b in collective.groups)
        rate = gpu.network_bandwidth if crosses else gpu.nvlink_bandwidth
        return collective.wire_bytes / rate
    return max(_group_seconds(collective, group, target) for group in _distinct(collective, domain))


def _distinct(collective: Collective, domain: int):
    """One group of each pattern of members per domain: on a large mesh most are alike."""
    patterns = {}
    for group in collective.groups:
        members = Counter(device // domain for device in group)
        patterns[tuple(sorted(members.values()))] = group
    return patterns.values()


def _group_seconds(collective: Collective, group: tuple[int, ...], target: Target) -> float:
    members = Counter(device // target.nvlink_domain for device in group)
    size, domains, most = len(group), len(members), max(members.values())
    network, nvlink = target.gpu.network_bandwidth, target.gpu.nvlink_bandwidth
    sent = collective.wire_bytes
    if size == 1:
        return 0.0
    if domains == 1:
        return sent / nvlink
    if "all-to-all" in collective.kind:
        # Each member sends to all the others straight away, over its own card.
        beyond = sent * (size - most) / (size - 1)
        return max(beyond / network, (sent - beyond) / nvlink)
    whole = sent * size / (size - 1)
    beyond = whole * (domains - 1) / domains / min(members.values())
    within = sent if most > 1 else 0.0
    return max(beyond / network, within / nvlink)


class _Clock:
    """Walks computations in schedule order."""

    def __init__(self, module: Module, target: Target, mesh_shape: dict[str, int]) -> None:
        self._module = module
        self._target = target
        self._mesh_shape = mesh_shape
        self._known: dict[str, Timing] = {}

    def run(self, computation: Computation) -> Timing:
        """Time of one run of a computation, remembered: loops and branches share theirs."""
        if computation.name not in self._known:
            self._known[computation.name] = self._run(computation)
        return self._known[computation.name]

    def _run(self, computation: Computation) -> Timing:
        timing = Timing()
        link_free_s = 0.0
        running: dict[str, tuple[float, str]] = {}
        for instruction in computation.instructions:
            collective = self._collective(computation, instruction)
            if collective is not None:
                axes = ",".join(collective.axes) or "unknown"
                seconds = collective_seconds(collective, self._target)
                _count(timing.collectives_s, axes, seconds)
                link_free_s = max(timing.total_s, link_free_s) + seconds
                if collective.is_async:
                    running[instruction.name] = link_free_s, axes
                else:
                    _wait(timing, link_free_s, axes)
            elif instruction.opcode.endswith("-done"):
                started = next((name for name in instruction.operands if name in running), None)
                if started is not None:
                    _wait(timing, *running.pop(started))
            else:
                self._advance(timing, computation, instruction)
        return timing

    def _collective(self, where: Computation, instruction: Instruction) -> Collective | None:
        inner, site_of = instruction, where
        wrappers: tuple[Instruction, ...] = ()
        if instruction.opcode == "async-start":
            site_of = self._module.computations[instruction.called("calls")[0]]
            wrappers = (instruction,)
            found = [i for i in site_of.instructions if i.opcode in KINDS]
            if not found:
                return None
            inner = found[0]
        if inner.opcode.removesuffix("-start") not in KINDS:
            return None
        site = Site(site_of, inner, (), wrappers)
        return collective_at(site, self._module.num_partitions, self._mesh_shape)

    def _advance(self, timing: Timing, where: Computation, instruction: Instruction) -> None:
        """Kernels, and what contains them."""
        if instruction.opcode == "while":
            trips = trip_count(self._module, where, instruction)
            timing.uncounted_loops += trips is None
            body = self._module.computations[instruction.called("body")[0]]
            timing.add(self.run(body), 1 if trips is None else trips)
        elif instruction.opcode in ("conditional", "call"):
            branches = [self.run(c) for c in called_computations(self._module, instruction)]
            if branches:
                # Devices of one program wait for each other: the slowest branch counts.
                timing.add(max(branches, key=lambda branch: branch.total_s))
        else:
            cost = instruction_cost(self._module, where, instruction)
            if cost is not None:
                seconds = kernel_seconds(cost, self._target)
                timing.total_s += seconds
                _count(timing.kernels_s, cost.kind, seconds)
                for dtype, flops in cost.flops.items():
                    _count(timing.flops, dtype, flops)


def _wait(timing: Timing, until_s: float, axes: str) -> None:
    late_s = max(0.0, until_s - timing.total_s)
    if late_s > 0:
        _count(timing.exposed_s, axes, late_s)
        timing.total_s += late_s


def _count(times: dict[str, float], key: str, value: float) -> None:
    times[key] = times.get(key, 0.0) + value
