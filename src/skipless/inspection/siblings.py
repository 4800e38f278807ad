"""Siblings: what sets the parameters of one block apart from those of the same name in the others."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median, median_high, median_low

from skipless.inspection.gradients import Weight

_SIZE = 8.0  # a matrix this many times larger or smaller than its siblings
_NORM_SIZE = 30.0  # the same of a norm's weights, which training moves further
_BIAS = 1e3  # the same of a bias
_MATRICES = ("query", "key", "value", "output", "mlp")

Weights = Sequence[Mapping[str, Weight]]


def odd_parameters(weights: Weights, cousins: Weights, block: int) -> Iterator[tuple[str, str]]:
    """(label, what is odd) of a block's parameters, from 1, as read from those of the same name in other blocks.

    cousins are the parameters of the network's other stacks, which stand in where there are few.
    """
    if not weights:
        return
    own = weights[block - 1]
    for label, weight in own.items():
        every = {b: w[label] for b, w in enumerate(weights, start=1) if label in w}
        if len(every) < 3:
            every |= {-b: w[label] for b, w in enumerate(cousins, start=1) if label in w}
        sizes = {b: w.size for b, w in every.items() if math.isfinite(w.size)}
        if block not in sizes:
            continue
        if weight.matrix:
            yield from _odd_matrix(label, weight, block, every, sizes)
        elif weight.group == "norm" and not label.endswith("bias"):
            if weight.size == 0 and _most(size > 0 for size in others_than(sizes, block)):
                yield label, "is zero, unlike those of the other blocks"
            elif block in apart(sizes, _NORM_SIZE, low=False):
                yield label, f"is {_times(sizes, block)} larger than those of the other blocks"
            elif weight.size > 0.5 and not any(others_than(sizes, block)) and len(sizes) > 2:  # one is added to it
                yield label, f"is {weight.size:.3g} where those of the other blocks are zero"
        elif (
            label.endswith("bias")
            and weight.size > 100
            and weight.size > _BIAS * median(others_than(sizes, block) or [1.0])
        ):
            yield label, f"is larger than those of the other blocks: {weight.size:.3g}"


def _odd_matrix(
    label: str, weight: Weight, block: int, every: Mapping[int, Weight], sizes: Mapping[int, float]
) -> Iterator[tuple[str, str]]:
    others = others_than(sizes, block)
    if weight.size == 0:
        if not others:  # zero queries are a known way to start
            if weight.group in ("key", "value", "output", "mlp"):
                yield label, "is zero"
        elif _most(size > 0 for size in others):
            yield label, "is zero, unlike those of the other blocks"
        elif weight.group == "value":  # zero queries and outputs are known ways to start; values are not
            yield (
                label,
                f"is zero, as in {len(sizes) - sum(size > 0 for size in sizes.values())} of {len(sizes)} blocks",
            )
    elif weight.alike and weight.group in _MATRICES and label.endswith("weight"):
        yield label, "has rows that are all the same, so that its units compute the same, and learn the same"
    elif weight.empty > 0 and _most(each.empty == 0 for b, each in every.items() if b != block) and others:
        yield label, f"has {weight.empty} rows or columns that are all zero (a head or an expert that is out of use)"
    elif len(sizes) > 2:
        for low, word in ((False, "larger"), (True, "smaller")):
            if block in apart(sizes, _SIZE, low=low):
                yield label, f"is {_times(sizes, block)} {word} than those of the other blocks"


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
