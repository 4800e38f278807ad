"""The rate's course over a run, as a factor of every group's highest rate."""

import math


def warmup_cosine(step: int, total: int, warmup: int = 4000) -> float:
    """min(t/w, ½(1 + cos(π(t−w)/(T−w)))): linear from 0 to 1, then half a cosine to exactly 0. App. H.

    step: t from 0 to total = T. The k-th update, counted from 1, takes t = k: none is spent at rate 0 but the last,
    which "reaches 0 at the final iteration". A pure function, so that resuming needs no state.
    """
    if not 0 <= warmup < total:
        raise ValueError(
            f"warmup={warmup} with total={total} steps; the rate must come down again: use 0 ≤ warmup < total, "
            f"such as {total // 10}"
        )
    if not 0 <= step <= total:
        raise ValueError(f"step={step} lies outside the schedule's 0 … {total}")
    if step < warmup:
        return step / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup)))
