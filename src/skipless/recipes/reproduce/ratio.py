"""How many times as many steps: runs of several lengths against one loss, each with a schedule of its own length."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Steps needed over the usual number; only a bound where no run reaches the loss ("> 3") or all do ("< 0.5")."""

    value: float
    bound: str = ""

    def text(self) -> str:
        """As a cell of a table."""
        return f"{self.bound} {self.value:.2g}".strip()


def steps_ratio(target: float, losses: Mapping[float, float]) -> Ratio | None:
    """The multiple at which the loss reaches `target`, from losses at some multiples.

    The smallest multiple that reaches it, interpolated from the one before it: logarithm of the loss against logarithm
    of the length. None without any run.
    """
    known = sorted((multiple, loss) for multiple, loss in losses.items() if math.isfinite(loss))
    if not known or not math.isfinite(target):
        return None
    reached = next((index for index, (_, loss) in enumerate(known) if loss <= target), None)
    if reached is None:
        return Ratio(known[-1][0], ">")
    if reached == 0:
        exact = known[0][1] == target
        return Ratio(known[0][0], "" if exact else "<")
    (low, above), (high, below) = known[reached - 1], known[reached]
    share = (math.log(above) - math.log(target)) / (math.log(above) - math.log(below))
    return Ratio(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))


def next_multiple(ladder: tuple[float, ...], target: float, losses: Mapping[float, float]) -> float | None:
    """The next length to try: up from 1 until the target is reached, down from 1 until it is not; None when done."""
    reached = {multiple: loss <= target for multiple, loss in losses.items()}
    if 1.0 not in reached:
        return 1.0
    upwards = [multiple for multiple in sorted(ladder) if multiple > 1.0]
    downwards = [multiple for multiple in sorted(ladder, reverse=True) if multiple < 1.0]
    path, until = (downwards, False) if reached[1.0] else (upwards, True)
    for multiple in path:
        if multiple not in reached:
            return multiple
        if reached[multiple] is until:
            return None
    return None
