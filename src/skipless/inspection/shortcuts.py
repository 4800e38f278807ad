"""Faults of shortcuts: missing, cut off, added twice, or with something on them that the other blocks do not have."""

from statistics import median, median_low

from skipless.inspection.evidence import CUTS, Evidence, Fault, blame
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.siblings import others_than

LEFT = 0.25  # `kept` of a block without its shortcut
_KEPT = 0.4  # and of its siblings
_WHOLE = 0.6  # `kept` where a shortcut is plainly there
_GAINS = (0.6, 1.5)  # of a plain shortcut, as doubling the input shows it: 1 but for what branches make of it


def no_shortcut(evidence: Evidence, each: BlockSignal) -> Fault | None:
    """A location that is not itself any more after one block, where the other blocks keep it."""
    kept = evidence.numbers(lambda s: s.kept)
    others = others_than(kept, each.block)
    if each.block not in kept or kept[each.block] > LEFT or len(others) < 2:
        return None
    if median_low(others) < _KEPT and not (len(kept) < 6 and max(others) > _KEPT):
        return None
    text = (
        f"Block {each.block} ({each.name}) does not carry its input on: of what tells locations apart it keeps "
        f"{kept[each.block]:.2f}, the others {median(others):.2f}."
    )
    look = f"Look for the shortcut of {each.name}: a sum that is missing or misplaced, or locations in another order."
    return blame(each, "collapse", text, look)


def cut_shortcut(evidence: Evidence) -> Fault | None:
    """From the output backwards, the first shortcut that carries what is read, but no gradient back."""
    back = evidence.numbers(lambda s: s.kept_back)
    for each in reversed(evidence.signals[1:]):
        others = others_than(back, each.block)
        lost = (each.kept or 0.0) > _WHOLE and back.get(each.block, 1.0) < LEFT
        if lost and len(others) > 1 and median_low(others) > _WHOLE:
            text = (
                f"The shortcut of block {each.block} ({each.name}) hands no gradient back: of the one that reaches it, "
                f"it keeps {back[each.block]:.2f}, the others {median(others):.2f}."
            )
            return blame(each, "vanishing", text, f"Look at the shortcut of {each.name} for {CUTS}.")
    return None


def other_gain(evidence: Evidence, each: BlockSignal) -> Fault | None:
    """A shortcut that doubles less or more than its input when that is doubled, where those of the others do just that.

    Branches that normalise what they read add the same as before, so this is of the shortcut alone.
    """
    gains = evidence.wirings(lambda wired: wired.gain)
    others = others_than(gains, each.block)
    if each.block not in gains or len(others) < 2:
        return None
    low, high = _GAINS
    if not all(low < gain < high for gain in (median(others), median_low(others))):
        return None
    if sum(low < gain < high for gain in others) <= len(others) / 2 or low < gains[each.block] < high:
        return None
    gain, usual = gains[each.block], median(others)
    text = (
        f"Block {each.block} ({each.name}) passes on what it reads with a factor of {gain:.2g}, the other blocks with "
        f"{usual:.2g}."
    )
    if abs(gain) < 1 - low:
        text = (
            f"Block {each.block} ({each.name}) gives nearly the same for twice its input, the other blocks do not: its "
            "shortcut is normalised or missing."
        )
    look = (
        f"Look for the shortcut of {each.name}: a sum that adds its input twice, a factor, a sum that is missing, or a "
        "norm on the stream itself instead of on a branch."
    )
    return blame(each, "fault", text, look)


def other_factor(evidence: Evidence, each: BlockSignal) -> Fault | None:
    """A shortcut with a factor that the others do not have: what is read is added twice, or is normalised."""
    factors = evidence.numbers(lambda s: s.coefficient)
    others = others_than(factors, each.block)
    if each.block not in factors or len(others) < 2 or not median(others) > 0.5 or each.block == 1:
        return None  # a first block may bring the embedding to another size, and learns to
    usual = median(others)
    varies = median(abs(factor / usual - 1.0) for factor in others)  # a trained network's may
    ratio = factors[each.block] / usual
    if not ratio > 1.5 + 4 * varies and not 0.25 < ratio < 0.8 - 4 * varies:
        return None
    text = (
        f"Block {each.block} ({each.name}) passes on what it reads with a factor of {factors[each.block]:.2g}, the "
        f"other blocks with {usual:.2g}."
    )
    look = (
        f"Look for the shortcut of {each.name}: a sum that adds its input twice, a factor, or a norm on the stream "
        "itself instead of on a branch."
    )
    return blame(each, "fault", text, look)
