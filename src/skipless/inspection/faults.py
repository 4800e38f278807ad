"""Faults of single blocks: what sets one apart from its siblings, and the parameter that does it.

A rule reads the evidence on one block and gives a Diagnosis or None. A new one goes into _RULES at the end of this
file, behind those that name a deeper cause of what it sees; rules of shortcuts and attention are in branches.py, and
what may be meant is no fault but a note (notes.py).
"""

import math
from itertools import pairwise

from skipless.inspection.branches import (
    LEFT,
    attention,
    cut_shortcut,
    looks_back_only,
    mixed_heads,
    no_shortcut,
    other_factor,
    other_gain,
    other_scale,
)
from skipless.inspection.evidence import CUTS, Diagnosis, Evidence, at, blame, listed, nothing_left
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.siblings import apart, is_adapter, odd_parameters, starts_at_zero
from skipless.theory.certificate import VerdictKind

# Squared norms change by less than this in one block of a sound network, also where the first block of a Post-LN
# network brings a large embedding to unit norm.
_NORM_JUMP = 1e4
_GRADIENT_JUMP = 1e6  # the same of squared gradients
_INPUT_GRADIENT_JUMP = 1e10  # before the first block, whose norm divides by the size of a small embedding
_UNDERFLOW = 1e-12  # below this squared gradients may come to 0 by rounding
_DIP = 1e-4  # a gradient this much smaller than its siblings'
_ALIKE = 0.999  # |cosine| of locations on one line
_APART = 0.9  # cosine of locations that one block has still to make alike
_ONE = 1.01  # effective rank where one direction is left
_SCORES = 1e-8  # gradient of queries and keys over that of values where attention does not depend on its scores
_NEARLY = 0.995  # mean cosine of locations that are still told apart
_LESS = 0.1  # of a squared gradient, on its way from one block to the one before it
# Largest entry over the root mean square where entries are cut off; √3 where they are uniform, 3 or more where not.
_BOUNDED = 1.6
_CUT = 1.1  # how much larger entries of what is read are; sums of sines lie about the bound by themselves


def first_fault(evidence: Evidence) -> Diagnosis | None:
    """The first faulty block, or None.

    What is not finite comes first, since nothing behind it can be judged; then a parameter, which is a cause, while
    what is measured may be the effect of another block; then what sets a block apart, from the first block on; last a
    gradient that is spoilt on its way back.
    """
    fault = _not_finite(evidence)
    if fault is not None:
        return fault
    tried = (
        rule(evidence, each) for rules in ([_parameters], _RULES) for each in evidence.signals[1:] for rule in rules
    )
    return next(filter(None, tried), None) or cut_shortcut(evidence) or _gradient_jump(evidence)


def _not_finite(evidence: Evidence) -> Diagnosis | None:
    spoiled = next((each for each in evidence.signals if not math.isfinite(each.norm_max)), None)
    last = evidence.depth if spoiled is None else spoiled.block
    for block, weights in enumerate(evidence.weights[:last], start=1):
        for label, weight in weights.items():
            if not math.isfinite(weight.size):
                each = evidence.signals[block]
                text = f"{label} of block {each.which} holds entries that are not finite"
                text += "." if spoiled is None else f", and so do activations from block {spoiled.block} on."
                look = (
                    f"Load or initialise {each.name}.{label} again; look for what wrote it: a step that diverged, a "
                    "damaged file."
                )
                return blame(each, "explosion", text, look)
    if spoiled is None or spoiled.block == 0:
        return None
    before = evidence.signals[spoiled.block - 1].norm_max
    large = "Its input is already large, so it may overflow: use a wider format. " if before > 1e8 else ""
    look = (
        f"{large}Look in {spoiled.name} for a division by zero, a root or a logarithm of 0, a mask that hides every "
        "key of a location, and half precision. Its parameters are finite."
    )
    return blame(spoiled, "explosion", f"Activations are not finite {at(spoiled)}.", look)


def _cut(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A block that gives something outside the graph, or hands no gradient back though one reaches it."""
    if each.attached is False:
        text = f"No gradient passes block {each.which}: what it gives is detached from the graph."
        return blame(each, "vanishing", text, f"Look in {each.name} for {CUTS} on its way to the output.")
    before, arrived = evidence.signals[each.block - 1], each.gradient_mean
    back = _handed_back(before, each)
    passes = back != 0 and (back is not None or not before.attached)
    if arrived is None or not _UNDERFLOW < arrived < math.inf or passes:
        return None
    if each.joined is False and before.attached:
        pair = f"block {before.which} to block {each.which}"
        text = f"No gradient passes from {pair}: what the second reads is detached from what the first gives."
        look = f"Look between {before.name} and {each.name} for {CUTS}: in the loop over blocks, or in a hook."
        return blame(each, "vanishing", text, look)
    text = f"Gradients are all zero before block {each.which}: they reach it, and it hands none back."
    silent = _silent(evidence, each)
    named = f" {listed(silent)} get no gradient either." if silent else ""
    look = f"Look in {each.name} for {CUTS} on what it reads, or a factor of zero.{named}"
    return blame(each, "vanishing", text, look)


def _handed_back(before: BlockSignal, each: BlockSignal) -> float | None:
    """Squared norm of the gradient that a block hands to the one before it."""
    return before.gradient_mean if each.gradient_back is None else each.gradient_back


def _gradient_jump(evidence: Evidence) -> Diagnosis | None:
    """From the output backwards, the first block whose backward pass spoils the gradient by itself."""
    for before, each in reversed(list(pairwise(evidence.signals))):
        arrived, back = each.gradient_mean, _handed_back(before, each)
        if arrived is None or back is None or not 0 < arrived < math.inf:
            continue
        through = f"on the way back through block {each.which}"
        if not math.isfinite(back):
            look = f"Look at the backward pass of {each.name}: a root or a norm of 0, a division, half precision."
            return blame(each, "explosion", f"Gradients are not finite {through}.", look)
        ratio, (least, most) = back / arrived, _usual(before, each)
        if least < ratio < most or ratio == 0:
            continue
        kind, word = ("vanishing", "vanish") if ratio < 1 else ("explosion", "explode")
        text = f"Gradients {word} {through}: squared gradient norm {ratio:.2g} times what reaches it."
        look = f"Look at the backward pass of {each.name}: a factor, a hook, a custom function, a saturated activation."
        return blame(each, kind, text, look)
    return None


def _usual(before: BlockSignal, each: BlockSignal) -> tuple[float, float]:
    """Between which factors a block's backward pass changes squared gradients. A first block brings the embedding to
    another size, and a gradient to the inverse."""
    low, high = 1.0, 1.0
    if before.block == 0:
        low = min(each.norm_mean / before.norm_max, 1.0) if before.norm_max > 0 else 1.0
        high = max(each.norm_mean / before.norm_min, 1.0) if before.norm_min > 0 else math.inf
    least, most = max(low / _GRADIENT_JUMP, 1 / _INPUT_GRADIENT_JUMP), min(high * _GRADIENT_JUMP, _INPUT_GRADIENT_JUMP)
    return least, most


def _zeros(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    before, dead = evidence.signals[each.block - 1], nothing_left(each)
    if dead is not None:
        look = f"Look for a mask that {each.name} multiplies its output by."
        if each.norm_mean == 0:
            look = f"Look at what {each.name} multiplies its output by.{_suspect(evidence, each)}"
        return Diagnosis(dead, look, at_fault=True)
    if each.norm_min == 0 < before.norm_min:
        text = f"Some locations are zero {at(each)}, though none was before it."
        look = (
            f"Look for a mask or an index in {each.name} that leaves locations out, and for experts that drop tokens."
        )
        return blame(each, "vanishing", text, look)
    return None


def _parameters(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A parameter that is zero, empty in part, or of another size than its siblings of the same name."""
    for label, why in odd_parameters(evidence, each.block):
        if (dead := _zeros(evidence, each)) is not None:
            return dead
        kind: VerdictKind = "vanishing" if why.startswith("is zero") else "fault"
        own = evidence.weights[each.block - 1]
        follows = _FOLLOWS.get(own[label].group, "") if why.startswith("is zero") and not is_adapter(own, label) else ""
        if label.endswith("bias") and why.startswith("is larger"):
            follows = " Where it is negative, an activation behind it is never on."
        also = "" if "as in" in why else _also(evidence, each, label)
        text = f"{label} of block {each.which} {why}.{also}{follows}"
        look = f"Look at {each.name}.{label}: its initialisation, a mask, a weight that was not loaded or scaled twice."
        return blame(each, kind, text, look)
    return None


def _also(evidence: Evidence, each: BlockSignal, label: str) -> str:
    """A sentence on the later blocks whose parameter of this name is odd."""
    later = range(each.block + 1, evidence.depth + 1)
    odd = [b for b in later if any(name == label for name, _ in odd_parameters(evidence, b))]
    return f" It is odd in block{'s' * (len(odd) > 1)} {listed([str(b) for b in odd])} too." if odd else ""


_FOLLOWS = {
    "query": " So its attention is uniform: it averages all locations whatever they hold.",
    "key": " So its attention is uniform: it averages all locations whatever they hold.",
    "value": " So its attention gives nothing.",
    "output": " So its attention gives nothing.",
}


def _suspect(evidence: Evidence, each: BlockSignal) -> str:
    """A sentence that names the block's odd parameter, if it has one."""
    odd = next(odd_parameters(evidence, each.block), None)
    return "" if odd is None else f" Its {odd[0]} {odd[1]}."


def _idle_norm(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A norm that does not bring each location to one size."""
    idle = evidence.norms[each.block - 1] if evidence.norms else ()
    if not idle:
        return None
    text = (
        f"{listed(idle)} of block {each.which} {'does' if len(idle) == 1 else 'do'} not normalise: where "
        "one location is made larger than another, so is what the norm gives, or others change with it."
    )
    look = (
        f"Look at the axis over which {idle[0]} of {each.name} takes its mean (of channels, not of locations or rows), "
        "at its epsilon, and at whether it does anything at all."
    )
    return blame(each, "fault", text, look)


def _not_read(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A block whose output nothing reads: the next one that gets a gradient hands it to what came before both.

    Where a block behind cuts the graph, that one hands nothing back, and is the one at fault.
    """
    behind = next((s for s in evidence.signals[each.block + 1 :] if s.gradient_mean is not None), None)
    if each.gradient_mean is not None or not each.attached or behind is None or not behind.gradient_back:
        return None
    text = (
        f"What block {each.which} gives is not read: no gradient comes back to it, though block "
        f"{behind.block} hands one back."
    )
    look = f"Look at the loop over blocks for {each.name}(x) without x = before it, and for an input that is kept."
    return blame(each, "fault", text, look)


def _gradient_factor(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A factor on the gradient between a block and the next, which hands back more than arrives."""
    following = evidence.signals[each.block + 1 : each.block + 2]
    arrived, handed = each.gradient_mean, following[0].gradient_back if following else 1.0
    if arrived is None or handed is None or not _UNDERFLOW < handed < math.inf or not 0 < arrived < _LESS * handed:
        return None
    text = (
        f"The gradient that reaches block {each.which} is {(arrived / handed) ** 0.5:.2g} times what "
        f"{'the next block hands back' if following else 'was sent to it'}: something between them multiplies it."
    )
    look = f"Look for a hook on what {each.name} gives, or for a function that scales gradients."
    return blame(each, "fault", text, look)


def _on_the_stream(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """An activation on the stream itself, where a branch was meant: no entry is negative, or none is much larger than
    the typical one, though entries of what is read are."""
    before = evidence.signals[each.block - 1]
    if each.least is not None and before.least is not None and before.least < 0 <= each.least:
        text = (
            f"No entry of what block {each.which} gives is negative, though entries of what it reads are: an "
            "activation lies on the stream itself."
        )
        look = f"Look in {each.name} for an activation behind the sum with the shortcut; it belongs inside a branch."
        return blame(each, "fault", text, look)
    if each.outlier < _BOUNDED <= before.outlier and each.outlier * _CUT <= before.outlier:
        text = (
            f"No entry of what block {each.which} gives is larger than {each.outlier:.3g} times the typical "
            f"one, where it reads up to {before.outlier:.3g} times: the stream itself is clipped, or goes through a "
            "bounded activation."
        )
        look = (
            f"Look in {each.name} for clamp, tanh or sigmoid behind the sum with the shortcut; they belong in a branch."
        )
        return blame(each, "fault", text, look)
    return None


def _norm_jump(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A factor on the whole stream: at every location, since a few may grow by as much in sound networks."""
    before, after = evidence.signals[each.block - 1], evidence.signals[each.block + 1 : each.block + 2]
    if not before.norm_min > 0 or not each.norm_min > 0:
        return None
    mean, least = each.norm_mean / before.norm_mean, each.norm_min / before.norm_min
    recovers = bool(after) and after[0].norm_min > _NORM_JUMP * each.norm_min
    first = 10.0 if each.block == 1 else 1.0
    if each.block == 1 and not (each.kept or 0.0) > 0.7 * mean**0.5:
        first = math.inf  # a branch that is added to a small embedding, not a factor on both
    if mean < (30 if recovers else 1) / _NORM_JUMP:
        kind, word = "vanishing", "drops"
    elif mean > first * _NORM_JUMP and least > first * _NORM_JUMP / 10:
        kind, word = "explosion", "jumps"
    else:
        return None
    text = f"The squared norm {word} at block {each.which} by a factor of {mean:.2g}, in one block."
    factor = f"a factor on its output, {mean**0.5:.2g} or so"
    look = f"Look at {each.name}: {factor}, since its parameters are like its siblings'."
    if each.kept is not None and each.kept <= LEFT:
        look = f"Look for the shortcut of {each.name}, which does not carry its input on, or for {factor}."
    return blame(each, kind, text, look)


def in_one_channel(each: BlockSignal) -> bool:
    """Whether a single channel holds most of the norm: then kurtosis and squared outlier are of one size."""
    return each.kurtosis > 10 and each.kurtosis > 0.1 * each.outlier**2


def _alike(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    before = evidence.signals[each.block - 1]
    if in_one_channel(each) and not in_one_channel(before) and each.cosine_mean > _ALIKE:
        text = f"One channel holds nearly all of the norm {at(each)}, so that all locations point the same way."
        look = f"Look at the largest entry of what {each.name} adds: a bias, a row of its last matrix, a norm's weight."
        return blame(each, "collapse", text, look)
    left, earlier = (signal.norm_mean * signal.collapse**2 for signal in (each, before))
    if each.cosine_mean > _ALIKE and before.cosine_mean < _APART and left < 0.1 * earlier:
        jump = f"the mean cosine between locations jumps to {each.cosine_mean:.4f}"
        text = f"Rank collapse {at(each)}, in one block: {jump}."
        look = f"Look in {each.name} for a mean or a sum over locations, a broadcast, or weights that ignore its input."
        return blame(each, "collapse", text, look)
    if _on_one_line(each) and not _on_one_line(before):
        text = f"All locations lie on one line {at(each)}: their cosines are 1 or −1, so that one direction is left."
        look = f"Look in {each.name} for a matrix of rank one, a width of 1 on the way, or a broadcast."
        return blame(each, "collapse", text, look)
    return None


def _on_one_line(each: BlockSignal) -> bool:
    """Whether cosines are 1 and −1. Quantiles are means over rows, which differ in how many are which."""
    if not each.cosine_quantiles or each.cosine_mean > _ALIKE:
        return False
    apart = each.cosine_mean < _APART and each.effective_rank < _ONE
    return apart or min(map(abs, each.cosine_quantiles)) > _ALIKE


def _unchanged(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """A block that hands on what it reads, unlike the others."""
    same = [_is_same(before, after) for before, after in pairwise(evidence.signals)]
    odd = 2 * sum(same) < len(same) or (len(same) == 1 and not starts_at_zero(evidence, each.block))
    if not same[each.block - 1] or not odd:
        return None
    text = f"Block {each.which} hands on what it reads unchanged: neither of its branches adds anything."
    return blame(
        each, "vanishing", text, f"Look at the factors on the branches of {each.name}, and at their last matrices."
    )


def _is_same(before: BlockSignal, after: BlockSignal) -> bool:
    """To the last digit: a branch that starts with a factor of 1e-5 is no fault."""
    alike = math.isclose(before.norm_mean, after.norm_mean, rel_tol=1e-12) and before.norm_min > 0
    return alike and after.kept is not None and abs(after.kept - 1.0) < 1e-12


def _unused(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """Parameters that nothing depends on, where the other blocks use theirs of that name."""
    if not evidence.unused or not (each.gradient_mean or 0.0) > 0:
        return None
    others = [names for block, names in enumerate(evidence.unused, start=1) if block != each.block]
    found = [n for n in evidence.unused[each.block - 1] if 2 * sum(n in names for names in others) < len(others)]
    if not found:
        return None
    text = (
        f"{listed(found)} of block {each.which} get{'s' * (len(found) == 1)} no gradient at all: nothing "
        f"that the block gives depends on {'it' if len(found) == 1 else 'them'}."
    )
    look = (
        f"Look in {each.name} for a module that is made and not called, for one that is called in its place, and for "
        f"what cuts a branch off: {CUTS}."
    )
    return blame(each, "fault", text, look)


def _no_gradient(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """Matrices that no gradient reaches though one reaches the block."""
    silent = _silent(evidence, each) if (each.gradient_mean or 0.0) > 0 else []
    if not silent:
        return None
    plural = "s" * (len(silent) == 1)
    text = f"{listed(silent)} of block {each.which} get{plural} no gradient, though one reaches the block."
    look = (
        f"Look in {each.name} for what cuts this branch off: {CUTS}, a factor of zero on it, or an activation that is "
        "never on (a bias far below zero)."
    )
    weights = evidence.weights[each.block - 1]
    if all(label in weights and weights[label].group in ("query", "key") for label in silent):
        look = (
            f"What attention gives there does not depend on its scores. Look in {each.name} for keys and values that "
            f"are cut to one key, for a mask that leaves one key, and for {CUTS} on queries, keys or weights."
        )
    return blame(each, "vanishing", text, look)


def _silent(evidence: Evidence, each: BlockSignal) -> list[str]:
    """Matrices whose gradient is gone where that of their siblings is not, or that of a whole branch.

    Gradients are taken relative to what reaches the block. A branch behind a factor that starts at zero, and that
    learns, is no fault.
    """
    own, weights = evidence.gradients[each.block - 1], evidence.weights[each.block - 1]
    found = [label for label in own if each.block in apart(_relative(evidence, label), 1 / _DIP, low=True)]
    factors = {n: w for n, w in weights.items() if not w.matrix and "bias" not in n}
    if all(weight.size == 0 for weight in factors.values() if weight.group == "norm") and not _is_same(
        evidence.signals[each.block - 1], each
    ):
        factors = {n: w for n, w in factors.items() if w.group != "norm"}  # one is added to these norms' weights
    if found or any(weight.size == 0 for weight in factors.values()) or starts_at_zero(evidence, each.block):
        return found
    branches: dict[str, list[str]] = {}
    for label in own:
        parts = label.split(".")
        numbered = len(parts) > 3 and parts[1].isdigit()  # a list of branches, not one of matrices
        branches.setdefault(".".join(parts[: 2 if numbered else 1]), []).append(label)
    dead = [labels for labels in branches.values() if len(labels) > 1 and not any(own[label] for label in labels)]
    groups, sizes = each.parameter_gradients, each.parameter_sizes
    values = groups.get("value") == 0 and sizes.get("output", 0.0) > 0 and sizes.get("value", 0.0) > 0
    cut = [n for n in own if n in weights and weights[n].group in ("query", "key", "value")] if values else []
    # where locations become alike, here or in a later block, queries and keys lose their gradient by that
    alike, ratio = max(signal.cosine_mean for signal in evidence.signals[each.block - 1 :]), each.query_key_gradient
    if not values and alike < _NEARLY and ratio is not None and ratio < _SCORES and groups["value"] > 0:
        cut = [n for n in own if n in weights and weights[n].group in ("query", "key") and weights[n].size > 0]
    return [label for labels in dead for label in labels] or cut


def _relative(evidence: Evidence, label: str) -> dict[int, float]:
    """Gradient norms of a matrix, over what reaches each block."""
    found = {}
    for each, norms in zip(evidence.signals[1:], evidence.gradients, strict=True):
        reaches = each.gradient_mean
        if label in norms and reaches is not None and 0 < reaches < math.inf and math.isfinite(norms[label]):
            found[each.block] = norms[label] / reaches**0.5
    return found


def _locations_without_gradient(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    """Rows or locations that reach the block's output but get no gradient before it."""
    before = evidence.signals[each.block - 1]
    if before.gradient_zeros is None or each.gradient_zeros is None or before.gradient_zeros >= 1:
        return None
    underflows = not (each.gradient_mean or 0.0) > _UNDERFLOW  # at one location after another
    if underflows or before.gradient_zeros < each.gradient_zeros + 0.1:
        return None
    text = (
        f"Block {each.which} leaves rows or locations out: {before.gradient_zeros:.0%} of what enters it "
        f"gets no gradient, {each.gradient_zeros:.0%} of what leaves it."
    )
    look = f"Look in {each.name} for an index that takes one row or a few locations for all, a broadcast, or a mask."
    return blame(each, "vanishing", text, look)


_LEAKS = {
    "rows": (
        "mixes the rows of the batch: a row's output changes with another row's input",
        "an operation over the first axis: a mean, a norm, an index or a reshape that takes rows for locations, or one "
        "scale for all rows, as dynamic quantisation takes",
    ),
    "copied": (
        "gives every row of the batch the same output, though their inputs differ",
        "an index or a broadcast that takes one row for all",
    ),
    "padding": (
        "sees padding: real locations change with the tokens that attention_mask hides",
        "its attention_mask: one that is not passed on, is inverted (True for padding, or for what is seen?), or has "
        "the shape of something else",
    ),
    "future": (
        "sees the future: earlier locations change with the last token",
        "its causal mask: one that is missing, shifted by one, or of the wrong sign",
    ),
}


def _leak(evidence: Evidence, each: BlockSignal) -> Diagnosis | None:
    for kind, (what, where) in _LEAKS.items():
        if evidence.seen.leaks.get(kind) == each.block:
            text = f"Block {each.which} {what}."
            return blame(each, "leak", text, f"Look in {each.name} for {where}.")
    return None


_RULES = (
    _zeros,
    _cut,
    _alike,
    _on_the_stream,
    _leak,
    _idle_norm,
    _unused,
    _not_read,
    _gradient_factor,
    mixed_heads,
    _norm_jump,
    attention,
    looks_back_only,
    other_scale,
    _unchanged,
    _no_gradient,
    _locations_without_gradient,
    no_shortcut,
    other_gain,
    other_factor,
)
