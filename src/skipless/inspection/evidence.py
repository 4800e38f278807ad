"""Evidence: what a verdict on a block is read from, and the verdict with its advice."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skipless.inspection.gradients import Weight
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.wiring import Wired
from skipless.theory.certificate import Verdict, VerdictKind

CUTS = "detach(), .data, torch.no_grad(), numpy, argmax or round"  # what keeps a gradient from passing


@dataclass(frozen=True)
class Fault:
    """The verdict on one block, and what to look at there."""

    block: int
    verdict: Verdict
    advice: str


@dataclass(frozen=True)
class Evidence:
    """What faults are read from: the signals of a stack, input first, and by block from 1 the parameters, the norms of
    their matrices' gradients, the names of those that nothing depends on, and how the block is put together. leaks:
    what `probe` found, by kind. cousins: parameters of the network's other stacks, which stand in for siblings where a
    stack has few."""

    signals: Sequence[BlockSignal]
    weights: Sequence[Mapping[str, Weight]] = ()
    gradients: Sequence[Mapping[str, float]] = ()
    unused: Sequence[Sequence[str]] = ()
    wired: Sequence[Wired] = ()
    leaks: Mapping[str, int] = field(default_factory=dict)
    cousins: Sequence[Mapping[str, Weight]] = ()

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.signals) - 1

    def numbers(self, value: Callable[[BlockSignal], float | None]) -> dict[int, float]:
        """A number of every block that has it."""
        found = {each.block: value(each) for each in self.signals[1:]}
        return {block: number for block, number in found.items() if number is not None and math.isfinite(number)}

    def wirings(self, value: Callable[[Wired], float | None]) -> dict[int, float]:
        """The same of how blocks are put together."""
        found = {block: value(each) for block, each in enumerate(self.wired, start=1)}
        return {block: number for block, number in found.items() if number is not None and math.isfinite(number)}


def at(each: BlockSignal) -> str:
    """The place of a signal in words."""
    return "at the input, before any block" if each.block == 0 else f"at block {each.block} ({each.name})"


def blame(each: BlockSignal, kind: VerdictKind, text: str, advice: str) -> Fault:
    """The fault of the block that a signal is of."""
    return Fault(each.block, Verdict(kind, each.block, text), advice)


def listed(labels: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
