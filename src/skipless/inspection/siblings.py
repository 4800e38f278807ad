"""Siblings: blocks that are built alike and read against each other, in what they hold and in what they call.

Nothing here needs a number of the signal. `odd_parameters` are so far from their siblings that the block is at fault.
`set_apart` points out any other block that differs from all others, which agree. It may be meant, so that these are
notes; where blocks differ by turns, or the first is built otherwise, nothing is said.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median, median_high, median_low
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from skipless.inspection.evidence import Evidence, listed, listed_blocks, others_than
from skipless.inspection.gradients import Weight, shared_name
from skipless.inspection.stacks import TORCHS, Block
from skipless.inspection.statistics import fetched
from skipless.inspection.wiring import ACTIVATIONS, INPUT

_SIZE = 8.0  # a matrix this many times larger or smaller than its siblings
_NORM_SIZE = 30.0  # the same of a norm's weights, which training moves further
_BIAS = 1e3  # the same of a bias
_WITHIN = 30.0  # the same of a parameter without siblings, beside its block's others
_MATRICES = ("query", "key", "value", "output", "mlp")
_FEWEST = 4  # blocks, of which three have to agree
_RATIO = math.log(1.5)  # of sizes: random matrices of one draw are nearer to each other
_SPREAD = 3.0  # the same, over what the others differ by
_EXACT = 0.01  # the same where the others do not differ at all
_AGREE = math.log(1.3)  # by how much those of the others may differ
_ZEROS = 0.1  # share of a matrix's entries
_CALLS = 6  # that are listed
_MOST_ENTRIES = 2**22  # of a buffer, over all blocks


def odd_parameters(evidence: Evidence, block: int) -> Iterator[tuple[str, str]]:
    """(label, what is odd) of a block's parameters, from 1, as read from those of the same name in other blocks, and of
    other stacks where these are few."""
    own = evidence.weights[block - 1]
    for label, weight in own.items():
        owners = {b: w for b, w in enumerate(evidence.weights, start=1) if label in w}
        if len(owners) < 3:
            owners |= {-b: w for b, w in enumerate(evidence.cousins, start=1) if label in w}
        sizes = {b: w[label].size for b, w in owners.items() if math.isfinite(w[label].size)}
        if block not in sizes or (weight.size == 0 and len(owners) == 1 and starts_at_zero(evidence, block)):
            continue
        if len(owners) == 1 and (found := _odd_within(own, label)):
            yield label, found
        elif weight.matrix:
            yield from _odd_matrix(label, block, owners, sizes)
        else:
            yield from _odd_vector(label, block, weight, sizes)


def _odd_vector(label: str, block: int, weight: Weight, sizes: Mapping[int, float]) -> Iterator[tuple[str, str]]:
    """Of a norm's weights, and of a bias."""
    others = others_than(sizes, block)
    if weight.group == "norm" and not label.endswith("bias"):
        if weight.size == 0 and _most(size > 0 for size in others):
            yield label, "is zero, unlike those of the other blocks"
        elif block in apart(sizes, _NORM_SIZE, low=False):
            yield label, f"is {_times(weight.size / median(others))} than those of the other blocks"
        elif weight.size > 0.5 and not any(others) and len(sizes) > 2:  # one is added to it
            yield label, f"is {weight.size:.3g} where those of the other blocks are zero"
    elif label.endswith("bias") and weight.size > max(100, _BIAS * median(others or [1.0])):
        yield label, f"is larger than those of the other blocks: {weight.size:.3g}"


def starts_at_zero(evidence: Evidence, block: int) -> bool:
    """Whether what a block adds lies behind matrices or factors of zero, a known way to start: gradients reach none of
    its matrices but those."""
    weights, gradients = evidence.weights[block - 1], evidence.gradients[block - 1]
    zero = {n: w.matrix for n, w in weights.items() if w.size == 0 and w.group != "norm" and "bias" not in n}
    reached, zeros = {n for n, gradient in gradients.items() if gradient != 0}, {shared_name(n) for n in zero}
    learns = any(evidence.signals[block].parameter_gradients.values())
    return learns and reached <= zeros and (len(reached) > 0 or not all(zero.values()))


def _odd_matrix(
    label: str, block: int, owners: Mapping[int, Mapping[str, Weight]], sizes: Mapping[int, float]
) -> Iterator[tuple[str, str]]:
    """owners: the parameters of every block that has the matrix; sizes: of those of it that are finite."""
    weight, others = owners[block][label], others_than(sizes, block)
    if weight.size == 0:
        adapts = is_adapter(owners[block], label)
        if not others:  # zero queries are a known way to start
            if weight.group in ("key", "value", "output", "mlp") and not adapts:
                yield label, "is zero"
        elif _most(size > 0 for size in others):
            yield label, "is zero, unlike those of the other blocks"
        elif weight.group == "value" and not adapts:  # zero queries and outputs are known ways to start; values are not
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
            yield label, f"is {_times(weight.size / median(others))} than those of the other blocks"


def is_adapter(own: Mapping[str, Weight], label: str) -> bool:
    """Whether a matrix of attention is one of several that make up a projection, as of an adapter beside its base: the
    innermost module that holds another of its kind, not zero, holds no others but those that are fused with it."""
    group, parts = own[label].group, label.partition(" (")[0].split(".")
    fused = {"query", "key", "value", "other"} if group in ("query", "key", "value") else {group, "other"}
    for depth in range(len(parts) - 1, 0, -1):
        inside = [w for n, w in own.items() if w.matrix and n.startswith(".".join(parts[:depth]) + ".")]
        if any(w.group == group and w.size > 0 for w in inside):
            return group != "mlp" and {w.group for w in inside} <= fused
    return False


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


def _most(facts: Iterable[bool]) -> bool:
    facts = list(facts)
    return 2 * sum(facts) > len(facts)


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


def set_apart(evidence: Evidence) -> Iterator[str]:
    """A sentence or two on each block that differs from the others."""
    names = evidence.names
    yield from _sizes(evidence)
    yield from _emptied(evidence)
    if len(names) >= _FEWEST:
        held = [_held(block) for _, block in evidence.blocks]
        odd = sorted(_differences(held), key=lambda each: each[:2])
        yield from _numbers(names, odd)
        yield from _classes(names, odd)
        yield from _lacking(names, odd, held)
        yield from _buffers(evidence)
        yield from _operations(evidence, held)
    yield from _counted(evidence.blocks)
    yield from _copies(evidence)


def _odd(values: Sequence[Hashable]) -> int | None:
    """The one of four or more that differs from all others, which agree."""
    counts = Counter(values)
    if len(values) < _FEWEST or len(counts) != 2 or min(counts.values()) != 1:
        return None
    return values.index(min(counts, key=lambda value: counts[value]))


def _sizes(evidence: Evidence) -> Iterator[str]:
    """Parameters of another size than those of the same name in the other blocks."""
    weights = evidence.weights
    for block, name in enumerate(evidence.names, start=1):
        said = {label for label, _ in odd_parameters(evidence, block)}
        ratios = {n: r for n in weights[block - 1] if n not in said and (r := _ratio(weights, n, block)) is not None}
        if not ratios:
            continue
        matrices = [n for n, w in weights[block - 1].items() if w.matrix]
        odd = [n for n in matrices if n in ratios]
        if len(odd) > 3 and len(odd) == len(matrices):
            ratio = median(ratios[n] for n in odd)
            yield (
                f"All matrices of block {name} are {_times(ratio)} than those of the other blocks, which agree: it was "
                "drawn or scaled otherwise. If that is not meant: initialise it as the others are."
            )
            continue
        which = ", ".join(f"{label} ({_times(ratio)})" for label, ratio in [*ratios.items()][:3])
        more = f" and {len(ratios) - 3} more" if len(ratios) > 3 else ""
        yield (
            f"Block {name} has parameters of another size than the other blocks, which agree: {which}{more}. If that "
            "is not meant: look at how they are initialised, scaled (twice?) and loaded."
        )


def _ratio(weights: Sequence[Mapping[str, Weight]], label: str, block: int) -> float | None:
    """A parameter's size over that of the others, where it is odd; infinite where all others are zero."""
    others = [w[label].size for b, w in enumerate(weights, start=1) if b != block and label in w]
    own = weights[block - 1][label].size
    if len(others) < _FEWEST - 1 or not all(map(math.isfinite, [*others, own])):
        return None
    if not any(others):
        return math.inf if own > 0 else None
    if min(others) <= 0 or own <= 0:
        return None
    spread, ratio = math.log(max(others) / min(others)), own / median(others)
    least = max(_RATIO, _SPREAD * spread) if spread > 0 else _EXACT
    return ratio if spread < _AGREE and abs(math.log(ratio)) > least else None


def _emptied(evidence: Evidence) -> Iterator[str]:
    """A matrix of which a part is zero, where those of the other blocks are whole."""
    weights = evidence.weights
    for label, weight in weights[0].items() if len(weights) >= _FEWEST else ():
        if not weight.matrix or not all(label in own for own in weights):
            continue
        zeros = [own[label].zeros for own in weights]
        odd = [index for index, share in enumerate(zeros) if share > _ZEROS]
        if len(odd) == 1 and weights[odd[0]][label].size > 0:
            yield (
                f"{zeros[odd[0]]:.0%} of the entries of {label} of block {evidence.names[odd[0]]} are zero, where "
                "those of the other blocks are not. If that is not meant: look for a mask, for pruning, and for a "
                "damaged file."
            )


def _times(ratio: float) -> str:
    if math.isinf(ratio):
        return "where theirs are zero"
    return f"{ratio:.3g} times larger" if ratio > 1 else f"{1 / ratio:.3g} times smaller"


Held = Mapping[tuple[str, str], Hashable]  # of a module's name and an attribute's
Difference = tuple[int, tuple[str, str], Any, Any]  # block from 0, where, its own value, that of all others


def _held(block: nn.Module) -> Held:
    """What every module of a block is: its class, its plain values, its functions, and its parameters' shapes."""
    found: dict[tuple[str, str], Hashable] = {}
    for name, module in block.named_modules():
        found[name, "class"] = type(module).__name__
        for word, value in vars(module).items():
            own = not word.startswith("_") and word != "training" and not hasattr(type(module), word)
            if own and (plain := _plain(value)) is not None:
                found[name, word] = plain
        for word, parameter in module.named_parameters(recurse=False):
            found[name, f"shape of {word}"] = tuple(parameter.shape)
            found[name, f"dtype of {word}"] = str(parameter.dtype)
    return found


def _plain(value: Any) -> Hashable:
    if isinstance(value, bool | int | float | str):
        return (type(value).__name__, value)
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return ("function", value.__name__)
    return ("None", None) if value is None else None


def _differences(held: Sequence[Held]) -> Iterator[Difference]:
    for place in {place for each in held for place in each}:
        values = [each.get(place) for each in held]
        odd = _odd(values)
        if odd is not None:
            yield odd, place, values[odd], values[odd - 1]


def _numbers(names: Sequence[str], found: Sequence[Difference]) -> Iterator[str]:
    """A number or a function that one block has and no other. Whole numbers may be flags and windows, and are not said
    to be odd."""
    for odd, (module, word), own, others in found:
        kinds = [each[0] if isinstance(each, tuple) and len(each) == 2 else "" for each in (own, others)]
        dtype = word.startswith("dtype of ")
        if kinds in (["float", "float"], ["function", "function"]) or (
            dtype and own is not None and others is not None
        ):
            place = ".".join(part for part in (module, word.removeprefix("dtype of ")) if part)
            mine, theirs = (each if dtype else each[1] for each in (own, others))
            what = "its dtype" if dtype else "it"
            yield (
                f"{place} of block {names[odd]} differs from that of the other blocks: {what} is {_short(mine)}, and "
                f"{_short(theirs)} in all others. If that is not meant: give it the same."
            )


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")


def _classes(names: Sequence[str], found: Sequence[Difference]) -> Iterator[str]:
    """A module of another class in one block, whose parameters have the shapes of the others'. Where one of the two
    does nothing, the block is made so, unless it is an activation that is missing."""
    shaped = {odd for odd, (_, word), *_ in found if word.startswith("shape of ")}
    for odd, (module, word), own, others in found:
        if word != "class" or odd in shaped or own is None or others is None:
            continue
        if "Identity" in (own, others) and not any(each in f"{own}{others}".lower() for each in ACTIVATIONS):
            continue
        yield (
            f"{module or 'Block'} of block {names[odd]} is {_article(own)}, where all other blocks have "
            f"{_article(others)}. If that is not meant: build it as the others are."
        )


def _lacking(names: Sequence[str], found: Sequence[Difference], held: Sequence[Held]) -> Iterator[str]:
    """A parameter that one block's module does not have, though it is of the others' class."""
    for odd, (module, word), own, others in found:
        alike = len({each.get((module, "class")) for each in held}) == 1
        if own is None and others is not None and alike and word.startswith("shape of "):
            yield (
                f"{module} of block {names[odd]} has no {word.removeprefix('shape of ')}, and that of all other blocks "
                "has one. If that is not meant: build it as the others are, and see that it is loaded."
            )


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def _buffers(evidence: Evidence) -> Iterator[str]:
    """A tensor that is kept but does not learn, such as a mask or frequencies, unlike that of all other blocks."""
    held = [dict(block.named_buffers()) for _, block in evidence.blocks]
    stacks: dict[str, Tensor] = {}
    for label in held[0]:
        each = [buffers[label] for buffers in held if label in buffers]
        alike = len(each) == len(held) and len({(b.shape, b.dtype, b.device) for b in each}) == 1
        apart = len({b.data_ptr() for b in each}) > 1 and not each[0].is_meta
        if alike and apart and 0 < each[0].numel() * len(each) <= _MOST_ENTRIES and not each[0].is_complex():
            stacks[label] = torch.stack([b.flatten() for b in each])
    same = [(stack[:, None] == stack[None, [0, -1]]).all(-1) for stack in stacks.values()]
    for label, equal in zip(stacks, fetched(same), strict=True):
        first, last = (_odd([bool(value) for value in equal[:, side]]) for side in (0, 1))
        odd = last if first == 0 else first  # where the first is the odd one, it alone equals itself
        if odd is not None:
            yield (
                f"{label}, a buffer of block {evidence.names[odd]}, holds other values than in all other blocks, where "
                "they are the same. If that is not meant: look at how it is made, and at a file that it was loaded "
                "from."
            )


_KINDS = {
    "add": "a sum",
    "sub": "a difference",
    "mul": "a product",
    "truediv": "a division",
    "linear": "a matrix",
    "softmax": "a softmax over attention's scores",
    **dict.fromkeys(("view_as_complex", "cos", "sin"), "a rotation by position"),
    "arange": "positions",
    "dropout": "a dropout",
    "to": "a cast",
    "neg": "a change of sign",
    "masked_fill": "a mask",
    "scaled_dot_product_attention": "attention",
    "layer_norm": "a norm",
    "rms_norm": "a norm",
    **dict.fromkeys(ACTIVATIONS, "an activation"),
}


def _operations(evidence: Evidence, held: Sequence[Held]) -> Iterator[str]:
    """A block that is built as all others and calls other functions of torch, or with other numbers."""
    called = [each.operations for each in evidence.wired]
    if len(called) != evidence.depth:
        return
    odd = _odd([frozenset(each.items()) for each in called])
    if odd is None or any(block == odd for block, *_ in _differences(held)) or any("expert" in n for n, _ in held[odd]):
        return  # built otherwise, so it is meant; experts are called as tokens come
    common = called[odd - 1]
    more, less = called[odd] - common, common - called[odd]
    parts = [f"It has, beyond theirs: {_counts(more)}."] if more else []
    parts += [f"It lacks: {_counts(less)}."] if less else []
    if any(INPUT in call for call in more | less):
        parts.append("So something in it reads what the block reads, where the others read a sum, or the other way.")
    yield (
        f"Block {evidence.names[odd]} is built as the other blocks are and computes otherwise. {' '.join(parts)} If "
        "that is not meant: look there for what is done twice, left out, or done in another way."
    )


def _counts(calls: Counter[str]) -> str:
    words = []
    for call, count in calls.items():
        plain, read, _ = call.replace("()", "").partition(INPUT)
        kind = _KINDS.get(plain.partition("(")[0])
        words.append(f"{f'{kind} ({plain})' if kind else plain}{read}{f' {count} times' if count > 1 else ''}")
    return "; ".join(words[:_CALLS]) + (f" and {len(words) - _CALLS} more" if len(words) > _CALLS else "")


@torch.no_grad()
def _copies(evidence: Evidence) -> Iterator[str]:
    """Matrices that several blocks hold alike, each its own. Those that all blocks start with may be made so, unless
    they are all there is."""
    names, weights = evidence.names, evidence.weights
    parameters = [dict(block.named_parameters()) for _, block in evidence.blocks]
    pairs: list[tuple[str, int, int, Tensor]] = []
    matrices = [label for label, weight in weights[0].items() if weight.matrix and weight.size > 0]
    for label in matrices:
        sizes: dict[float, int] = {}  # of random matrices they differ in some digit
        for index, own in enumerate(weights):
            first = sizes.setdefault(own[label].size, index) if label in own else index
            one, two = (parameters[each].get(label.partition(" (")[0]) for each in (first, index))
            if first != index and one is not None and two is not None and one.data_ptr() != two.data_ptr():
                pairs.append((label, first, index, (one == two).all()))
    groups: dict[str, dict[int, list[int]]] = {}
    for (label, first, index, _), same in zip(pairs, fetched([same for *_, same in pairs]), strict=True):
        if same:
            groups.setdefault(label, {}).setdefault(first, [first]).append(index)
    found: dict[tuple[int, ...], list[str]] = {}
    for label, own in groups.items():
        for same in own.values():
            found.setdefault(tuple(same), []).append(label)
    for same, labels in found.items():
        every = len(labels) == len(matrices) > 1
        owners = sum(labels[0] in own for own in weights)  # that one block differs from all others is another note
        if every or len(same) < owners - (owners > 3):
            which, what = listed_blocks([names[each] for each in same]), "weights" if every else listed(labels)
            look = "look for a copy of one block, and for a checkpoint whose names are off by one."
            if all(type(block) in TORCHS for _, block in evidence.blocks):
                look = (
                    "draw each block's anew, since torch's nn.TransformerEncoder and Decoder start with copies of one."
                )
            yield f"{which} hold the same {what}. If that is not meant: {look}"


_INDEX = ("layer_idx", "layer_id", "layer_index", "layer_number")


def _counted(blocks: Sequence[Block]) -> Iterator[str]:
    """Two blocks that hold the same number as their own, by which a cache tells them apart."""
    for word in _INDEX:
        found: dict[str, list[Any]] = {}
        for _, block in blocks:
            for name, module in block.named_modules():
                if isinstance(value := getattr(module, word, None), int):
                    found.setdefault(name, []).append(value)
        for name, values in found.items():
            if len(values) == len(blocks) > 1 and len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                owners = [label for (label, _), value in zip(blocks, values, strict=True) if value == twice]
                yield (
                    f"{listed(owners)} have the same {'.'.join(filter(None, (name, word)))}, {twice}: a cache of keys "
                    "and values that is kept by it mixes them up. Number blocks from 0 on."
                )
                return
