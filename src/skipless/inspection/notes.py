"""Notes: what may be meant, or takes no signal away, and so is no verdict.

A note reads the evidence on a stack and gives sentences; a new one goes into _ON_STACK at the end of this file. One on
how blocks are put together is an entry of _WIRED; one on a block that differs from the others belongs in siblings.py;
one on the whole model is a function that `of_model` calls.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from skipless.inspection.branches import LEFT
from skipless.inspection.evidence import CUTS, Evidence, listed, listed_blocks
from skipless.inspection.gradients import reaches
from skipless.inspection.inputs import own_network, readable
from skipless.inspection.siblings import set_apart
from skipless.inspection.stacks import plain_lists
from skipless.inspection.statistics import fetched
from skipless.inspection.wiring import Wired

_DROPPED = 0.9  # a share that no one drops on purpose
_BOTH_WAYS = ("ForMaskedLM", "ForTokenClassification", "ForImageClassification", "VisionModel")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SUM = 0.02  # by how much weights may miss a sum of 1
_FACTORS = (0.2, 0.75)  # of all shortcuts: below, the stream is normalised; above, it may be weighted
_MANY = 64  # numbers that do not lie between 0 and 1 by chance
_BYTES = 32  # the largest number of an image that is not of bytes
_TABLES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # what makes a stream of ids, sound or images
_EPSILON = 1e-2  # of a norm: usual are 1e-12 to 1e-5


def on_stack(evidence: Evidence) -> Iterator[str]:
    """A sentence or two on each thing about a stack of blocks."""
    return chain.from_iterable(note(evidence) for note in _ON_STACK)


def _probed(evidence: Evidence) -> Iterator[str]:
    seen = evidence.seen
    if seen.note:
        yield seen.note
    if seen.ordered is False:
        yield (
            "It does not see positions: the same tokens in another order give the same. Add positions, or look at "
            "those that it has: they may be the same for all locations. A set needs none."
        )
    if seen.hardly_mixed:
        yield (
            "Locations hardly see each other: with other tokens before it, the last one moves by "
            f"{seen.context:.1e} of its norm. Look at the size of the token embedding beside what blocks add to it, "
            "and for factors on their branches, such as a LayerScale."
        )
    if seen.unsteady is not None:
        yield (
            f"Block {evidence.names[seen.unsteady - 1]} does not give the same twice for the same input, though the "
            "model is in evaluation mode. Look there for a dropout that is always on (F.dropout needs "
            "training=self.training) and for other random numbers. What the model sees was not asked."
        )
    if seen.drowned:
        yield (
            f"Tokens hardly matter: behind the first block, rows of other tokens differ by {seen.told_apart:.1%} of "
            "their norm. Look at the size of the token embedding beside that of positions and biases added to it."
        )
    if seen.read is False:
        yield (
            "What the model gives does not change with the last token, so it is read from an earlier location, which "
            "has not seen what follows it. Where one location is to stand for all, read the last one."
        )
    if seen.early:
        yield (
            "What the model gives at earlier locations changes with the last token, though no block sees the future: "
            "its logits are shifted by a location. Look behind the last block for a roll or a slice; a loss shifts "
            "labels once."
        )


def _norms_of_zero(evidence: Evidence) -> Iterator[str]:
    """Norms that multiply by zero in all blocks, so that branches read nothing: no gradient reaches values. Some norms
    add one to their weights, and start at zero."""
    scales = [
        label for label, weight in evidence.weights[0].items() if weight.group == "norm" and not label.endswith("bias")
    ]
    zero = [label for label in scales if all(label in own and own[label].size == 0 for own in evidence.weights)]
    if zero and all(each.parameter_gradients.get("value") == 0 for each in evidence.signals[1:]):
        yield (
            f"Branches of every block read nothing but zeros, since {listed(zero)} of all blocks are zero. Weights of "
            "norms start at 1."
        )


def _unused(evidence: Evidence) -> Iterator[str]:
    """Parameters that no block uses."""
    if not evidence.unused:
        return
    everywhere = [n for n in evidence.unused[0] if all(n in names for names in evidence.unused)]
    if everywhere:
        verb, which = ("gets", "it") if len(everywhere) == 1 else ("get", "them")
        yield (
            f"{listed(everywhere)} of every block {verb} no gradient at all: nothing depends on {which}. If that is "
            "not meant: look for a module that is made and not called, for one that is called in its place, and for "
            f"{CUTS}."
        )


# What is seen of a block, and what is said of those that have it, with what the first of them has.
_WIRED: dict[Callable[[Wired], Sequence | bool | None], str] = {
    lambda wired: wired.straight: "what {0} gives goes to {1} as it is, so that the two are one linear map: an "
    "activation between them is missing.",
    lambda wired: wired.open_gate: "what {0} and {1} give is multiplied as it is: the activation of a gate is missing.",
    lambda wired: (
        None if all(abs(each - 1.0) < _SUM for each in wired.sums or ()) else wired.sums
    ): "the weights by which attention takes values "
    "do not sum to 1 for each query, but to {0:.2g} … {1:.2g}. Look for a softmax that is missing, runs over another "
    "axis than that of keys, or is followed by a mask or a factor.",
    lambda wired: wired.double: "a softmax reads what a softmax gives. Leave one of them out.",
    lambda wired: wired.behind: "an activation ({1}) reads what {0} gives, the last matrix of a branch, so that the "
    "branch adds nothing below a bound. It belongs between the two matrices.",
}


def _wired(evidence: Evidence) -> Iterator[str]:
    """How blocks are put together."""
    for seen, words in _WIRED.items():
        every = zip(evidence.names, evidence.wired, strict=False)
        found = {name: value for name, wired in every if (value := seen(wired))}
        if found:
            first = next(iter(found.values()))
            yield f"{_in_blocks([*found])} {words.format(*(first if isinstance(first, tuple) else ()))}"


def _first_hidden(evidence: Evidence) -> Iterator[str]:
    """A key that no query sees."""
    blind = [each.which for each in evidence.signals[1:] if each.attention_first == 0]
    if blind and not evidence.padded:
        yield (
            f"{_in_blocks(blind)} no location puts any weight on the first one: a mask hides it. If that "
            "is not meant: look for a mask that is off by one, or made for another token."
        )


def _scaled(evidence: Evidence) -> Iterator[str]:
    """A scale of scores that all blocks have and that is one of those that come of mistakes, unless the model's config
    states it."""
    scales, wired = [each.scale for each in evidence.wired if each.scale], next(iter(evidence.wired), Wired())
    if wired.head_width < 2 or not scales or max(scales) > 1.001 * min(scales):
        return
    config = getattr(getattr(evidence.model, "config", None), "__dict__", {})
    stated = [
        v for n, v in config.items() if isinstance(v, int | float) and any(w in n for w in ("scal", "multiplier"))
    ]
    factor = max(scales) / wired.head_width**0.5
    if any(v > 0 and any(math.isclose(factor, each, rel_tol=1e-3) for each in (v, v**-0.5)) for v in stated):
        return
    known = {
        wired.head_width**-0.5: "one over the width of a head: the scale may be applied twice. µP does so on purpose",
        wired.heads**-0.5: "one over the root of the whole width",
        float(wired.head_width): "the root of the width of a head, by which they are to be divided",
    }
    for value, words in known.items():
        if abs(max(scales) / value - 1.0) < 1e-3 and abs(value - 1.0) > 1e-3:
            yield (
                f"Scores of every block are multiplied by {factor:.4g}, {words}. The usual "
                "scale is one over the root of the width of a head."
            )
            return


def _constants(evidence: Evidence) -> Iterator[str]:
    """Weights of norms that are all one number, as at the start, and not 1; or 0, to which some norms add one."""
    norms = [(n, w) for own in evidence.weights for n, w in own.items() if w.group == "norm" and "bias" not in n]
    sizes, labels = [w.size for _, w in norms], [*dict.fromkeys(n for n, _ in norms)]
    if len(sizes) < 4 or not 0 < min(sizes) <= max(sizes) < (1 + 1e-6) * min(sizes) or abs(sizes[0] - 1.0) < 1e-3:
        return
    yield (
        f"{listed(labels)} of all blocks are {sizes[0]:.3g} throughout, where weights of norms start at 1. Look at how "
        "norms are initialised, and whether one was added to weights that hold it already."
    )


def _gains(evidence: Evidence) -> Iterator[str]:
    """A factor on the shortcut of every block."""
    gains = [each.gain for each in evidence.wired if each.gain is not None]
    if len(gains) < max(len(evidence.wired), 2) or not _FACTORS[0] < min(gains) <= max(gains) < _FACTORS[1]:
        return
    if max(gains) < 1.1 * min(gains):
        yield (
            f"Every block passes on what it reads with a factor of {median(gains):.2g}, so that "
            f"{math.prod(gains):.2g} of what enters is left behind the last one. Look for a factor on the stream "
            "itself; one on a branch leaves the shortcut alone."
        )


def _no_shortcuts(evidence: Evidence) -> Iterator[str]:
    """A network of which no block has a shortcut. Ours says so itself."""
    kept = evidence.numbers(lambda signal: signal.kept)
    if (
        own_network(evidence.model) is None
        and len(kept) == evidence.depth
        and all(abs(each) < LEFT for each in kept.values())
    ):
        yield (
            f"{'No block carries' if len(kept) > 1 else f'Block {evidence.names[0]} does not carry'} its input on: of "
            f"what tells locations apart {median(kept.values()):z.2f} is kept, where a shortcut keeps about 1. Some "
            "networks have none by design. If that is not meant: look for the sum of a branch with what it reads."
        )


def _looks_back(evidence: Evidence) -> Iterator[str]:
    """A causal mask in every block of a model whose class says that it is to read both ways."""
    ahead, name = [each.attention_ahead for each in evidence.signals[1:]], type(evidence.model).__name__
    if name.endswith(_BOTH_WAYS) and ahead and all(weight == 0 for weight in ahead):
        yield (
            f"No block looks ahead of a location, though {name} is made to read both ways. Look for a "
            "causal mask, or is_causal=True, in the class of all blocks."
        )


def idle_outside(names: Sequence[str]) -> Iterator[str]:
    """Norms outside the blocks that do not normalise."""
    if names:
        verb = "does" if len(names) == 1 else "do"
        yield (
            f"{listed(names)} {verb} not normalise: what is given to {'it' if len(names) == 1 else 'them'} several "
            "times larger comes out larger, or other locations change with it. Look at its axis and its epsilon, and "
            "at whether it does anything at all."
        )


def not_learning(names: Sequence[str]) -> Iterator[str]:
    """Modules that are called before the blocks, to no effect."""
    if names:
        verb, what = ("is", "its parameters get") if len(names) == 1 else ("are", "their parameters get")
        yield (
            f"{listed(names)} {verb} called before the blocks, and {what} no gradient: nothing that the blocks give "
            f"depends on what is computed there. Look for a result that is not handed on, and for {CUTS}."
        )


def not_read(output: Any, last: Tensor | None, name: str) -> Iterator[str]:
    """A head that reads something else than the last block, or reads it without a gradient."""
    logits = readable(output)
    if logits is None or last is None or last.grad_fn is None or logits.grad_fn is None:
        return
    if not reaches(logits, last):
        yield (
            f"What the last block ({name}) gives is not read: nothing that the model gives depends on it, or no "
            f"gradient passes between them. Look behind the blocks for what is handed to the head, and for {CUTS}."
        )


def of_model(model: nn.Module, batch: Any, output: Any, cut: Sequence[str]) -> Iterator[str]:
    """Of the whole model, of what it reads and of what it gives. cut: first blocks whose input hands no gradient
    back."""
    yield from _untied(model)
    yield from _frozen_outside(model)
    yield from _pixels(batch)
    yield from _embedding_cut(model, cut)
    yield from _unregistered(model)
    yield from _positions(model)
    logits = readable(output)
    if logits is None:
        return
    some = logits.detach()[:2].to(torch.float32)
    if logits.shape[-1] < 2 or not bool((some >= 0).all()):
        return
    if bool((some.sum(-1) - 1.0).abs().max() < 1e-2):
        yield (
            "What the model gives are probabilities: none is negative and each location's sum to 1. Cross-entropy "
            "takes logits, since it has a softmax of its own: leave out the last one."
        )
    elif some.numel() >= _MANY and bool((some <= 1).all() & (some > 0).any()):
        yield (
            "All numbers that the model gives lie between 0 and 1, as behind a sigmoid. Cross-entropy takes logits, of "
            "any size: leave out what bounds them."
        )


def _embedding_cut(model: nn.Module, cut: Sequence[str]) -> Iterator[str]:
    tables = [
        name for name, module in model.named_modules() if isinstance(module, _TABLES) and module.weight.requires_grad
    ]
    before = [name for name in tables if not any(name.startswith(f"{block.rpartition('.')[0]}.") for block in cut)]
    if cut and before:
        yield (
            f"What enters {listed(cut)} is cut off from {listed(before)}: no gradient comes there. Look between them "
            f"for {CUTS}."
        )


@torch.no_grad()
def _positions(model: nn.Module) -> Iterator[str]:
    """Tables of positions in which one is the same as the one before it. Zeros are a known way to start."""
    tables = {n: p for n, p in model.named_parameters() if "pos" in n.lower() or "wpe" in n.lower()}
    tables = {n: p.detach().flatten(0, -2) for n, p in tables.items() if p.dim() > 1 and p.shape[-1] > 1}
    same = [((t[1:] == t[:-1]).all(-1) & t[1:].any(-1)).sum() for t in tables.values()]
    for (name, table), count in zip(tables.items(), fetched(same), strict=True):
        if count > 0:
            yield (
                f"{int(count)} of the {len(table)} rows of {name} are the same as the row before them, so that "
                "these positions are not told apart."
            )


def _frozen_outside(model: nn.Module) -> Iterator[str]:
    """An embedding that does not learn, where nearly everything else does. Positions may be given."""
    still = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _TABLES) and not module.weight.requires_grad and "pos" not in name.lower()
    ]
    others = [p.requires_grad for n, p in model.named_parameters() if n.rpartition(".")[0] not in still]
    if still and others and sum(others) > 0.9 * len(others):
        yield (
            f"{listed(still)} {'is' if len(still) == 1 else 'are'} frozen, while nearly all other parameters learn. If "
            "that is not meant: requires_grad_(True)."
        )


def _pixels(batch: Any) -> Iterator[str]:
    """Images of whole bytes, where numbers of about 1 are read."""
    images = batch.get("pixel_values") if isinstance(batch, Mapping) else batch
    if isinstance(images, Tensor) and images.dim() == 4 and images.is_floating_point() and images.shape[1] in (1, 3):
        low, high = (float(each) for each in images.aminmax())
        if low >= 0 and _BYTES < high <= 255:
            yield (
                f"Images of the batch hold numbers of {low:.3g} to {high:.3g}: bytes, it seems. Models read them "
                "divided by 255, less their mean and over their deviation: use the model's own image processor."
            )


def _unregistered(model: nn.Module) -> Iterator[str]:
    for name in plain_lists(model):
        yield (
            f"{name} is a plain list of modules: parameters(), to() and state_dict() do not see them, so an optimizer "
            "does not either. Use nn.ModuleList."
        )


def _frozen(evidence: Evidence) -> Iterator[str]:
    blocks, names = evidence.blocks, evidence.names
    still = [not any(parameter.requires_grad for parameter in block.parameters()) for _, block in blocks]
    if any(still) and not all(still):
        which = [name for name, frozen in zip(names, still, strict=True) if frozen]
        verb = "is frozen: its parameters do" if len(which) == 1 else "are frozen: their parameters do"
        yield f"{listed_blocks(which)} {verb} not learn. If that is not meant: requires_grad_(True)."
    learning = [{label: p.requires_grad for label, p in block.named_parameters()} for _, block in blocks]
    for name, own in zip(names, learning, strict=True):
        odd = [
            n
            for n, learns in own.items()
            if not learns and 2 * sum(other.get(n, False) for other in learning) > len(names)
        ]
        if odd and any(own.values()):
            yield (
                f"{listed(odd)} of block {name} {'is' if len(odd) == 1 else 'are'} frozen, while those of the other "
                "blocks learn. If that is not meant: requires_grad_(True)."
            )


def _batch_norms(evidence: Evidence) -> Iterator[str]:
    """BatchNorm in a block without a convolution."""
    for name, block in evidence.blocks:
        kinds = [(inner, module) for inner, module in block.named_modules() if isinstance(module, _BATCH_NORMS)]
        if kinds and not any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in block.modules()):
            yield (
                f"{name}.{kinds[0][0]} is a BatchNorm: in training, rows and locations are normalised by each other; "
                "in evaluation, by what was seen in training, which at first is nothing. Use LayerNorm or RMSNorm."
            )
            return


def _dropped(evidence: Evidence) -> Iterator[str]:
    for name, block in evidence.blocks:
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


def _epsilons(evidence: Evidence) -> Iterator[str]:
    """A number that a norm adds to what it divides by, so large that it decides."""
    for name, block in evidence.blocks:
        for inner, module in block.named_modules():
            eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
            if "norm" in type(module).__name__.lower() and isinstance(eps, int | float) and eps >= _EPSILON:
                yield (
                    f"The epsilon of {name}.{inner} is {eps:g}, where 1e-5 is usual: what is smaller than its root is "
                    "not brought to norm 1. If that is not meant: look at the arguments of that norm, and of its "
                    "siblings."
                )
                return


def _shared(evidence: Evidence) -> Iterator[str]:
    """Parameters that several blocks have in common, as one object."""
    owners: dict[int, list[int]] = {}
    labels: dict[int, str] = {}
    for index, (_, block) in enumerate(evidence.blocks):
        for label, parameter in block.named_parameters():
            owners.setdefault(id(parameter), []).append(index)
            labels.setdefault(id(parameter), label)
    groups: dict[tuple[int, ...], list[str]] = {}
    for key, found in owners.items():
        if len(found) > 1:
            groups.setdefault(tuple(found), []).append(labels[key])
    for found, shared in groups.items():
        yield (
            f"{listed_blocks([evidence.names[index] for index in found])} share {listed(shared)}: they are the same "
            "parameters. If that is not meant: make a module for each block."
        )


def _without_attention(evidence: Evidence) -> Iterator[str]:
    """One block that is built as two others are."""
    without = [index for index, each in enumerate(evidence.signals[1:]) if each.attention_spread is None]
    if len(without) != 1:
        return
    shapes = [{label: weight.entries for label, weight in own.items()} for own in evidence.weights]
    if shapes.count(shapes[without[0]]) > 2:
        yield (
            f"No attention was seen in block {evidence.names[without[0]]}, only in the others, which are built alike. "
            "Look there for a softmax that is missing or that runs over queries instead of keys."
        )


def _untied(model: nn.Module) -> Iterator[str]:
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


def _in_blocks(names: Sequence[str]) -> str:
    which = listed_blocks(names).rstrip(",")
    return f"In {which[0].lower()}{which[1:]},"


_ON_STACK = (
    _probed,
    _frozen,
    _dropped,
    _epsilons,
    _shared,
    _without_attention,
    _norms_of_zero,
    _unused,
    _wired,
    _looks_back,
    _batch_norms,
    _scaled,
    _gains,
    _no_shortcuts,
    _first_hidden,
    _constants,
    set_apart,
)
