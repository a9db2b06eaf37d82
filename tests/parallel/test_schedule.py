"""The tables by which pipeline stages work, checked as a reader of the papers would."""

import numpy as np
import pytest

from mtjax.parallel.schedule import IDLE, make_schedule

CASES = [
    (name, stages, microbatches, chunks)
    for name, chunks in [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
    ]
    for stages, microbatches in [(2, 4), (4, 4), (4, 8), (8, 32), (4, 1), (8, 3), (3, 7)]
    if chunks == 1 or microbatches % stages == 0
]


def ticks_of(direction):
    """(stage, chunk, microbatch) -> the tick in which it runs; each at most once."""
    ticks = {}
    for tick, stage in zip(*np.nonzero(direction.microbatch != IDLE), strict=True):
        item = (stage, direction.chunk[tick, stage], direction.microbatch[tick, stage])
        assert item not in ticks, f"{item} runs twice"
        ticks[item] = tick
    return ticks


@pytest.mark.parametrize("case", CASES)
def test_every_chunk_runs_every_microbatch_once_forward_and_once_backward(case):
    _, stages, microbatches, chunks = case
    schedule = make_schedule(*case)
    all_items = {
        (s, v, m) for s in range(stages) for v in range(chunks) for m in range(microbatches)
    }
    assert ticks_of(schedule.forward).keys() == all_items
    assert ticks_of(schedule.backward).keys() == all_items


@pytest.mark.parametrize("case", CASES)
def test_what_a_pass_needs_was_sent_in_the_tick_before(case):
    """The executor keeps one incoming message per direction: it must be read at once."""
    _, stages, _, chunks = case
    schedule = make_schedule(*case)
    forward, backward = ticks_of(schedule.forward), ticks_of(schedule.backward)

    def neighbour(stage, chunk, step):
        part = chunk * stages + stage + step
        return part % stages, part // stages

    for (stage, chunk, microbatch), tick in forward.items():
        if stage + chunk > 0:
            assert forward[(*neighbour(stage, chunk, -1), microbatch)] == tick - 1
    for (stage, chunk, microbatch), tick in backward.items():
        if (stage, chunk) == (stages - 1, chunks - 1):
            # The loss is in between; 1F1B takes its gradient in the same tick.
            assert forward[stage, chunk, microbatch] <= tick
        else:
            assert backward[(*neighbour(stage, chunk, 1), microbatch)] == tick - 1


@pytest.mark.parametrize("case", CASES)
def test_the_bubble_is_the_ideal_one(case):
    """Narayanan et al. 2021, sections 2.2.1 and 2.2.2, as a share of the whole time."""
    _, stages, microbatches, chunks = case
    ideal = (stages - 1) / (chunks * microbatches + stages - 1)
    assert make_schedule(*case).bubble_ratio == pytest.approx(ideal, abs=1e-12)


def held(schedule):
    """Most chunk activations that a stage holds at once, each from forward to backward."""
    forward, backward = ticks_of(schedule.forward), ticks_of(schedule.backward)
    counts = np.zeros((schedule.num_ticks, schedule.num_stages), int)
    for item, begin in forward.items():
        counts[begin : backward[item] + 1, item[0]] += 1
    return counts.max(axis=0)


@pytest.mark.parametrize("microbatches", [8, 32, 128])
def test_gpipe_holds_every_microbatch_and_1f1b_a_number_that_stages_bound(microbatches):
    stages = 8
    assert held(make_schedule("gpipe", stages, microbatches)).tolist() == [microbatches] * stages
    # A tick is a pair of passes here: a message takes twice as long as in the papers' 1F1B, and
    # stage s holds 2 (S - s) - 1 instead of S - s.
    expected = [min(2 * (stages - s) - 1, microbatches) for s in range(stages)]
    assert held(make_schedule("1f1b", stages, microbatches)).tolist() == expected


def test_interleaving_holds_less_because_a_chunk_is_a_fraction_of_a_stage():
    """Narayanan et al. 2021: 2 (S - 1) + (V - 1) S + 1 chunks."""
    stages, microbatches, chunks = 8, 32, 2
    schedule = make_schedule("interleaved_1f1b", stages, microbatches, chunks)
    assert max(held(schedule)) == 2 * (stages - 1) + (chunks - 1) * stages + 1 == 23
    assert max(held(schedule)) / chunks < max(held(make_schedule("1f1b", stages, microbatches)))


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "gpipe"])
def test_activations_stay_in_their_slot_until_they_are_read(case):
    schedule = make_schedule(*case)
    for stage in range(schedule.num_stages):
        slots = {}
        for tick in range(schedule.num_ticks):
            if schedule.forward.slot[tick, stage] != IDLE:
                item = (
                    schedule.forward.chunk[tick, stage],
                    schedule.forward.microbatch[tick, stage],
                )
                slots[schedule.forward.slot[tick, stage]] = item
            if schedule.backward.microbatch[tick, stage] != IDLE:
                item = (
                    schedule.backward.chunk[tick, stage],
                    schedule.backward.microbatch[tick, stage],
                )
                assert slots[schedule.backward.slot[tick, stage]] == item
        assert max(slots) < schedule.num_slots


def test_no_more_slots_than_activations_held_and_a_place_for_what_idle_stages_compute():
    assert make_schedule("1f1b", 8, 32).num_slots == 15
    assert make_schedule("interleaved_1f1b", 8, 32, 2).num_slots == 23
    # With few microbatches all are held while the first stage idles.
    assert make_schedule("1f1b", 8, 3).num_slots == 4


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("active", [4, 8, 12])
def test_fewer_microbatches_are_the_same_ticks_with_some_left_out(chunks, active):
    """A batch ramp relies on it: passes begin alike, however many microbatches follow."""
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    whole, part = make_schedule(name, 4, 12, chunks), make_schedule(name, 4, active, chunks)
    for phase, shorter in zip(whole.phases, part.phases, strict=True):
        left_out = (12 - active) * chunks
        begin = phase.begin - (0 if phase.forward else left_out)
        assert (begin, phase.end - (left_out if phase.backward else 0)) == (
            shorter.begin,
            shorter.end,
        )
        for ours, theirs in [(whole.forward, part.forward), (whole.backward, part.backward)]:
            ticks = slice(shorter.begin, shorter.end)
            busy = theirs.microbatch[ticks] != IDLE
            for field in ("chunk", "microbatch"):
                np.testing.assert_array_equal(
                    getattr(ours, field)[ticks][busy], getattr(theirs, field)[ticks][busy]
                )
            # What the whole table does there beside is for microbatches without data.
            extra = ours.microbatch[ticks][~busy]
            assert ((extra == IDLE) | (extra >= active)).all()
