"""A byte-trigram baseline: what a model of text must beat on held-out bits per byte."""

import numpy as np

VALUES = 256


def trigram_bits_per_byte(train: bytes, valid: bytes) -> float:
    """Bits per byte on `valid` of an interpolated trigram model counted on `train`.

    Witten-Bell interpolation of orders 3, 2, 1 and uniform: a context seen n times with t distinct
    successors gives weight t / (n + t) to the next shorter one. The first byte of `valid` has no
    context and the second a context of one byte.
    """
    seen = np.frombuffer(train, np.uint8).astype(np.int64)
    target = np.frombuffer(valid, np.uint8).astype(np.int64)
    probability = np.full(len(target), 1 / VALUES)
    for order in range(3):
        counts = np.bincount(_codes(seen, order), minlength=VALUES ** (order + 1))
        table = counts.reshape(-1, VALUES)
        total, distinct = table.sum(1), (table > 0).sum(1)
        code = _codes(target, order)
        context, value = code // VALUES, code % VALUES
        n, t = total[context], distinct[context]
        known = np.maximum(n + t, 1)
        mixed = (table[context, value] + t * probability[order:]) / known
        probability[order:] = np.where(n > 0, mixed, probability[order:])
    return float(-np.log2(probability).mean())


def _codes(values: np.ndarray, order: int) -> np.ndarray:
    """Each byte with the `order` before it as one number: [N] -> [N - order]."""
    code = np.zeros(max(len(values) - order, 0), np.int64)
    for back in range(order, -1, -1):
        code = code * VALUES + values[order - back : len(values) - back]
    return code
