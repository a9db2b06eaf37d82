"""How much a run reads, and whether anything is left."""

import time

import pytest

from mtjax.config import BatchRampConfig, TrainConfig
from mtjax.sharding import make_mesh
from mtjax.training.feed import Feed, samples_until
from tests.training.runs import tiny

RAMPS = [
    {},
    {"start": 2, "increment": 2, "steps": 5},
    {"start": 2, "increment": 6, "steps": 7},
    {"start": 4, "increment": 4, "steps": 1},
    {"start": 8, "increment": 2, "steps": 3},
]


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_the_samples_of_a_run_are_the_sum_over_its_steps(ramp):
    train = TrainConfig(batch_size=8, microbatches=4, batch_ramp=BatchRampConfig(**ramp))
    for steps in range(12):
        assert samples_until(train, steps) == sum(map(train.batch_size_at, range(steps)))


def test_the_samples_of_a_very_long_run_take_no_time():
    ramp = BatchRampConfig(start=2, increment=2, steps=10**10)
    train = TrainConfig(batch_size=8, microbatches=4, batch_ramp=ramp)
    started_s = time.monotonic()
    # Sizes 2, 4, 6, 8 for a quarter of the ramp each.
    assert samples_until(train, 10**11) == 5 * 10**10 + 8 * 9 * 10**10
    assert time.monotonic() - started_s < 1


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_asking_for_the_end_leaves_the_stream_where_it_is(tmp_path, packing):
    import jax
    import numpy as np

    path = tmp_path / "short.txt"
    path.write_text("".join(f"Paragraph {i:02d} says it.\n\n" for i in range(16)), encoding="utf-8")
    changes = {"data__paths": (str(path),), "data__split": "1", "data__epochs": 1}
    if packing == "first_fit":
        changes |= {"data__packing": packing, "data__separate_documents": True}
    config = tiny(tmp_path, **changes)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    plain, asked = (Feed(config, mesh, "train", None) for _ in range(2))
    batches = 0
    while not asked.at_end():
        (_, ours), (_, theirs) = asked.next(), plain.next()
        assert np.array_equal(ours.tokens, theirs.tokens)
        batches += 1
    assert batches >= 2
    with pytest.raises(StopIteration):
        plain.next()
    assert asked.loader.get_state()["batch"] == batches
