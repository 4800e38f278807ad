"""Repeated tokens (App. B): the rate r of a corpus, and sequences with a given rate."""

from collections.abc import Iterable

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
        found = np.bincount(np.asarray(piece).ravel().astype(np.int64))
        if len(found) > len(counts):
            found[: len(counts)] += counts
            counts = found
        else:
            counts[: len(found)] += found
    total = int(counts.sum())
    if total < 2:
        raise ValueError(f"{total} tokens were given; a repeat rate needs at least 2")
    return float(np.sum(counts * (counts - 1.0)) / (total * (total - 1.0)))


def sample_tokens(rate: float, length: int, seed: int = 0) -> np.ndarray:
    """Tokens drawn uniformly from 1/r symbols, so that two locations agree with probability r; r = 0 repeats none."""
    check_repeat_rate(rate)
    if rate == 0.0:
        return np.arange(length)
    return np.random.default_rng(seed).integers(0, max(round(1.0 / rate), 1), size=length)
