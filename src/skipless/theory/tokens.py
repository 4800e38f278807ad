"""Repeated tokens (App. B): the rate r of a corpus, and sequences with a given rate."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from skipless.theory.feasibility import check_repeat_rate


def repeat_rate(tokens: np.ndarray | Iterable[np.ndarray]) -> float:
    """r = P(x_i = x_j), the probability that two locations hold the same token, from a stream of token ids.

    Unbiased: Σ_v n_v(n_v−1) / (N(N−1)), where n_v counts token v among N. Takes one array or an iterable of arrays,
    read once and not kept.
    """
    pieces = [tokens] if isinstance(tokens, np.ndarray) else tokens
    counts = np.zeros(0, dtype=np.int64)
    for piece in pieces:
        found = np.bincount(_ids(piece))
        if len(found) > len(counts):
            found[: len(counts)] += counts
            counts = found
        else:
            counts[: len(found)] += found
    total = int(counts.sum())
    if total < 2:
        raise ValueError(f"{total} tokens were given; a repeat rate needs at least 2")
    return float(np.sum(counts * (counts - 1.0)) / (total * (total - 1.0)))


def _ids(piece: Any) -> np.ndarray:
    """Token ids as a flat array; anything else would be cut to whole numbers and counted."""
    ids = np.asarray(piece).ravel()
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0):
        what = f"{ids.min()}" if ids.dtype.kind == "i" else f"{ids[0]!r} ({ids.dtype})"
        raise ValueError(f"among the tokens is {what}; a repeat rate is of token ids, integers of at least 0")
    return ids.astype(np.int64)


def sample_tokens(rate: float, length: int, seed: int = 0) -> np.ndarray:
    """Tokens of which two agree with probability r: ⌈1/r⌉ symbols, all but one equally likely; r = 0 repeats none."""
    check_repeat_rate(rate)
    if rate == 0.0:
        return np.arange(length)
    symbols, draw = math.ceil(1.0 / rate - 1e-9), np.random.default_rng(seed)
    if math.isclose(symbols * rate, 1.0):
        return draw.integers(0, symbols, size=length)
    # (n−1)p² + (1−(n−1)p)² = r, by the root at which n equal symbols have p = 1/n
    others = (1.0 + math.sqrt((symbols * rate - 1.0) / (symbols - 1))) / symbols
    likely = np.full(symbols, others)
    likely[-1] = 1.0 - (symbols - 1) * others
    return draw.choice(symbols, size=length, p=likely)
