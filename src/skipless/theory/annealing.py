"""Taking skips away while a network trains: the weights between a normalised skip and none."""

import math

from skipless.theory.feasibility import check_skip_weight
from skipless.theory.propagation import Skip


def rotated_skip(start: float, share: float) -> Skip:
    """α = cos θ, β = sin θ with θ even in `share`, from arccos(start) at 0 to ½π, no skip, at 1.

    α² + β² = 1 throughout, so that a unit-norm branch keeps unit norms (Sec. 3.4). α falls slowly where it is large,
    which is where a deep network feels it: over L blocks α^{2L} of the stream's energy passes by all branches.
    """
    check_skip_weight(start)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share}; it runs from 0, the skip at its start, to 1, none left")
    if share == 1.0:
        return Skip()
    angle = math.acos(start) + share * math.asin(start)
    return Skip(math.cos(angle), math.sin(angle))
