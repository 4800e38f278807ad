"""Evidence: all that was measured in a stack of blocks, from which faults and notes are read; and a diagnosis."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from skipless.inspection.gradients import Weight
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.probes import Seen
from skipless.inspection.stacks import Block
from skipless.inspection.wiring import Wired
from skipless.theory.certificate import Verdict, VerdictKind

CUTS = "detach(), .data, torch.no_grad(), numpy, argmax or round"  # what keeps a gradient from passing


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, and what to change or to look at. at_fault: whether the verdict's block itself is to blame, rather
    than the place where a signal is lost that many blocks wear down."""

    verdict: Verdict
    advice: str
    at_fault: bool = False


@dataclass(frozen=True)
class Evidence:
    """A stack of a model's blocks, and its signals, input first. By block from 1: weights, the parameters; gradients,
    the norms of their matrices' gradients; unused, the names of those that nothing depends on; norms, the names of
    those that do not normalise. seen: what probes saw. cousins: parameters of the network's other stacks, which stand
    in for siblings where a stack has few; kin: signals of those of their blocks that are of the same class, for the
    same end. padded: whether rows have padding."""

    model: nn.Module
    blocks: Sequence[Block]
    signals: tuple[BlockSignal, ...]
    weights: Sequence[Mapping[str, Weight]]
    gradients: Sequence[Mapping[str, float]]
    unused: Sequence[Sequence[str]] = ()
    norms: Sequence[Sequence[str]] = ()
    seen: Seen = field(default_factory=Seen)
    cousins: Sequence[Mapping[str, Weight]] = ()
    kin: Sequence[BlockSignal] = ()
    padded: bool = False

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.signals) - 1

    @property
    def names(self) -> list[str]:
        """Blocks as sentences have them."""
        return [each.which for each in self.signals[1:]]

    @property
    def wired(self) -> Sequence[Wired]:
        """How each block is put together."""
        return self.seen.wired

    def numbers(self, value: Callable[[BlockSignal], float | None]) -> dict[int, float]:
        """A number of every block that has it."""
        return _finite(map(value, self.signals[1:]))

    def wirings(self, value: Callable[[Wired], float | None]) -> dict[int, float]:
        """The same of how blocks are put together."""
        return _finite(map(value, self.wired))


def _finite(numbers: Iterable[float | None]) -> dict[int, float]:
    return {block: n for block, n in enumerate(numbers, start=1) if n is not None and math.isfinite(n)}


def at(each: BlockSignal) -> str:
    """The place of a signal in words."""
    return "at the input, before any block" if each.block == 0 else f"at block {each.which}"


def blame(each: BlockSignal, kind: VerdictKind, text: str, advice: str) -> Diagnosis:
    """The block that a signal is of is at fault. The first words of the text name it."""
    return Diagnosis(Verdict(kind, each.block, text), advice, at_fault=True)


def nothing_left(each: BlockSignal) -> Verdict | None:
    """The verdict on a signal without two locations to compare."""
    if each.norm_mean == 0:
        return Verdict("vanishing", each.block, f"Activations are all zero {at(each)}.")
    if math.isnan(each.cosine_mean):
        text = f"Activations are zero {at(each)} but for at most one location of each row: none can be compared."
        return Verdict("vanishing", each.block, text)
    return None


def listed(labels: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def listed_blocks(names: Sequence[str]) -> str:
    """Blocks of these names, or how many where they are many; the first word is capitalised."""
    if len(names) > 4:
        return f"{len(names)} blocks, from {names[0]} to {names[-1]},"
    return f"Blocks {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"Block {names[0]}"


def others_than(sizes: Mapping[int, float], block: int) -> list[float]:
    """The numbers of all blocks but one."""
    return [size for b, size in sizes.items() if b != block]
