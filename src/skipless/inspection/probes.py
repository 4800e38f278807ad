"""Probes: what a model sees that it should not, and what it does not see, by changing its input a little.

Three rows are run twice without gradients: a row, another one, and the first with what precedes its last token in
reverse (of an image: moved by one patch); the second time the first row's last token is another. Where activations
change, and where they do not, says what is seen. A padded row is run as two, with other tokens as padding. During the
first two of these runs it is watched how blocks are put together: in the second, blocks read the last row doubled, so
that only the row between says whether rows see each other.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from skipless.inspection.hooks import rows_first
from skipless.inspection.inputs import (
    Batch,
    id_keys,
    model_inputs,
    padding,
    parts_of,
    predicts_next,
    readable,
    some_rows,
)
from skipless.inspection.stacks import hidden, listening
from skipless.inspection.statistics import fetched
from skipless.inspection.wiring import Wired, Wiring

# A change this share of what the changed location itself shows. A mask keeps out all of it, while rows that share a
# kernel may differ in rounding.
_SEEN, _MIXED = 1e-6, 1e-3
_ORDER = 3e-6  # the same of tokens in another order, over the norm; rounding comes to a tenth of it
_CONTEXT = 3e-4  # how far apart the last location is, over its norm, where others are, so that it sees them
_ASKED = 0.1  # how far apart two rows have to be, over their norm, so that an order of tokens can be told
_PADDING = 1e-5  # the same of other padding
_DROWNED = 0.004  # how far apart two rows are, over their norm, where their tokens hardly matter


@dataclass(frozen=True)
class Seen:
    """What a stack of blocks sees: leaks by kind ("future", "rows", "copied", "padding"), each with the first block,
    from 1, that has it; ordered, whether it tells orders of tokens apart, None where that was not asked; told_apart,
    how far apart two rows of other tokens are after the first block, over their norm; unsteady, the first block that
    does not give the same twice; read, whether what the model gives changes with the last token; early, whether it
    changes at earlier locations with it, though no block does; wired, by block. reads: whether what was changed enters
    the stack. context: how far the last location moves, over its norm, where those before it have other tokens. note:
    why nothing was asked."""

    leaks: Mapping[str, int] = field(default_factory=dict)
    ordered: bool | None = None
    told_apart: float | None = None
    unsteady: int | None = None
    read: bool | None = None
    wired: tuple[Wired, ...] = ()
    note: str = ""
    early: bool = False
    reads: bool = True
    context: float | None = None

    @property
    def hardly_mixed(self) -> bool:
        """Whether locations see each other, and hardly: not as behind outputs that start at zero."""
        return self.context is not None and _ORDER < self.context <= _CONTEXT

    @property
    def drowned(self) -> bool:
        """Whether the tokens hardly matter to what the first block gives."""
        return self.told_apart is not None and 0 < self.told_apart < _DROWNED


@dataclass(frozen=True, eq=False)
class Watched:
    """A stack that is probed: its blocks, whether its stream is (T, rows, width), whether it is made to see only what
    came before, whether attention was seen in it, and whether it is called a decoder."""

    blocks: Sequence[nn.Module]
    swapped: bool = False
    masked: bool = False
    attends: bool = False
    decoder: bool = False


@dataclass(frozen=True, eq=False)
class _Ran:
    """One run: what every block of every stack gave, as (rows, T, width), the first row of what entered each stack, and
    what the model gave."""

    states: list[list[Tensor]]
    entered: list[list[Tensor]]
    output: Tensor | None


@dataclass(frozen=True, eq=False)
class _Compared:
    """What one block gave in two runs of three rows. change: norms (rows, T) of the difference between the runs;
    between: norms (T,) of the first run's first row less its second, which ends alike; norms: (rows, T) of the first
    run; swap: norms of the first row less the third, at the last location and of the mean one."""

    change: np.ndarray
    between: np.ndarray
    norms: np.ndarray
    swap: np.ndarray

    @classmethod
    def of(cls, before: Sequence[Tensor], after: Sequence[Tensor]) -> "list[_Compared]":
        """Of every block, fetched at once."""
        parts: list[Tensor] = []
        for x, y in zip(before, after, strict=True):
            other = x[0] - x[2]
            parts += [
                torch.linalg.vector_norm(each, dim=-1)
                for each in (x - y, x[0] - x[1], x, torch.stack([other[-1], other.mean(0)]))
            ]
        numbers = iter(fetched(parts))
        return [cls(next(numbers), next(numbers), next(numbers), next(numbers)) for _ in before]


@torch.no_grad()
def probe(
    model: nn.Module, batch: Batch, stacks: Sequence[Watched], second: bool = False, known: bool = False
) -> list[Seen]:
    """What every stack sees of the ids in `batch`, or of the second ones, as a decoder's; of other inputs, of rows.

    Of a stack that these ids do not enter nothing is said, unless it is known that they are to.
    """
    whole = _whole_rows(batch)
    asked = None if whole is None else _questions(model, whole, second)
    if whole is None or asked is None:
        return [Seen(reads=False)] * len(stacks)
    name, plain, changed = asked
    if plain.is_floating_point() and plain.shape[1] == len(plain) and any(stack.swapped for stack in stacks):
        return [Seen()] * len(stacks)  # rows may be on either axis
    blocks = [(block, stack.swapped) for stack in stacks for block in stack.blocks]
    wiring = Wiring([block for block, _ in blocks], [swapped for _, swapped in blocks])
    before = _run(model, _with_rows(whole, name, plain), stacks, wiring.around())
    after = _run(model, _with_rows(whole, name, changed), stacks, wiring.doubled())
    predicts = predicts_next(model) and "XLNet" not in type(model).__name__
    differ = not torch.equal(plain[0], plain[1]), not torch.equal(plain[0], plain[2])
    of_images = plain.is_floating_point()
    paired = id_keys(batch)[1] is not None
    entered = zip(before.entered, after.entered, strict=True)
    reads = [known or not paired or not all(map(torch.equal, x, y)) for x, y in entered]
    found = []
    for x, y, first, stack, own in zip(before.states, after.states, before.entered, stacks, reads, strict=True):
        compared = _Compared.of(x, y) if x and y and own else []
        causal = predicts or stack.masked or (second and stack.decoder) or (stack.attends and _one_ahead(compared))
        moved = differ[1] and bool(compared) and _adds(first[0], x[-1][0])
        found.append(_of_images(compared, moved) if of_images else _of_ids(compared, differ[0], causal))
    last = reads == [True] and not of_images  # an encoder is followed by what gives the answer
    alone = last or (paired and not of_images and reads.count(True) == 1)
    read = _changed(before.output, after.output) if alone else None
    early = last and _early(before, after)
    if early or any(each.leaks or each.ordered is False for each in found):
        again = _run(model, _with_rows(whole, name, plain), stacks)
        early = early and not _changed(before.output, again.output)
        unsteady = [_first_apart(x, y) for x, y in zip(before.states, again.states, strict=True)]
        if any(each is not None for each in unsteady):
            return [Seen(unsteady=each) for each in unsteady]  # so a change says nothing
    wired = iter(wiring.found)
    return [
        replace(
            each,
            read=read if own and not each.leaks else None,
            wired=tuple(islice(wired, len(stack.blocks))),
            early=early,
            reads=own,
        )
        for each, stack, own in zip(found, stacks, reads, strict=True)
    ]


@torch.no_grad()
def padding_seen(model: nn.Module, batch: Batch, stacks: Sequence[Watched]) -> list[int | None]:
    """By stack, the first block, from 1, in which real locations depend on what stands at padding."""
    mask, key = padding(batch), id_keys(batch)[0]
    if mask is None or key is None or mask.shape != parts_of(batch)[key].shape:
        return [None] * len(stacks)
    ids = parts_of(batch)[key]
    row = int((~mask).sum(-1).argmax())
    real = mask[row].to(ids.device)
    first, other = ids[row][real][0], next((t for t in ids[row][real] if t != ids[row][real][0]), None)
    if other is None:
        return [None] * len(stacks)
    rows = torch.stack([ids[row].where(real, first), ids[row].where(real, other)])
    states = _run(model, _with_rows(some_rows(batch, [row]), key, rows), stacks).states
    return [next((block for block, x in enumerate(each, 1) if _differs(x, real)), None) for each in states]


def _differs(x: Tensor, real: Tensor) -> bool:
    """Whether two rows differ, at real locations where these are the stack's own."""
    one, two = (row[real] if len(row) == len(real) else row for row in x)
    return float((one - two).norm()) > _PADDING * float(one.norm())


def _whole_rows(batch: Batch) -> Batch | None:
    """The rows without padding; None where there is none."""
    mask = padding(batch)
    if mask is None:
        return batch
    whole = [row for row, real in enumerate(mask.all(-1).tolist()) if real]
    return some_rows(batch, whole) if whole else None


def _questions(model: nn.Module, batch: Batch, second: bool) -> tuple[str | int, Tensor, Tensor] | None:
    """(what is changed, its three rows, and these changed)."""
    key = id_keys(batch)[second]
    if key is None:
        floats = ((n, v) for n, v in parts_of(batch).items() if isinstance(v, Tensor) and v.is_floating_point())
        name, values = next(floats, ("", None))
        if values is None or values.dim() < 3 or len(values) < 2:
            return None
        moved = values[0].roll(_patch(model, values), -1)
        plain = torch.stack([values[0], values[1], moved])
        return name, plain, torch.stack([values[0].flip(-1), values[1], moved])
    ids = parts_of(batch)[key]
    first = ids[0]
    if ids.shape[1] < 4 or bool((first == first[0]).all()):
        return None
    plain = torch.stack([first, ids[1] if len(ids) > 1 else first.roll(1), first])
    plain[2, :-1] = first[:-1].flip(0)
    plain[1, -1] = first[-1]  # so that the last location tells whether it sees the others
    changed = plain.clone()
    changed[0, -1] = next(token for token in first if token != first[-1])
    return key, plain, changed


def _patch(model: nn.Module, values: Tensor) -> int:
    """By how much an image is moved so that its patches only change places; 0 where it is not cut into patches, and
    where positions are zero, which is a known way to start."""
    positions = (p for name, p in model.named_parameters() if "pos" in name)
    if values.dim() != 4 or any(not bool(p.any()) for p in positions):
        return 0
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    fits = first is not None and first.kernel_size == first.stride and values.shape[-1] % first.stride[1] == 0
    return int(first.stride[1]) if first is not None and fits else 0


def _finite(compared: Sequence[_Compared]) -> bool:
    return len(compared) > 0 and all(bool(np.isfinite(each.change).all()) for each in compared)


def _adds(entered: Tensor, left: Tensor) -> bool:
    """Whether blocks add anything to what enters them; behind branches that start at zero no order can be told."""
    return entered.shape != left.shape or float((left - entered).norm()) > _CONTEXT * float(entered.norm())


def _of_images(compared: Sequence[_Compared], moved: bool) -> Seen:
    """moved: whether the third row is the first with its patches in other places, which blocks may tell."""
    if not _finite(compared):
        return Seen()
    leaks: dict[str, int] = {}
    for block, each in enumerate(compared, start=1):
        first, second = (float(np.linalg.norm(row)) for row in each.change[:2])
        if second > _MIXED * first > 0:
            leaks.setdefault("rows", block)
    last = compared[-1]
    ordered = bool(last.swap[1] > _ORDER * last.norms[0].mean()) if moved else None
    return Seen(leaks, ordered, _told_apart(compared[0]))


def _of_ids(compared: Sequence[_Compared], differ: bool, causal: bool) -> Seen:
    """differ: whether the first two rows are of other tokens."""
    if not _finite(compared):
        return Seen()
    told_apart = _told_apart(compared[0])
    leaks = _leaks(compared, differ, causal)
    if not told_apart > _ASKED:
        return Seen(leaks, told_apart=told_apart)
    context, swap = _context(compared)
    ordered = swap > _ORDER if context > _CONTEXT else None  # what is hardly seen has no order
    return Seen(leaks, ordered, told_apart, context=context)


def _one_ahead(compared: Sequence[_Compared]) -> bool:
    """Whether only the location before the last one sees it in the first block, and one more in the second: what looks
    both ways sees further, so this is a causal mask that is off by one."""
    length = compared[0].change.shape[1] if compared else 0
    seen = [np.flatnonzero(each.change[0, :-1] > _SEEN * each.change[0, -1]).tolist() for each in compared[:2]]
    return length > 5 and seen == [[length - 2], [length - 3, length - 2]][: len(seen)]


def _told_apart(first: _Compared) -> float:
    """The median over locations, but for the last, of the distance between two rows, over their norm."""
    norms = (first.norms[0] + first.norms[1]) / 2
    return float(np.sort(first.between / np.maximum(norms, np.finfo(np.float32).tiny))[(len(norms) + 1) // 2])


def _with_rows(batch: Batch, name: str | int, values: Tensor) -> Batch:
    """The batch of these rows: these values, and of everything else but labels the first row as often."""
    parts = parts_of(batch)
    rows = len(parts[name])
    same = {
        key: value[:1].expand(len(values), *value.shape[1:])
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        else value
        for key, value in parts.items()
        if key != "labels"
    }
    same[name] = values
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in same.items()}
    return values if isinstance(batch, Tensor) else tuple(same.values())


def _leaks(compared: Sequence[_Compared], differ: bool, causal: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for block, each in enumerate(compared, start=1):
        own = float(each.change[0, -1])
        if own == 0:
            break
        if each.change[1].max() > _MIXED * own:
            found.setdefault("rows", block)
        if differ and not each.between.any():
            found.setdefault("copied", block)
        if each.change[0, :-1].max() > _SEEN * own:
            found.setdefault("future", block)
    if found.get("future") == 1 and not causal:
        del found["future"]  # made to look both ways
    return found


def _context(compared: Sequence[_Compared]) -> tuple[float, float]:
    """How far the last location moves, over its norm, where the tokens before it are others, and in another order.

    Of what looks both ways, after all blocks. Of what looks back, after the first: its mask tells orders apart later,
    since each location has then gathered what came before it.
    """
    back = not compared[0].change[0, :-1].any()
    each = compared[0 if back else -1]
    norm = max(float(each.norms[0, -1]), 1e-30)
    return float(each.between[-1]) / norm, float(each.swap[0]) / norm


def _first_apart(one: Sequence[Tensor], two: Sequence[Tensor]) -> int | None:
    pairs = enumerate(zip(one, two, strict=False), start=1)
    return next((block for block, (x, y) in pairs if not torch.allclose(x, y, rtol=1e-4, atol=1e-6)), None)


def _early(before: _Ran, after: _Ran) -> bool:
    """Whether what the model gives at earlier locations changes with the last token, though the last block does not."""
    if before.output is None or after.output is None or not before.states[0] or not after.states[0]:
        return False
    given, states = before.output[0] - after.output[0], before.states[0][-1][0] - after.states[0][-1][0]
    if given.dim() != 2 or len(given) != len(states):
        return False
    given, states = (torch.linalg.vector_norm(each.float(), dim=-1) for each in (given, states))
    return bool((states[:-1].max() <= _SEEN * states[-1]) & (given[:-1].max() > _MIXED * given.max()))


def _changed(before: Tensor | None, after: Tensor | None) -> bool | None:
    if before is None or after is None or before.shape != after.shape or len(before) != 3:
        return None
    return not torch.equal(before[0], after[0])


def _run(
    model: nn.Module, batch: Batch, stacks: Sequence[Watched], watch: AbstractContextManager | None = None
) -> _Ran:
    """Nothing is given of a stack whose blocks do not run once each."""
    given: list[list[Tensor]] = [[] for _ in stacks]
    entered: list[list[Tensor]] = [[] for _ in stacks]
    with ExitStack() as hooks:
        for stack, states, first in zip(stacks, given, entered, strict=True):
            hooks.enter_context(
                listening(stack.blocks, _entering(first, stack.swapped), _leaving(states, stack.swapped))
            )
        args, kwargs = model_inputs(model, batch)
        with watch or nullcontext(), BaseTorchFunctionMode():  # under a mode, torch's layers run alike in every run
            output = model(*args, **kwargs)
    rows = len(args[0]) if args else len(next(v for v in kwargs.values() if isinstance(v, Tensor) and v.dim()))
    whole = (
        len(x) == len(each.blocks) and all(len(y) == rows for y in x) for x, each in zip(given, stacks, strict=True)
    )
    states = [states if fits else [] for states, fits in zip(given, whole, strict=True)]
    return _Ran(states, entered, readable(output))


def _entering(entered: list[Tensor], swapped: bool):
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not entered:  # a block may change it in place
            entered.append(rows_first(hidden([*args, *kwargs.values()]), swapped)[0].clone())

    return lambda index: hook


def _leaving(states: list[Tensor], swapped: bool):
    def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        states.append(rows_first(hidden(out), swapped).float())

    return lambda index: hook
