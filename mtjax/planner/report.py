"""What a compiled train step does on a target, as one record to print, save and draw."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.config import Config
from mtjax.config.pipeline import layers_per_stage
from mtjax.planner.memory import pipeline_schedule
from mtjax.planner.program import ParamRow, StepProgram
from mtjax.planning.flops import (
    count_active_params,
    count_mtp_params,
    count_params,
    flops_per_token,
)
from mtjax.planning.hlo import Collective, Gemm, ProgramSummary
from mtjax.planning.liveness import peak_temporaries
from mtjax.planning.targets import Target
from mtjax.planning.timing import ASSUMPTIONS, Timing, estimate

RESERVED_BYTES = 2 * 2**30
"""Device memory that the CUDA context, NCCL and cuBLAS take beside the program."""

_NUM_LARGEST = 10
_LOOP_PARTS = ("while", "body", "cond", "checkpoint", "eval_jaxpr", "closed_call", "shard_map")

# Above this ratio of FLOPs done to FLOPs asked for, products are replicated or expanded; padding
# of uneven shapes stays below it.
_EXPANDED_RATIO = 1.1


@dataclass(frozen=True, kw_only=True)
class PipelinePart:
    """How layers and microbatches go through the stages."""

    schedule: str
    num_stages: int
    num_chunks: int
    """Chunks of consecutive layers per stage."""
    layers: tuple[tuple[int, int], ...]
    """First layer and number of layers of each part, in the order of the model; part i is chunk
    i // num_stages of stage i % num_stages."""
    bubble_ratio: float
    """Share of the time in which a stage waits, all passes taken as equally long."""
    num_slots: int
    """Passes of a chunk whose activations a stage holds at once, at most."""
    forward: tuple[tuple[int, ...], ...]
    """Microbatch that goes forward, by tick and stage; -1 where none does."""
    backward: tuple[tuple[int, ...], ...]
    """The same for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class LayoutPart:
    """How the model lies on the mesh."""

    mesh: dict[str, int]
    """Axes larger than 1, outermost first."""
    num_devices: int
    microbatches: int
    pipeline: PipelinePart | None
    params: int
    """Trainable parameters, padding left out."""
    active_params: int
    mtp_params: int
    """In modules of multi-token prediction, which are not in `params`."""
    """Of these, what one token uses: all but the experts it is not sent to."""
    padding_params: int
    """Entries that pad the vocabulary."""
    params_per_device: int
    """As layers use them, before ZeRO-1 divides masters and moments over data."""
    rows: tuple[ParamRow, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Arrays that live at the peak and come from one place of the program."""

    origin: str
    """forward, backward or the rest of the step, and the jax operation."""
    shape: str
    count: int
    num_bytes: int
    """All of them together."""


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes on each device; all devices of one program hold the same."""

    parts: dict[str, int]
    """What arguments, results and temporaries consist of; their sum is total_bytes."""
    total_bytes: int
    """Peak, as XLA's buffer assignment has it."""
    capacity_bytes: int | None
    """Memory of the device without RESERVED_BYTES; None for virtual CPU devices."""
    largest: tuple[Held, ...]
    """Temporaries at the peak by origin, largest first; see planning/liveness.py."""

    @property
    def headroom_bytes(self) -> int | None:
        """What is left; negative where it does not fit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool | None:
        """None where the capacity is not known."""
        return None if self.headroom_bytes is None else self.headroom_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """Collectives of one kind over the same axes."""

    kind: str
    axes: str
    dtypes: str
    inside_loop: bool
    """Inside a loop over layers, microbatches or chunks."""
    count: int
    """Runs per step."""
    sent_bytes: float
    """Bytes each device sends per step."""
    overlapped_ratio: float
    """Share of the bytes whose collective has kernels scheduled between start and done."""


@dataclass(frozen=True, kw_only=True)
class ComputePart:
    """FLOPs per step and device."""

    model_flops: float
    """What the mathematics of the model takes; see planning/flops.py."""
    hardware_flops: float
    """What matrix products and attention of the program do, recomputation included."""
    by_dtype: dict[str, float]
    """hardware_flops by the dtype that sets the rate: fp8, bf16, tf32 ..."""
    asked_flops: float
    """Matrix-product FLOPs of the traced step, before the compiler partitions it."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TimePart:
    """Roofline estimate of one step."""

    step_s: float
    tokens_per_s: float
    mfu: float
    """Model FLOPs over the peak in the compute dtype."""
    kernels_s: dict[str, float]
    """By kind."""
    communication_s: dict[str, float]
    """By mesh axes, hidden or not."""
    exposed_s: dict[str, float]
    """Communication that kernels wait for, by mesh axes."""
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the config that was compiled because the step does not fit."""

    flags: str
    """Command-line options that make it."""
    total_bytes: int
    fits: bool | None
    step_s: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything `launch.py plan` knows of one layout."""

    title: str
    target: str
    notes: tuple[str, ...]
    """What makes this plan less than one for the real devices."""
    layout: LayoutPart
    memory: MemoryPart
    traffic: tuple[TrafficRow, ...]
    compute: ComputePart
    time: TimePart | None
    """None without rates: for cpu."""
    changes: tuple[Change, ...] = ()
    """What was tried because it does not fit, most memory saved first."""


def make_plan(
    step: StepProgram, target: Target | None, title: str = "", notes: tuple[str, ...] = ()
) -> Plan:
    """Read a compiled step. `target` gives memory size and rates; None for plain CPU devices."""
    config, program = step.config, step.program
    tokens = config.train.batch_size * config.train.seq_len
    num_devices = program.num_devices
    model_flops = flops_per_token(config.model, config.train.seq_len) * tokens / num_devices
    timing = None if target is None else estimate(program.hlo, target, program.mesh_shape)
    return Plan(
        title=title,
        target=f"cpu:{num_devices}" if target is None else str(target),
        notes=notes,
        layout=_layout(step),
        memory=_memory(step, target),
        traffic=_traffic(step),
        compute=_compute(step, model_flops, timing),
        time=None if timing is None or target is None else _time(timing, target, step, model_flops),
    )


def _layout(step: StepProgram) -> LayoutPart:
    model = step.config.model
    params, mtp_params = count_params(model), count_mtp_params(model)
    return LayoutPart(
        mesh={axis: size for axis, size in step.program.mesh_shape.items() if size > 1},
        num_devices=step.program.num_devices,
        microbatches=step.config.train.microbatches,
        pipeline=_pipeline(step.config),
        params=params,
        active_params=count_active_params(model),
        mtp_params=mtp_params,
        padding_params=sum(row.count for row in step.param_rows) - params - mtp_params,
        params_per_device=sum(row.per_device for row in step.param_rows),
        rows=step.param_rows,
    )


def _pipeline(config: Config) -> PipelinePart | None:
    schedule = pipeline_schedule(config)
    if schedule is None:
        return None
    counts = layers_per_stage(config.model, config.pipeline, config.mesh.pipeline)
    firsts = itertools.accumulate(counts, initial=0)
    return PipelinePart(
        schedule=config.pipeline.schedule,
        num_stages=schedule.num_stages,
        num_chunks=schedule.num_chunks,
        layers=tuple(zip(firsts, counts, strict=False)),
        bubble_ratio=schedule.bubble_ratio,
        # A place that idle stages write to is not counted.
        num_slots=min(schedule.num_slots, schedule.num_microbatches * schedule.num_chunks),
        forward=tuple(map(tuple, schedule.forward.microbatch.tolist())),
        backward=tuple(map(tuple, schedule.backward.microbatch.tolist())),
    )


def _memory(step: StepProgram, target: Target | None) -> MemoryPart:
    memory = step.program.memory
    temporaries = memory.temp_bytes
    parts = {
        "parameters": step.param_bytes,
        "optimizer state": step.optimizer_bytes,
        "batch and counters": memory.arguments_bytes - step.param_bytes - step.optimizer_bytes,
        "results not in place": memory.outputs_bytes - memory.alias_bytes,
    }
    for name, size in (
        ("gradients", step.gradient_bytes),
        ("weights in the compute dtype", step.compute_bytes),
    ):
        # A program may never hold all of them at once.
        parts[name] = min(size, temporaries)
        temporaries -= parts[name]
    parts["activations and workspace"] = temporaries
    capacity = None if target is None else target.gpu.memory_bytes - RESERVED_BYTES
    return MemoryPart(
        parts=parts,
        total_bytes=memory.total_bytes,
        capacity_bytes=capacity,
        largest=_largest(step.program.hlo),
    )


def _largest(hlo: str) -> tuple[Held, ...]:
    sizes: dict[tuple[str, str], list[int]] = {}
    for buffer in peak_temporaries(hlo).buffers:
        sizes.setdefault((_origin(buffer.op_name), buffer.shape), []).append(buffer.num_bytes)
    held = [
        Held(origin=origin, shape=shape, count=len(found), num_bytes=sum(found))
        for (origin, shape), found in sizes.items()
    ]
    return tuple(sorted(held, key=lambda h: -h.num_bytes)[:_NUM_LARGEST])


def _origin(op_name: str) -> str:
    """The phase of the step and the last part of the jax path, for people."""
    if "/" not in op_name:
        return "unnamed"
    phase = "step"
    if "jvp" in op_name:
        phase = "backward" if "transpose(jvp" in op_name else "forward"
    parts = [p for p in op_name.split("/") if "(" not in p and p not in _LOOP_PARTS]
    if parts and parts[-1] == "dynamic_update_slice":
        parts = ["stacked over a loop"]
    return f"{phase}: {'/'.join(parts) or 'unnamed'}"


def _traffic(step: StepProgram) -> tuple[TrafficRow, ...]:
    groups: dict[tuple[str, str, str, bool], list[Collective]] = {}
    for c in step.program.summary.all_collectives:
        key = c.kind, ",".join(c.axes), "+".join(c.dtypes), c.inside_loop
        groups.setdefault(key, []).append(c)
    rows = []
    for (kind, axes, dtypes, inside_loop), found in groups.items():
        sent = sum(c.wire_bytes * c.executions for c in found)
        hidden = sum(c.wire_bytes * c.executions for c in found if c.overlapped_ops)
        rows.append(
            TrafficRow(
                kind=kind,
                axes=axes,
                dtypes=dtypes,
                inside_loop=inside_loop,
                count=sum(c.executions for c in found),
                sent_bytes=sent,
                overlapped_ratio=hidden / sent if sent else 0.0,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.sent_bytes))


def _compute(step: StepProgram, model_flops: float, timing: Timing | None) -> ComputePart:
    summary = step.program.summary
    if timing is not None:
        by_dtype = timing.flops
    else:
        by_dtype = {
            lhs if lhs == rhs else f"{lhs} x {rhs}": float(flops)
            for (lhs, rhs), flops in summary.gemm_flops_by_dtype().items()
        }
    return ComputePart(
        model_flops=model_flops,
        hardware_flops=sum(by_dtype.values()),
        by_dtype=_largest_first(by_dtype),
        asked_flops=sum(step.asked_flops.values()),
        warnings=expansions(summary, step.asked_flops),
    )


def expansions(summary: ProgramSummary, asked_flops: Mapping[str, float]) -> tuple[str, ...]:
    """Warnings about products that do more than was asked for, ragged ones apart from plain ones.

    Args:
        summary: of the compiled program.
        asked_flops: as `mtjax.planning.asked.asked_flops` gives them.
    """
    done: dict[str, list[Gemm]] = {"dot_general": [], "ragged_dot_general": []}
    for gemm in summary.all_gemms:
        done["ragged_dot_general" if "ragged_dot" in gemm.op_name else "dot_general"].append(gemm)
    warnings = []
    for primitive, gemms in done.items():
        asked, flops = asked_flops.get(primitive, 0.0), sum(g.flops for g in gemms)
        if flops > _EXPANDED_RATIO * asked:
            largest = max(gemms, key=lambda gemm: gemm.flops)
            reason = "replicated, padded, or recomputed by XLA to save memory"
            if "ragged" in primitive:
                reason = "expanded over all groups"
            times = f"{flops / asked:.1f} x the" if asked else "only unasked"
            warnings.append(
                f"{primitive}: {times} FLOPs that the step asks for ({flops / 1e12:.1f} TFLOP), "
                f"{reason}; the largest is {largest}"
            )
    return tuple(warnings)


def _time(timing: Timing, target: Target, step: StepProgram, model_flops: float) -> TimePart:
    train = step.config.train
    assumptions: tuple[str, ...] = ASSUMPTIONS
    if timing.uncounted_loops:
        assumptions += (f"{timing.uncounted_loops} loops of unknown length run once",)
    gpu, config = target.gpu, step.config
    peak = gpu.peak_fp32 if config.compute_dtype == "fp32" else gpu.peak_bf16
    if config.quantized and gpu.peak_fp8:
        peak = gpu.peak_fp8
    return TimePart(
        step_s=timing.total_s,
        tokens_per_s=train.batch_size * train.seq_len / timing.total_s,
        mfu=model_flops / timing.total_s / peak,
        kernels_s=_largest_first(timing.kernels_s),
        communication_s=_largest_first(timing.collectives_s),
        exposed_s=_largest_first(timing.exposed_s),
        assumptions=assumptions,
    )


def _largest_first(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda part: -part[1]))
