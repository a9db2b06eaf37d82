"""The byte-trigram baseline against a few bytes worked out by hand."""

import math
from importlib import resources

import pytest

from tests.data.trigram import trigram_bits_per_byte


def test_an_untrained_model_needs_eight_bits():
    assert trigram_bits_per_byte(b"", b"any text") == 8


def test_a_small_example_agrees_with_the_model_worked_out_by_hand():
    # "abab": a and b seen twice each. One valid byte has no context: (2 + 2/256) / (4 + 2).
    first = (2 + 2 / 256) / 6
    assert trigram_bits_per_byte(b"abab", b"a") == pytest.approx(-math.log2(first))
    # b after a: seen 2 times, one successor: (2 + 1 * first) / 3; then a after "ab": seen once,
    # one successor, over a after b, seen once: (1 + (1 + first) / 2) / 2.
    second = (2 + first) / 3
    third = (1 + (1 + first) / 2) / 2
    bits = -(math.log2(first) + math.log2(second) + math.log2(third)) / 3
    assert trigram_bits_per_byte(b"abab", b"aba") == pytest.approx(bits)


def test_an_unseen_context_falls_back_to_the_shorter_one():
    # c after x, of which nothing is known: the share of an unseen byte, (0 + 2/256) / 6.
    bits = -math.log2(2 / 256 / 6)
    assert trigram_bits_per_byte(b"abab", b"xc") == pytest.approx(bits)


def test_the_text_that_ships_with_mtjax_takes_2_70_bits_per_byte():
    text = (resources.files("mtjax.data") / "corpora/pride_and_prejudice.txt").read_bytes()
    cut = len(text) * 9 // 10
    assert trigram_bits_per_byte(text[:cut], text[cut:]) == pytest.approx(2.70, abs=0.02)
