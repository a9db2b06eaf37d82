"""Which stage computes what at each tick of a pipeline: tables made before anything is traced.

All stages run the same program in lockstep. In a tick each does at most one forward and one
backward pass of a chunk for a microbatch, and what it sends is read by its neighbour in the next
tick. A chunk is a run of consecutive layers; stage s holds chunks s, s + S, s + 2S ... of the
model. Letters: S stages, M microbatches, V chunks per stage, s stage, m microbatch.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mtjax.config.pipeline import PipelineSchedule

IDLE = -1


class Pass(NamedTuple):
    """One direction of a schedule; int32 [ticks, S] each, IDLE where a stage has nothing to do."""

    chunk: np.ndarray
    """Chunk of the stage, 0 to V - 1."""
    microbatch: np.ndarray
    slot: np.ndarray
    """Where the activations are kept between forward and backward; never IDLE in a forward tick,
    because idle stages compute and write too."""


@dataclass(frozen=True)
class Phase:
    """Ticks `begin` to `end` - 1, in which some stage goes forward, or backward, or both."""

    begin: int
    end: int
    forward: bool
    backward: bool


@dataclass(frozen=True)
class Schedule:
    """The ticks of one step."""

    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: Pass
    backward: Pass
    phases: tuple[Phase, ...]
    num_slots: int
    """Chunk activations that a stage must be able to hold at once."""

    @property
    def num_ticks(self) -> int:
        """Ticks of the step, all phases together."""
        return self.phases[-1].end

    @property
    def bubble_ratio(self) -> float:
        """Share of the time in which a stage waits, forward and backward passes weighed alike."""
        spent = sum((p.end - p.begin) * (p.forward + p.backward) for p in self.phases)
        return 1 - 2 * self.num_microbatches * self.num_chunks / spent


def make_schedule(
    name: PipelineSchedule, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """The table of a schedule.

    Every stage takes its passes in the same order and without a gap, one tick after its neighbour.
    1F1B starts backward in the tick in which the last stage first has an output (in the 1F1B of
    Narayanan et al. 2019 a tick is one pass; here it is a pair, and a stage holds up to
    2 (S - s) - 1 microbatches instead of S - s). Interleaved, a stage runs each chunk for S
    microbatches before the next chunk (Narayanan et al. 2021, section 2.2).
    """
    S, M, V = num_stages, num_microbatches, num_chunks
    assert V == 1 or M % S == 0, "checked by mtjax.config.pipeline"
    chunks, microbatches = _order(S, M, V)
    num_passes = len(chunks)
    forward_end = num_passes + S - 1
    if name == "gpipe":
        backward_begin = forward_end
        # Autodiff runs the passes in reverse.
        backward_chunks, backward_microbatches = chunks[::-1], microbatches[::-1]
    else:
        # The forward pass of the last chunk on the last stage comes after (V - 1) S others there.
        backward_begin = V * S - 1
        backward_chunks, backward_microbatches = V - 1 - chunks, microbatches
    num_ticks = backward_begin + num_passes + S - 1
    forward, backward = (np.full((2, num_ticks, S), IDLE, np.int32) for _ in range(2))
    for s in range(S):
        forward[:, s : s + num_passes, s] = chunks, microbatches
        start = backward_begin + S - 1 - s
        backward[:, start : start + num_passes, s] = backward_chunks, backward_microbatches
    phases = (
        Phase(0, backward_begin, True, False),
        Phase(backward_begin, forward_end, True, True),
        Phase(forward_end, num_ticks, False, True),
    )
    write, read, num_slots = _slots(forward, backward, forward_end)
    return Schedule(
        S,
        M,
        V,
        Pass(forward[0], forward[1], write),
        Pass(backward[0], backward[1], read),
        tuple(phase for phase in phases if phase.end > phase.begin),
        num_slots,
    )


def _order(S: int, M: int, V: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunks and microbatches of a stage's forward passes: groups of S microbatches."""
    passes = [
        (chunk, microbatch)
        for first in range(0, M, S)
        for chunk in range(V)
        for microbatch in range(first, min(first + S, M))
    ]
    chunks, microbatches = np.array(passes, np.int32).T
    return chunks, microbatches


def _slots(
    forward: np.ndarray, backward: np.ndarray, forward_end: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Slots written by forward and read by backward ticks, as few as lifetimes allow."""
    _, num_ticks, S = forward.shape
    write, read = (np.full((num_ticks, S), IDLE, np.int32) for _ in range(2))
    num_slots = 0
    for s in range(S):
        ends = {tuple(item): tick for tick, item in enumerate(backward[:, :, s].T)}
        free: list[int] = []
        held: list[tuple[int, int]] = []  # (last tick, slot)
        for tick in range(forward_end):
            while held and held[0][0] < tick:
                heapq.heappush(free, heapq.heappop(held)[1])
            slot = heapq.heappop(free) if free else len(held)
            item = tuple(forward[:, tick, s])
            # An idle stage's result is dead at once.
            end = ends[item] if item[0] != IDLE else tick
            write[tick, s] = slot
            if item[0] != IDLE:
                read[end, s] = slot
            heapq.heappush(held, (end, slot))
            num_slots = max(num_slots, len(held))
    return write, read, num_slots
