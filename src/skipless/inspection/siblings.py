"""Siblings: what sets one block of a stack apart from the others, in its parameters and settings.

Nothing is run for it. Odd parameters are faults; what may be meant, such as a frozen block, is a remark.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median, median_high, median_low

from torch import nn

from skipless.inspection.gradients import Weight
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.stacks import Block

_SIZE = 8.0  # a matrix this many times larger or smaller than its siblings
_NORM_SIZE = 30.0  # the same of a norm's weights, which training moves further
_BIAS = 1e3  # the same of a bias
_DROPPED = 0.9  # a share that no one drops on purpose

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


def remarks(blocks: Sequence[Block], signals: Sequence[BlockSignal], weights: Weights) -> Iterator[str]:
    """A sentence or two on each. signals start with what enters the first block; weights are by block."""
    names = [f"{number} ({name})" for number, (name, _) in enumerate(blocks, start=1)]
    yield from _frozen(blocks, names)
    yield from _dropped(blocks)
    yield from _copies(names, weights)
    yield from _without_attention(names, signals[1:], weights)


def _frozen(blocks: Sequence[Block], names: Sequence[str]) -> Iterator[str]:
    still = [not any(parameter.requires_grad for parameter in block.parameters()) for _, block in blocks]
    if any(still) and not all(still):
        which = [name for name, frozen in zip(names, still, strict=True) if frozen]
        verb = "is frozen: its parameters do" if len(which) == 1 else "are frozen: their parameters do"
        yield f"{_blocks(which)} {verb} not learn. If that is not meant: requires_grad_(True)."


def _dropped(blocks: Sequence[Block]) -> Iterator[str]:
    for name, block in blocks:
        for inner, module in block.named_modules():
            shares = {"p": getattr(module, "p", None)} if "Dropout" in type(module).__name__ else vars(module)
            for word, share in shares.items():
                if isinstance(share, int | float) and share >= _DROPPED and (word == "p" or word.endswith("dropout")):
                    place = ".".join(part for part in (name, inner, word) if part)
                    yield (
                        f"Dropout of {share:g} at {place}: in training little or nothing of it is left. An "
                        "inspection runs in evaluation mode, where nothing is dropped."
                    )
                    break


def _copies(names: Sequence[str], weights: Weights) -> Iterator[str]:
    """Sizes of random matrices differ in some digit, unless they are the same."""
    groups: dict[tuple, list[str]] = {}
    for name, own in zip(names, weights, strict=True):
        sizes = tuple((label, weight.size) for label, weight in own.items() if weight.matrix and weight.size > 0)
        if len(sizes) > 1:
            groups.setdefault(sizes, []).append(name)
    for same in groups.values():
        if len(same) > 1:
            yield (
                f"{_blocks(same)} hold the same weights. If that is not meant: look for a copy of one block, and for "
                "a checkpoint whose names are off by one."
            )


def _without_attention(names: Sequence[str], signals: Sequence[BlockSignal], weights: Weights) -> Iterator[str]:
    """One block that is built as two others are."""
    without = [index for index, each in enumerate(signals) if each.attention_spread is None]
    if len(without) != 1:
        return
    index = without[0]
    shapes = [{label: weight.entries for label, weight in own.items()} for own in weights]
    if sum(shape == shapes[index] for shape in shapes) > 2:
        yield (
            f"No attention was seen in block {names[index]}, only in the others, which are built alike. Look there for "
            "a softmax that is missing or that runs over queries instead of keys."
        )


def untied(model: nn.Module) -> Iterator[str]:
    """Whether a head that is to share the embedding's weights has its own."""
    config = getattr(model, "config", None)
    give, take = (getattr(model, f"get_{side}_embeddings", None) for side in ("output", "input"))
    if not getattr(config, "tie_word_embeddings", False) or not callable(give) or not callable(take):
        return
    head, table = give(), take()
    weight = getattr(head, "weight", None)
    if weight is None or not isinstance(table, nn.Embedding) or weight.shape != table.weight.shape:
        return
    if weight.data_ptr() != table.weight.data_ptr():
        yield (
            "The head has weights of its own, though the config says that it shares the embedding's "
            "(tie_word_embeddings). Call model.tie_weights()."
        )


def _blocks(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{len(names)} blocks, from {names[0]} to {names[-1]},"
    return f"Blocks {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"Block {names[0]}"
