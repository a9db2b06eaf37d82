"""Learning rates against their formulas."""

import math

import pytest

from mtjax.config import OptimizerConfig, ScheduleConfig
from mtjax.training.optimizer import make_schedule


def rate(step, total=1000, peak=0.1, **schedule):
    config = OptimizerConfig(learning_rate=peak, schedule=ScheduleConfig(**schedule))
    return float(make_schedule(config, total)(step))


@pytest.mark.parametrize(
    ("step", "expected"), [(50, 0.055), (100, 0.1), (500, 0.1 - 0.099 * 400 / 900), (1000, 0.001)]
)
def test_linear_warms_up_and_decays_in_a_straight_line(step, expected):
    got = rate(step, name="linear", warmup_steps=100, warmup_init_ratio=0.1, final_ratio=0.01)
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("step", [100, 325, 550, 1000, 2000])
def test_cosine_follows_half_a_period(step):
    share = min(step - 100, 900) / 900
    expected = 0.01 + 0.5 * 0.09 * (1 + math.cos(math.pi * share))
    got = rate(step, name="cosine", warmup_steps=100, final_ratio=0.1)
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("step", "expected"), [(100, 0.1), (800, 0.1), (900, 0.055), (1000, 0.01)])
def test_wsd_is_stable_and_then_falls(step, expected):
    got = rate(step, name="wsd", warmup_steps=100, final_ratio=0.1, wsd_decay_ratio=0.2)
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("step", [100, 400, 900])
def test_inverse_sqrt_is_the_peak_times_the_root_of_warmup_over_step(step):
    got = rate(step, name="inverse_sqrt", warmup_steps=100)
    assert got == pytest.approx(0.1 * math.sqrt(100 / step), rel=1e-5)


def test_constant_stays_after_its_warmup():
    assert rate(5, name="constant", warmup_steps=10) == pytest.approx(0.05)
    assert rate(700, name="constant", warmup_steps=10) == pytest.approx(0.1)
