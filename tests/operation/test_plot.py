"""The picture of the loss curve."""

import math

import numpy as np
from matplotlib.image import imread

from mtjax.config.run import MetricsConfig
from mtjax.operation.metrics import MetricWriter
from mtjax.operation.plot import plot_loss

BLUE = np.array([0x2A, 0x78, 0xD6]) / 255
ORANGE = np.array([0xC2, 0x41, 0x0C]) / 255


def record(directory, losses, evals=()):
    with MetricWriter(directory, MetricsConfig(tensorboard=False)) as writer:
        for step, loss in enumerate(losses, 1):
            writer.write(step, {"train/loss": loss})
        for step, loss in evals:
            writer.write(step, {"eval/loss": loss})


def rows_with(path, color):
    """Heights, as a share of the picture from the bottom, at which `color` appears."""
    image = imread(path)[..., :3]
    rows = np.flatnonzero((np.abs(image - color) < 0.02).all(-1).any(-1))
    return 1 - rows / image.shape[0]


def test_both_curves_are_drawn_and_the_falling_one_spans_the_picture(tmp_path):
    record(tmp_path, [5.0, 4.0, 3.0, 2.0], [(2, 2.5), (4, 2.2)])
    path = plot_loss(tmp_path, "toy")
    train, held_out = rows_with(path, BLUE), rows_with(path, ORANGE)
    assert train.max() - train.min() > 0.6
    assert held_out.size > 0


def test_nan_and_one_huge_spike_do_not_flatten_the_curve(tmp_path):
    losses = [5.0 - 3.0 * i / 300 for i in range(300)]
    losses[150], losses[200] = 1e4, math.nan
    record(tmp_path, losses)
    train = rows_with(plot_loss(tmp_path), BLUE)
    assert train.max() - train.min() > 0.6


def test_without_a_finite_loss_there_is_no_picture(tmp_path):
    record(tmp_path, [math.nan])
    assert plot_loss(tmp_path) is None
    assert not (tmp_path / "loss.png").exists()
