"""Progress on terminals and elsewhere."""

import io

import pytest

from mtjax.operation.progress import (
    Progress,
    format_count,
    format_duration,
    printable,
    summary,
)

METRICS = {"train/loss": 2.5, "perf/tokens_per_s": 12345.0, "perf/mfu": 0.412}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_each_logged_step_is_one_line_with_units():
    stream = io.StringIO()
    with Progress(100, stream=stream) as progress:
        progress.update(100, METRICS)
    assert stream.getvalue() == (
        "step 100/100 | loss 2.5000 | 12.3k tokens/s | MFU 41.2% | left 0 s\n"
    )


def test_mfu_of_an_unknown_device_reads_not_available():
    assert "MFU n/a" in summary({"perf/tokens_per_s": 1.0})


def test_time_left_comes_from_the_steps_of_this_process_only(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    stream = io.StringIO()
    progress = Progress(200, start_step=100, stream=stream)
    now_s[0] = 20.0
    progress.update(110, {})
    assert "left 3 min 00 s" in stream.getvalue()


def test_a_terminal_gets_a_bar_and_messages_above_it():
    stream = Terminal()
    with Progress(10, stream=stream) as progress:
        progress.message("saved [1]")
        progress.update(10, METRICS)
    assert "10/10" in stream.getvalue() and "saved [1]" in stream.getvalue()


def test_other_processes_print_nothing():
    stream = io.StringIO()
    with Progress(10, stream=stream, active=False) as progress:
        progress.update(1, METRICS)
        progress.message("hello")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "42 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (273600, "3 d 04 h"), (-1, "0 s")],
)
def test_durations_are_for_people(seconds, text):
    assert format_duration(seconds) == text


def test_counts_have_decimal_prefixes():
    shown = {950: "950", 12345: "12.3k", 4.56e6: "4.56M", 2.7e16: "27P"}
    assert {value: format_count(value) for value in shown} == shown


def test_control_characters_are_written_out_and_text_stays():
    text = "caf\u00e9 \u4e2d\n\ta\\b \ufffd"
    assert printable(text) == text
    assert printable("\x1b[2J\x00\r\x7f\u0085") == r"\x1b[2J\x00\r\x7f\x85"
