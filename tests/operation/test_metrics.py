"""The metrics file: names, steps after a resume, and values JSON can't hold."""

import json
import math
import pathlib
import re
import sys

import pytest

from mtjax.config.run import MetricsConfig
from mtjax.operation.metrics import METRICS, MetricWriter, read_metrics

QUIET = MetricsConfig(tensorboard=False)


def write(directory, steps, *, resume_step=0, loss=1.0, config=QUIET):
    with MetricWriter(directory, config, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, {"train/loss": loss})


def steps_and_losses(path):
    return [(int(r["step"]), r["train/loss"]) for r in read_metrics(path)]


def test_an_unknown_name_raises_and_names_itself(tmp_path):
    with pytest.raises(ValueError, match="unknown metric train/lost, expected"):
        MetricWriter(tmp_path, QUIET).write(1, {"train/lost": 1.0})


def test_an_unknown_name_raises_on_processes_that_write_nothing_too(tmp_path):
    writer = MetricWriter(tmp_path / "other", QUIET, active=False)
    writer.write(1, {"train/loss": 1.0})
    with pytest.raises(ValueError, match="unknown metric"):
        writer.write(1, {"loss": 1.0})
    assert not (tmp_path / "other").exists()


def test_every_metric_has_a_unit_and_a_meaning():
    assert all(metric.unit and metric.meaning for metric in METRICS.values())
    assert all(re.fullmatch(r"[a-z]+/[a-z_]+", name) for name in METRICS)


def test_resuming_at_step_k_leaves_each_step_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4], loss=1.0)
    write(tmp_path, [3, 4, 5], resume_step=2, loss=2.0)
    path = tmp_path / "metrics.jsonl"
    assert steps_and_losses(path) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert steps_and_losses(tmp_path / "metrics.superseded.jsonl") == [(3, 1.0), (4, 1.0)]


def test_starting_again_from_step_0_keeps_the_old_lines_aside(tmp_path):
    write(tmp_path, [0, 1])
    write(tmp_path, [1], loss=5.0)
    assert steps_and_losses(tmp_path / "metrics.jsonl") == [(1, 5.0)]
    assert steps_and_losses(tmp_path / "metrics.superseded.jsonl") == [(0, 1.0), (1, 1.0)]


def test_half_a_line_of_a_killed_process_does_not_survive_a_resume(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "train/lo')
    write(tmp_path, [3], resume_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_nan_and_infinity_are_valid_json_and_come_back(tmp_path):
    with MetricWriter(tmp_path, QUIET) as writer:
        values = {"train/loss": math.nan, "train/grad_norm": math.inf, "perf/mfu": 0.1}
        writer.write(1, values)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    path = tmp_path / "metrics.jsonl"
    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert math.isnan(record["train/loss"]) and record["train/grad_norm"] == math.inf
    assert record["perf/mfu"] == 0.1


def test_tensorboard_files_hold_the_scalar(tmp_path):
    write(tmp_path, [1, 2], config=MetricsConfig())
    (events,) = pathlib.Path(tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"train/loss") == 2


def test_missing_wandb_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        MetricWriter(tmp_path, MetricsConfig(tensorboard=False, wandb=True))
