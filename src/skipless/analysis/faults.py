"""A single bad block: one that differs from both of its neighbours by orders of magnitude."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skipless.analysis.inspection import BlockSignal
from skipless.theory.certificate import Verdict

# Squared norms change by less than this in one block of a sound network, also where the first block of a Post-LN
# network brings a large embedding to unit norm.
_NORM_JUMP = 1e4
# A gradient, or a matrix, this much smaller than in both neighbours.
_DIP = 1e-4
# 1 − spread of attention that is uniform up to rounding. A small embedding before the first norm comes to about 1e-5.
_UNIFORM = 1e-9


@dataclass(frozen=True)
class Fault:
    """The verdict on one block, and what to look at there."""

    block: int
    verdict: Verdict
    advice: str


def first_fault(signals: Sequence[BlockSignal]) -> Fault | None:
    """The first faulty block: dead values or outputs, uniform attention, or a jump in norm; else None."""
    for each in signals[1:]:
        for rule in (_dead_values, _uniform_attention, _norm_jump):
            fault = rule(signals, each)
            if fault is not None:
                return fault
    return None


def _dead_values(signals: Sequence[BlockSignal], each: BlockSignal) -> Fault | None:
    """W_V = 0 leaves W_O without a gradient, W_O = 0 leaves W_V without; sizes tell them also without gradients."""
    for group, partner, symbol in (("value", "output", "W_V"), ("output", "value", "W_O")):
        empty = _dips(signals, each.block, lambda s, g=group: s.parameter_sizes.get(g))
        silent = _dips(signals, each.block, lambda s, g=partner: s.parameter_gradients.get(g))
        if empty or silent:
            text = (
                f"Attention of block {each.block} ({each.name}) gives nothing: its {group}s ({symbol}) are zero or "
                "nearly so, unlike those of the blocks around it."
            )
            look = f"Look at {symbol} of {each.name}: its initialisation, a mask, a frozen or unloaded weight."
            return Fault(each.block, Verdict("vanishing", each.block, text), look)
    return None


def _uniform_attention(signals: Sequence[BlockSignal], each: BlockSignal) -> Fault | None:
    left = _distance_to_uniform(each)
    distance = left is not None and left < _UNIFORM and _dips(signals, each.block, _distance_to_uniform)
    empty = any(_dips(signals, each.block, lambda s, g=g: s.parameter_sizes.get(g)) for g in ("query", "key"))
    silent = all(_dips(signals, each.block, lambda s, g=g: s.parameter_gradients.get(g)) for g in ("query", "key"))
    if not (distance or empty or silent):
        return None
    text = (
        f"Attention of block {each.block} ({each.name}) is uniform: it averages all locations whatever they hold, "
        "while the blocks around it attend to content."
    )
    look = f"Look at queries and keys of {each.name}: zero weights, a scale of 0, or scores that are overwritten."
    return Fault(each.block, Verdict("collapse", each.block, text), look)


def _norm_jump(signals: Sequence[BlockSignal], each: BlockSignal) -> Fault | None:
    before, after = signals[each.block - 1].norm_mean, each.norm_mean
    if not before > 0 or not after > 0:
        return None
    ratio = after / before
    if ratio < 1 / _NORM_JUMP:
        kind, word = "vanishing", "drops"
    elif ratio > _NORM_JUMP and each.block > 1:  # a small embedding may grow at once in the first block
        kind, word = "explosion", "jumps"
    else:
        return None
    text = f"The squared norm {word} at block {each.block} ({each.name}) by a factor of {ratio:.2g}, in one block."
    look = (
        f"Look at {each.name}: a factor on its output, or weights {ratio**0.5:.2g} times as large as its neighbours'."
    )
    return Fault(each.block, Verdict(kind, each.block, text), look)


def _distance_to_uniform(each: BlockSignal) -> float | None:
    return None if each.attention_spread is None else max(1.0 - each.attention_spread, 0.0)


def _dips(signals: Sequence[BlockSignal], block: int, value: Callable[[BlockSignal], float | None]) -> bool:
    """Whether the value is below _DIP times that of both neighbours; at an end, of the two next blocks."""
    last = len(signals) - 1
    near = [b for b in (block - 1, block + 1) if 1 <= b <= last]
    if len(near) == 1:
        near += [b for b in (block - 2, block + 2) if 1 <= b <= last][:1]
    here, others = value(signals[block]), [value(signals[b]) for b in near]
    if here is None or not others:
        return False
    return all(other is not None and 1e-12 < other < math.inf and here < _DIP * other for other in others)
