"""Probes: what a model sees that it should not, and what it does not see, by changing its input a little.

Three rows are run twice without gradients: a row, another one, and the first with its tokens in reverse; the second
time the first row's last token is another. Where activations change, and where they do not, says what is seen.
"""

from collections.abc import Mapping, Sequence
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


@torch.no_grad()
def probe(model: nn.Module, batch: Batch, blocks: Sequence[nn.Module], swapped: bool, decoder: bool) -> Seen | None:
    """What the blocks see of ids in `batch`, or None where it has none to change.

    swapped: their stream is (T, rows, width). decoder: the ids they read are decoder_input_ids.
    """
    ids = _ids(batch, decoder)
    if ids is None:
        return _rows_probed(model, batch, blocks, swapped)
    if ids.shape[1] < 4 or padding(batch) is not None:
        return None
    first = ids[0]
    if bool((first == first[0]).all()):
        return None
    plain = torch.stack([first, ids[1] if len(ids) > 1 else first.roll(1), first.flip(0)])
    changed = plain.clone()
    changed[0, -1] = first[0] if first[0] != first[-1] else next(token for token in first if token != first[-1])
    before = _states(model, _with_ids(batch, plain, decoder), blocks, swapped)
    after = _states(model, _with_ids(batch, changed, decoder), blocks, swapped)
    if before is None or after is None or not all(bool(torch.isfinite(x).all()) for x in (*before, *after)):
        return None
    if _differ(before, _states(model, _with_ids(batch, plain, decoder), blocks, swapped) or []):
        return None  # it does not give the same twice, so a change says nothing
    return Seen(_leaks(model, before, after, plain, decoder), _ordered(before[-1], before, after))


def _rows_probed(model: nn.Module, batch: Batch, blocks: Sequence[nn.Module], swapped: bool) -> Seen | None:
    """Of images and other numbers: whether rows see each other, when the first is another."""
    name, values = next(
        (
            (key, value)
            for key, value in _parts(batch).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ),
        ("", None),
    )
    if values is None or values.dim() < 3 or len(values) < 2 or (swapped and values.dim() == 3):
        return None
    plain = torch.stack([values[0], values[1], values[0]])
    changed = torch.stack([values[0].flip(-1), values[1], values[0]])
    before, after, again = (
        _states(model, _with_rows(batch, name, x), blocks, swapped) for x in (plain, changed, plain)
    )
    if before is None or after is None or again is None or _differ(before, again):
        return None
    leaks: dict[str, int] = {}
    for block, (x, y) in enumerate(zip(before, after, strict=True), start=1):
        change = (x - y).flatten(1).norm(dim=-1)
        if float(change[1:].max()) > _MIXED * float(change[0]) > 0:
            leaks.setdefault("rows", block)
    return Seen(leaks)


def _parts(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    return {"": batch[0] if isinstance(batch, tuple) else batch}


def _with_rows(batch: Batch, name: str, values: Tensor) -> Batch:
    if not isinstance(batch, Mapping):
        return values if isinstance(batch, Tensor) else (values, *batch[1:])
    return _tripled(batch, len(batch[name])) | {name: values}


def _tripled(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Of everything in the batch but labels the first row thrice."""
    return {
        str(key): value[:1].expand(3, *value.shape[1:])
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        else value
        for key, value in batch.items()
        if key != "labels"
    }


def _leaks(
    model: nn.Module, before: Sequence[Tensor], after: Sequence[Tensor], plain: Tensor, decoder: bool
) -> dict[str, int]:
    causal = decoder or (predicts_next(model) and "XLNet" not in type(model).__name__)
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


def _with_ids(batch: Batch, ids: Tensor, decoder: bool) -> Batch:
    """The batch of three rows: these ids, and of everything else the first row thrice."""
    if not isinstance(batch, Mapping):
        return ids
    name = _DECODER if decoder else "input_ids"
    return _tripled(batch, len(batch[name])) | {name: ids}


def _states(model: nn.Module, batch: Batch, blocks: Sequence[nn.Module], swapped: bool) -> list[Tensor] | None:
    """What every block gives, as (3, T, width); None where they do not run once each."""
    given: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: given.append(rows_first(hidden(out), swapped).float()))
        for block in blocks
    ]
    try:
        args, kwargs = model_inputs(model, batch)
        model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return given if len(given) == len(blocks) and all(len(x) == 3 for x in given) else None
