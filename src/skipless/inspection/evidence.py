"""Evidence: what a verdict on a block is read from, the verdict, and what sets parameters apart from their siblings."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high, median_low

from skipless.inspection.gradients import Weight
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.wiring import Wired
from skipless.theory.certificate import Verdict, VerdictKind

CUTS = "detach(), .data, torch.no_grad(), numpy, argmax or round"  # what keeps a gradient from passing
_SIZE = 8.0  # a matrix this many times larger or smaller than its siblings
_NORM_SIZE = 30.0  # the same of a norm's weights, which training moves further
_BIAS = 1e3  # the same of a bias
_WITHIN = 30.0  # the same of a parameter without siblings, beside its block's others
_MATRICES = ("query", "key", "value", "output", "mlp")


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, and what to change or to look at. at_fault: whether the verdict's block itself is to blame, rather
    than the place where a signal is lost that many blocks wear down."""

    verdict: Verdict
    advice: str
    at_fault: bool = False


@dataclass(frozen=True)
class Evidence:
    """What faults are read from: the signals of a stack, input first, and by block from 1 the parameters, the norms of
    their matrices' gradients, the names of those that nothing depends on, and how the block is put together. leaks:
    what `probe` found, by kind. cousins: parameters of the network's other stacks, which stand in for siblings where a
    stack has few; kin: signals of those of their blocks that are of the same class, for the same end. norms: by block
    the names of those that do not normalise. padded: whether rows have padding."""

    signals: tuple[BlockSignal, ...]
    weights: Sequence[Mapping[str, Weight]] = ()
    gradients: Sequence[Mapping[str, float]] = ()
    unused: Sequence[Sequence[str]] = ()
    wired: Sequence[Wired] = ()
    leaks: Mapping[str, int] = field(default_factory=dict)
    cousins: Sequence[Mapping[str, Weight]] = ()
    kin: Sequence[BlockSignal] = ()
    norms: Sequence[Sequence[str]] = ()
    padded: bool = False

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.signals) - 1

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


def odd_parameters(evidence: Evidence, block: int) -> Iterator[tuple[str, str]]:
    """(label, what is odd) of a block's parameters, from 1, as read from those of the same name in other blocks, and of
    other stacks where these are few."""
    weights, cousins = evidence.weights, evidence.cousins
    if not weights:
        return
    own = weights[block - 1]
    for label, weight in own.items():
        owners = {b: w for b, w in enumerate(weights, start=1) if label in w}
        if len(owners) < 3:
            owners |= {-b: w for b, w in enumerate(cousins, start=1) if label in w}
        sizes = {b: w[label].size for b, w in owners.items() if math.isfinite(w[label].size)}
        if block not in sizes:
            continue
        if len(owners) == 1 and (found := _odd_within(own, label)):
            yield label, found
        elif weight.matrix:
            yield from _odd_matrix(label, block, owners, sizes)
        elif weight.group == "norm" and not label.endswith("bias"):
            if weight.size == 0 and _most(size > 0 for size in others_than(sizes, block)):
                yield label, "is zero, unlike those of the other blocks"
            elif block in apart(sizes, _NORM_SIZE, low=False):
                yield label, f"is {_times(sizes, block)} larger than those of the other blocks"
            elif weight.size > 0.5 and not any(others_than(sizes, block)) and len(sizes) > 2:  # one is added to it
                yield label, f"is {weight.size:.3g} where those of the other blocks are zero"
        elif label.endswith("bias") and weight.size > max(100, _BIAS * median(others_than(sizes, block) or [1.0])):
            yield label, f"is larger than those of the other blocks: {weight.size:.3g}"


def _odd_matrix(
    label: str, block: int, owners: Mapping[int, Mapping[str, Weight]], sizes: Mapping[int, float]
) -> Iterator[tuple[str, str]]:
    """owners: the parameters of every block that has the matrix; sizes: of those of it that are finite."""
    weight, others = owners[block][label], others_than(sizes, block)
    if weight.size == 0:
        if not others:  # zero queries are a known way to start
            if weight.group in ("key", "value", "output", "mlp"):
                yield label, "is zero"
        elif _most(size > 0 for size in others):
            yield label, "is zero, unlike those of the other blocks"
        elif weight.group == "value":  # zero queries and outputs are known ways to start; values are not
            yield label, f"is zero, as in {[*sizes.values()].count(0.0)} of {len(sizes)} blocks"
    elif weight.alike and weight.group in _MATRICES and label.endswith("weight"):
        yield label, "has rows that are all the same, so that its units compute the same, and learn the same"
    elif weight.empty > 0 and _most(w[label].empty == 0 for b, w in owners.items() if b != block) and others:
        yield label, f"has {weight.empty} rows or columns that are all zero (a head or an expert that is out of use)"
    elif len(sizes) > 2:
        larger, smaller = (apart(sizes, _SIZE, low=low) for low in (False, True))
        if larger and smaller and len(larger) + len(smaller) == len(sizes):  # the half that is less like its blocks
            one, two = (median(_beside(owners[b], label) for b in half) for half in (larger, smaller))
            larger, smaller = (larger, set()) if one >= two else (set(), smaller)
        if block in larger | smaller:
            word = "larger" if block in larger else "smaller"
            yield label, f"is {_times(sizes, block)} {word} than those of the other blocks"


def _beside(own: Mapping[str, Weight], label: str) -> float:
    """How far a matrix is from the others of its block, in powers of e of what it multiplies its input by."""
    gains = {n: w.size * w.reads**0.5 for n, w in own.items() if w.matrix and 0 < w.size < math.inf}
    others = [gain for n, gain in gains.items() if n != label]
    return abs(math.log(gains[label] / median(others))) if label in gains and others else 0.0


def _odd_within(own: Mapping[str, Weight], label: str) -> str:
    """What is odd about a parameter of the only block that has it, beside that block's others of its kind.

    Matrices that start at zero, as the last of a branch may, are small for a while: only queries, keys and values are
    called so.
    """
    weight = own[label]
    kin = {n: w for n, w in own.items() if w.matrix == weight.matrix and (w.group in _MATRICES or not w.matrix)}
    if not weight.matrix:
        last = label.rpartition(".")[2]  # norms have biases under many names, and these start at zero
        kin = {n: w for n, w in kin.items() if w.group == "norm" and n.rpartition(".")[2] == last != "bias"}
    others = [w for n, w in kin.items() if n != label and 0 < w.size < math.inf]
    if label not in kin or len(others) < (3 if weight.matrix else 1):
        return ""
    if not weight.matrix and weight.size == 0:
        return "is zero, unlike the other norms of its block"
    ratio = weight.size * weight.reads**0.5 / median(w.size * w.reads**0.5 for w in others)
    if ratio > _WITHIN:
        return f"is large: it multiplies what it reads by {ratio:.3g} times what its block's others of its kind do"
    if 0 < ratio < 1 / _WITHIN and weight.group in ("query", "key", "value"):
        return f"is small: it multiplies what it reads by {ratio:.3g} times what its block's other matrices do"
    if weight.matrix and weight.empty and weight.size > 0 and not any(w.empty for w in others):
        return f"has {weight.empty} rows or columns that are all zero (a head or an expert that is out of use)"
    return ""


def others_than(sizes: Mapping[int, float], block: int) -> list[float]:
    """The numbers of all blocks but one."""
    return [size for b, size in sizes.items() if b != block]


def _most(facts: Iterable[bool]) -> bool:
    facts = list(facts)
    return 2 * sum(facts) > len(facts)


def _times(sizes: Mapping[int, float], block: int) -> str:
    ratio = sizes[block] / median(others_than(sizes, block))
    return f"{max(ratio, 1 / ratio):.3g} times"


def apart(numbers: Mapping[int, float], factor: float, *, low: bool) -> set[int]:
    """Blocks whose number is `factor` times smaller (larger) than the median and than the nearest that are not so.

    The second keeps out what changes with depth by degrees.
    """
    if len(numbers) < 3 and not (low and len(numbers) == 2 and min(numbers.values()) == 0):
        return set()  # of two that differ either may be the odd one
    middle = median_high(numbers.values()) if low else median_low(numbers.values())
    if not 1e-12 < middle < math.inf:
        return set()
    far = {b for b, value in numbers.items() if (value * factor < middle if low else value > factor * middle)}
    kept = [b for b in numbers if b not in far]
    found = set()
    for block in far:
        beside = [max((b for b in kept if b < block), default=None), min((b for b in kept if b > block), default=None)]
        near = [numbers[b] for b in beside if b is not None]
        if all(numbers[block] * factor < value if low else numbers[block] > factor * value for value in near):
            found.add(block)
    return found
