"""Faults inside a block: of its shortcut (missing, cut off, added twice, changed) and of its attention."""

import math
from itertools import pairwise
from statistics import median, median_low

from skipless.inspection.evidence import CUTS, Diagnosis, Evidence, blame, others_than
from skipless.inspection.inspection import BlockSignal

LEFT = 0.25  # `kept` of a block without its shortcut
_KEPT = 0.4  # and of its siblings
_WHOLE = 0.6  # `kept` where a shortcut is plainly there
_GAINS = (0.6, 1.5)  # of a plain shortcut, as doubling the input shows it: 1 but for what branches make of it
_PLAIN = 0.1  # how near to 1 the gain of a shortcut without a factor comes
# 1 − spread of attention that is uniform up to rounding. A small embedding without a norm before it comes to 1e-11.
_UNIFORM = 1e-13
_SATURATED = 0.03  # spread of attention that chooses one key
_STILL_APART = 0.8  # mean cosine of locations that attention can choose between
_MADE_UP = 0.1  # how near the product of two blocks' factors comes to 1 where the second takes the first one's back
_CHANGES = "a sum that adds its input twice, a factor, or a norm on the stream itself instead of on a branch"
_CHOOSING = 0.12  # spread below which attention of all blocks together is called saturated


def no_shortcut(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A location that is not itself any more after one block, where the other blocks keep it."""
    kept = evidence.numbers(lambda s: s.kept)
    others = others_than(kept, each.block)
    if len(others) < 2:
        others += [s.kept for s in evidence.kin if s.kept is not None and math.isfinite(s.kept)]
        if not others or median_low(others) < _WHOLE:
            return None  # of another stack, so it has to be plain
    if each.block not in kept or kept[each.block] > LEFT or len(others) < 2:
        return None
    if median_low(others) < _KEPT and not (len(kept) < 6 and max(others) > _KEPT):
        return None
    text = (
        f"Block {each.which} does not carry its input on: of what tells locations apart it keeps "
        f"{kept[each.block]:z.2f}, the others {median(others):.2f}."
    )
    look = f"Look for the shortcut of {each.name}: a sum that is missing or misplaced, or locations in another order."
    return blame(each, "fault", text, look)


def cut_shortcut(evidence: Evidence) -> Diagnosis | None:
    """From the output backwards, the first shortcut that carries what is read, but no gradient back."""
    back = evidence.numbers(lambda s: s.kept_back)
    for each in reversed(evidence.signals[1:]):
        others = others_than(back, each.block)
        lost = (each.kept or 0.0) > _WHOLE and back.get(each.block, 1.0) < LEFT
        if lost and len(others) > 1 and median_low(others) > _WHOLE:
            text = (
                f"The shortcut of block {each.which} hands no gradient back: of the one that reaches it, "
                f"it keeps {back[each.block]:z.2f}, the others {median(others):.2f}."
            )
            return blame(each, "vanishing", text, f"Look at the shortcut of {each.name} for {CUTS}.")
    return None


def other_gain(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
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
    text = f"Block {each.which} passes on what it reads with a factor of {gain:.2g}, the other blocks with {usual:.2g}."
    if abs(gain) < 1 - low:
        text = (
            f"Block {each.which} gives nearly the same for twice its input, the other blocks do not: its "
            "shortcut is normalised or missing."
        )
    return blame(each, "fault", text, f"Look for the shortcut of {each.name}: a sum that is missing, {_CHANGES}.")


def other_factor(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A shortcut with a factor that the others do not have: what is read is added twice, or is normalised."""
    factors = evidence.numbers(lambda s: s.coefficient)
    others = others_than(factors, each.block)
    if each.block not in factors or len(others) < 2 or not median(others) > 0.5 or each.block == 1:
        return None  # a first block may bring the embedding to another size, and learns to
    if abs(evidence.wirings(lambda wired: wired.gain).get(each.block, 0.0) - 1.0) < _PLAIN:
        return None  # a branch that learned to add what it reads
    usual = median(others)
    varies = median(abs(factor / usual - 1.0) for factor in others)  # a trained network's may
    ratio = factors[each.block] / usual
    if not ratio > 1.5 + 4 * varies and not 0.25 < ratio < 0.8 - 4 * varies:
        return None
    if each.block == 2 and abs(factors.get(1, 0.0) / usual * ratio - 1.0) < _MADE_UP:
        each = evidence.signals[1]  # whose factor the second block's norm takes back
    text = (
        f"Block {each.which} passes on what it reads with a factor of {factors[each.block]:.2g}, the "
        f"other blocks with {usual:.2g}."
    )
    return blame(each, "fault", text, f"Look for the shortcut of {each.name}: {_CHANGES}.")


def attention(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """Attention that is uniform, or that chooses one key, where that of the other blocks does neither."""
    spread = each.attention_spread
    if spread is None or math.isnan(spread):
        return None
    place = f"Attention of block {each.which}"
    others = others_than(evidence.numbers(lambda s: s.attention_spread), each.block)
    if spread < _SATURATED and (not others or median(others) > 10 * _SATURATED):
        where, first, own = "on one key, whatever they hold", each.attention_first or 0.0, each.attention_own or 0.0
        where = "on the first location" if first > 0.99 else "on itself" if own > 0.99 else where
        text = (
            f"{place} puts every location's weight {where}: its softmax is saturated and hands no gradient to scores."
        )
        if own > 0.99:
            text = f"{place} lets every location see only itself: the softmax is saturated."
        look = f"Look at the scale of scores in {each.name}, at its mask or bias, and at the size of queries and keys."
        return blame(each, "vanishing", text, look)
    apart_yet = {after.block for before, after in pairwise(evidence.signals) if before.cosine_mean < _STILL_APART}
    every = [s for b, s in evidence.numbers(lambda s: s.attention_spread).items() if b in apart_yet]
    if each.block in apart_yet and len(every) > 1 and median(every) < _CHOOSING and max(every) < 2 * _CHOOSING:
        text = (
            f"Attention is saturated in all blocks whose locations differ, from block {each.which} on: "
            f"every location puts nearly all of its weight on one key (entropy {median(every):.0%} of a uniform "
            "one's), so that scores hardly learn."
        )
        look = (
            "Look at how queries and keys are drawn (too large: a deviation of 1/√width is usual), at the scale of "
            "scores, 1/√(head width), and at norms that are missing before them."
        )
        return blame(each, "vanishing", text, look)
    distances = {b: 1.0 - s for b, s in evidence.numbers(lambda s: s.attention_spread).items()}
    if evidence.signals[each.block - 1].cosine_mean > 0.99:
        return None  # locations that are alike are attended to alike
    if 1.0 - spread < _UNIFORM and median([max(d, 0.0) for d in distances.values()]) > 1e4 * _UNIFORM:
        text = (
            f"{place} is uniform: it averages all locations whatever they hold, while the blocks around it attend to "
            "content."
        )
        look = f"Look at queries and keys of {each.name}: zero weights, a scale of 0, or scores that are overwritten."
        return blame(each, "collapse", text, look)
    return None


def looks_back_only(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A causal mask in one block, where the others look both ways."""
    ahead = evidence.numbers(lambda s: s.attention_ahead)
    others = others_than(ahead, each.block)
    if ahead.get(each.block) != 0 or len(others) < 2 or not min(others) > 0.01:
        return None
    text = f"Block {each.which} sees only what came before, while the other blocks look both ways."
    return blame(each, "fault", text, f"Look in {each.name} for a causal mask, or is_causal=True.")


def other_scale(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """Scores that are multiplied by something else than in the other blocks, which agree."""
    scales = evidence.wirings(lambda wired: wired.scale)
    others = others_than(scales, each.block)
    if each.block not in scales or len(others) < 2 or not min(others) > 0 or max(others) > 1.01 * min(others):
        return None
    ratio = scales[each.block] / median(others)
    if 1 / 1.3 < ratio < 1.3:
        return None
    text = (
        f"Block {each.which} multiplies its scores, products of queries and keys, by {ratio:.3g} times "
        "what the other blocks do."
    )
    look = (
        f"Look at the scale of scores in {each.name}: 1/√(head width), forgotten, applied twice, or of another width."
    )
    return blame(each, "fault", text, look)


_MIXED = {
    "result": (
        "what a head finds at one location is handed to another",
        "what attention gives, (rows, heads, T, head width): it needs transpose(1, 2) before reshape(rows, T, width)",
    ),
    "values": (
        "a head reads pieces of other locations for values",
        "queries, keys and values: view(rows, T, heads, head width) first, and then transpose(1, 2)",
    ),
}


def mixed_heads(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """Heads that are taken for locations by a reshape."""
    mixed = evidence.wired[each.block - 1].mixed if evidence.wired else ""
    if not mixed:
        return None
    what, where = _MIXED[mixed]
    text = f"Block {each.which} mixes heads with locations: {what}."
    return blame(each, "fault", text, f"Look in {each.name} at the reshape of {where}.")
