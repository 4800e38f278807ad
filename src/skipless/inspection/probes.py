"""Probes: what a model sees that it should not, and what it does not see, by changing its input a little.

Three rows are run twice without gradients: a row, another one, and the first with its tokens in reverse; the second
time the first row's last token is another. Where activations change, and where they do not, says what is seen. Images
and other numbers are asked only whether rows see each other.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.inspection.hooks import hidden, rows_first
from skipless.inspection.inputs import Batch, model_inputs, padding, predicts_next

# A change this share of what the changed location itself shows. A mask keeps out all of it, while rows that share a
# kernel may differ in rounding.
_SEEN, _MIXED = 1e-6, 1e-3
_ORDER = 1e-5  # the same of reversed tokens, over the norm
_DECODER = "decoder_input_ids"


@dataclass(frozen=True)
class Seen:
    """What a stack of blocks sees: leaks by kind ("future", "rows", "copied"), each with the first block, from 1, that
    has it; ordered, whether it tells orders of tokens apart, None where that was not asked. note: why nothing was."""

    leaks: Mapping[str, int]
    ordered: bool | None = None
    note: str = ""


@dataclass(frozen=True, eq=False)
class Watched:
    """A stack that is probed: its blocks, whether its stream is (T, rows, width), and whether its attention is masked
    so that it should see only what came before."""

    blocks: Sequence[nn.Module]
    swapped: bool = False
    masked: bool = False


@torch.no_grad()
def probe(model: nn.Module, batch: Batch, stacks: Sequence[Watched], decoder: bool) -> list[Seen]:
    """What every stack sees of the ids in `batch`, of decoder_input_ids for a decoder's; of other inputs, of rows."""
    ids = _ids(batch, decoder)
    if ids is None:
        name, values = next(
            ((n, v) for n, v in _parts(batch).items() if isinstance(v, Tensor) and v.is_floating_point()), ("", None)
        )
        if values is None or values.dim() < 3 or len(values) < 2:
            return [Seen({})] * len(stacks)
        plain = torch.stack([values[0], values[1], values[0]])
        changed = torch.stack([values[0].flip(-1), values[1], values[0]])
    else:
        name, first = _DECODER if decoder else "input_ids", ids[0]
        if ids.shape[1] < 4 or padding(batch) is not None or bool((first == first[0]).all()):
            return [Seen({})] * len(stacks)
        plain = torch.stack([first, ids[1] if len(ids) > 1 else first.roll(1), first.flip(0)])
        changed = plain.clone()
        changed[0, -1] = next(token for token in first if token != first[-1])
    causal = decoder or (predicts_next(model) and "XLNet" not in type(model).__name__)
    before, after = (_states(model, _with_rows(batch, name, x), stacks) for x in (plain, changed))
    found = [
        _seen(x, y, plain, causal or stack.masked) if x and y else Seen({})
        for x, y, stack in zip(before, after, stacks, strict=True)
    ]
    if any(each.leaks or each.ordered is False for each in found):
        again = _states(model, _with_rows(batch, name, plain), stacks)
        if any(_differ(x, y) for x, y in zip(before, again, strict=True)):
            return [Seen({})] * len(stacks)  # it does not give the same twice, so a change says nothing
    return found


def _seen(before: Sequence[Tensor], after: Sequence[Tensor], plain: Tensor, causal: bool) -> Seen:
    if not all(bool(torch.isfinite(x).all()) for x in (*before, *after)):
        return Seen({})
    leaks: dict[str, int] = {}
    if plain.is_floating_point():
        for block, (x, y) in enumerate(zip(before, after, strict=True), start=1):
            change = (x - y).flatten(1).norm(dim=-1)
            if float(change[1:].max()) > _MIXED * float(change[0]) > 0:
                leaks.setdefault("rows", block)
        return Seen(leaks)
    return Seen(_leaks(before, after, plain, causal), _ordered(before[-1], before, after))


def _parts(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    return {"": batch[0] if isinstance(batch, tuple) else batch}


def _with_rows(batch: Batch, name: str, values: Tensor) -> Batch:
    """The batch of three rows: these values, and of everything else but labels the first row thrice."""
    if not isinstance(batch, Mapping):
        return values if isinstance(batch, Tensor) else (values, *batch[1:])
    rows = len(batch[name])
    same = {
        str(key): value[:1].expand(3, *value.shape[1:])
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        else value
        for key, value in batch.items()
        if key != "labels"
    }
    return {**same, name: values}


def _leaks(before: Sequence[Tensor], after: Sequence[Tensor], plain: Tensor, causal: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for block, (x, y) in enumerate(zip(before, after, strict=True), start=1):
        change = (x - y).norm(dim=-1)
        own = float(change[0, -1])
        if own == 0:
            break
        if float(change[1:].max()) > _MIXED * own:
            found.setdefault("rows", block)
        if float((x[0] - x[1]).abs().max()) == 0 and not torch.equal(plain[0], plain[1]):
            found.setdefault("copied", block)
        if float(change[0, :-1].max()) > _SEEN * own:
            found.setdefault("future", block)
    if found.get("future") == 1 and not causal:
        del found["future"]  # made to look both ways
    return found


def _ordered(last: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> bool | None:
    """Whether reversing tokens does more than to reverse what is given; asked of what looks both ways."""
    if float((before[0] - after[0])[0, :-1].norm()) == 0:
        return None
    return float((last[2].flip(0) - last[0]).norm()) > _ORDER * float(last[0].norm())


def _differ(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return any(not torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(one, two, strict=False))


def _ids(batch: Batch, decoder: bool) -> Tensor | None:
    found: Any = batch
    if isinstance(batch, Mapping):
        found = batch.get(_DECODER if decoder else "input_ids")
    elif isinstance(batch, tuple):
        found = batch[0] if len(batch) == 1 else None
    whole = isinstance(found, Tensor) and found.dim() == 2 and not found.is_floating_point()
    return found if whole else None


def _states(model: nn.Module, batch: Batch, stacks: Sequence[Watched]) -> list[list[Tensor]]:
    """What every block gives, as (3, T, width), by stack; nothing of a stack whose blocks do not run once each."""
    given: list[list[Tensor]] = [[] for _ in stacks]
    with ExitStack() as hooks:
        for stack, states in zip(stacks, given, strict=True):
            for block in stack.blocks:
                hooks.callback(block.register_forward_hook(_kept(states, stack.swapped)).remove)
        args, kwargs = model_inputs(model, batch)
        model(*args, **kwargs)
    whole = (len(x) == len(each.blocks) and all(len(y) == 3 for y in x) for x, each in zip(given, stacks, strict=True))
    return [states if fits else [] for states, fits in zip(given, whole, strict=True)]


def _kept(states: list[Tensor], swapped: bool):
    return lambda module, args, out: states.append(rows_first(hidden(out), swapped).float())
