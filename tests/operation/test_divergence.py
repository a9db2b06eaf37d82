"""Bad steps: when to go on and when to stop."""

import json
import math

import numpy as np
import pytest

from mtjax.config.run import FaultConfig
from mtjax.operation.divergence import SpikeGuard, TrainingDiverged, describe_batch

GOOD = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/skipped": 0.0}


def bad(value=math.nan, **others):
    return GOOD | {"train/loss": value, "train/skipped": 1.0} | others


def test_stop_names_step_value_and_batch():
    batch = describe_batch(7, np.arange(20).reshape(2, 10))
    guard = SpikeGuard(FaultConfig())
    assert guard.observe(1, GOOD)
    expected = r"step 2: train/loss is nan; batch: number 7 \(from 0\), first tokens \[0, 1, 2"
    with pytest.raises(TrainingDiverged, match=expected):
        guard.observe(2, bad(), lambda: batch)


def test_skip_goes_on_until_too_many_in_a_row():
    guard = SpikeGuard(FaultConfig(on_bad_step="skip", max_skipped=2))
    assert not guard.observe(1, bad())
    assert not guard.observe(2, bad())
    assert guard.observe(3, GOOD)
    guard.observe(4, bad())
    guard.observe(5, bad())
    with pytest.raises(TrainingDiverged, match=r"step 6: .*3 bad steps in a row"):
        guard.observe(6, bad())


def test_a_nan_that_was_applied_stops_even_with_skip():
    guard = SpikeGuard(FaultConfig(on_bad_step="skip"))
    with pytest.raises(TrainingDiverged, match="parameters are spoilt"):
        guard.observe(1, bad(**{"train/skipped": 0.0}))


def test_an_overflow_under_loss_scaling_does_not_stop():
    guard = SpikeGuard(FaultConfig(on_bad_step="stop"))
    overflow = {"train/grad_norm": math.inf, "train/loss_scale": 65536.0, "train/skipped": 1.0}
    assert not guard.observe(1, GOOD | overflow)


def test_a_spike_is_a_multiple_of_the_recent_median():
    guard = SpikeGuard(FaultConfig(spike_ratio=3.0, spike_window=4))
    for step, norm in enumerate((1.0, 2.0, 2.0, 9.0)):
        assert guard.limits()["train/grad_norm"] == math.inf
        guard.observe(step, GOOD | {"train/grad_norm": norm})
    assert guard.limits() == {"train/loss": 6.0, "train/grad_norm": 6.0}
    with pytest.raises(TrainingDiverged, match=r"grad_norm is 6.5, above the spike limit 6"):
        guard.observe(5, GOOD | {"train/grad_norm": 6.5, "train/skipped": 1.0})


def test_bad_steps_do_not_enter_the_median():
    guard = SpikeGuard(FaultConfig(on_bad_step="skip", spike_ratio=2.0, spike_window=2))
    for step in range(3):
        guard.observe(step, GOOD)
    guard.observe(3, bad(100.0))
    assert guard.limits()["train/loss"] == 4.0


def test_a_resumed_guard_judges_as_the_uninterrupted_one():
    config = FaultConfig(on_bad_step="skip", spike_ratio=2.0, spike_window=3, max_skipped=1)
    guard, resumed = SpikeGuard(config), SpikeGuard(config)
    for step, loss in enumerate((1 / 3, 0.1, 0.7)):
        guard.observe(step, GOOD | {"train/loss": loss})
    guard.observe(3, bad())
    resumed.load(json.loads(json.dumps(guard.state())))
    assert resumed.limits() == guard.limits()
    with pytest.raises(TrainingDiverged, match="2 bad steps in a row"):
        resumed.observe(4, bad())


def test_the_digest_of_a_batch_depends_on_every_token_and_not_on_the_dtype():
    tokens_BT = np.arange(200).reshape(2, 100)
    changed_BT = tokens_BT.copy()
    changed_BT[1, 99] += 1
    assert describe_batch(0, tokens_BT) == describe_batch(0, tokens_BT.astype(np.int32))
    assert describe_batch(0, tokens_BT) != describe_batch(0, changed_BT)
