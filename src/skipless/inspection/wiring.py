"""Wiring: how a block is put together, seen while a few rows run through it.

torch's products, softmaxes and attention calls inside every block are watched: which result goes where unchanged, and
by what a score is multiplied. In a second run the last row of what each block reads is twice what it was, which tells
what its shortcut carries from what its branches add. Nothing is read off a GPU before both runs are over.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skipless.inspection.hooks import exchanged, hidden
from skipless.inspection.stacks import is_called, listening
from skipless.inspection.statistics import fetched, wide

_LINEAR = (F.linear, torch.addmm)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_HIDDEN = -1e4  # scores below this are of keys that a mask hides
_CHANCE = 0.08  # of a gain: far below the difference between a shortcut that is there and one that is not
_FITS = 0.999  # share of the scores' variance that products of queries and keys explain where nothing else is added


@dataclass(frozen=True)
class Wired:
    """One block. scale: by what products of queries and keys are multiplied, times the root of the head's width; None
    where that was not seen. mixed: "result" or "values" where these are cut into heads without moving the axis of
    heads, so that heads are taken for locations. straight: two matrices of which the first makes the stream wider and
    the second reads just that. gain: what is added to the output when the input is doubled, in units of the input: 1
    with a plain shortcut whose branches are normalised, 0 where the shortcut is."""

    scale: float | None = None
    mixed: str = ""
    straight: tuple[str, str] | None = None
    gain: float | None = None


@dataclass(frozen=True, eq=False)
class _Product:
    """What a matrix gave; version tells whether it was changed in place since."""

    out: Tensor
    version: int
    name: str
    wider: bool

    def is_read(self, x: Tensor) -> bool:
        same = x.data_ptr() == self.out.data_ptr() and x.numel() == self.out.numel()
        return same and x._version == self.version and x.shape[-1] == self.out.shape[-1]


class Wiring(TorchFunctionMode):
    """Opened `around` a first run of the model without gradients, and `doubled` around a second. `found` then has a
    Wired for each of the given blocks. swapped: whether their stream is (T, rows, width).
    """

    def __init__(self, blocks: Sequence[nn.Module], swapped: Sequence[bool] | None = None):
        super().__init__()
        self.blocks = list(blocks)
        self._rows = [1 if each else 0 for each in swapped or [False] * len(self.blocks)]
        self._names = [{id(p): name for name, p in block.named_parameters()} for block in blocks]
        self._straight: dict[int, tuple[str, str]] = {}
        self._scales: dict[int, list[float | tuple[Tensor, float]]] = {}
        self._orders: list[tuple[int, str, Tensor, Tensor]] = []
        self._twice: dict[int, Tensor] = {}
        self._once: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._block: int | None = None
        self._forget()

    @contextmanager
    def around(self) -> Generator[None]:
        """Around one run of the model, without gradients."""
        with listening(self.blocks, self._before, self._after), self:
            yield
        self._forget()

    @contextmanager
    def doubled(self) -> Generator[None]:
        """Around a second run, in which the last row of what a block reads is twice what it was in the first."""
        with listening(self.blocks, self._double, self._added):
            yield

    @cached_property
    def found(self) -> list[Wired]:
        """By block, fetched at once."""
        slopes = [(index, each) for index, every in self._scales.items() for each in every]
        measured = [each for _, each in slopes if isinstance(each, tuple)]
        orders = [flag for *_, same, right in self._orders for flag in (same, right)]
        numbers = iter(fetched([*(gram for gram, _ in measured), *orders, *self._sums.values()]))
        scales: dict[int, float] = {}
        for index, each in slopes:
            scale = each if not isinstance(each, tuple) else _slope(next(numbers), each[1])
            if scale is not None:
                scales.setdefault(index, scale)  # a decoder's second attention may be built otherwise
        mixed: dict[int, str] = {}
        for index, kind, *_ in self._orders:
            same, right = bool(next(numbers)), bool(next(numbers))
            if same and not right:
                mixed.setdefault(index, kind)
        gains = {index: _gain(next(numbers), self._twice[index].shape[-1]) for index in self._sums}
        return [
            Wired(scales.get(index), mixed.get(index, ""), self._straight.get(index), gains.get(index))
            for index in range(len(self.blocks))
        ]

    def _forget(self) -> None:
        self._products: list[_Product] = []
        self._scores: tuple[Tensor, int] | None = None
        self._weights: Tensor | None = None
        self._result: Tensor | None = None

    def _before(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._block = index
            self._forget()
            x = hidden([*args, *kwargs.values()])
            if is_called(module) and x.dim() > 2:
                self._twice[index] = 2 * x.select(self._rows[index], -1)

        return hook

    def _after(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            self._block = None
            self._forget()
            x, y = hidden([*args, *kwargs.values()]), hidden(out)
            if index in self._twice and x.shape == y.shape:
                self._once[index] = y.select(self._rows[index], -1)

        return hook

    def _double(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict):
            x, axis = hidden([*args, *kwargs.values()]), self._rows[index]
            if index not in self._once or x.select(axis, -1).shape != self._twice[index].shape:
                return None
            rest = x.narrow(axis, 0, x.shape[axis] - 1)
            return exchanged(args, kwargs, x, torch.cat([rest, self._twice[index].unsqueeze(axis)], dim=axis))

        return hook

    def _added(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            once = self._once.get(index)
            if once is not None:
                added = hidden(out).select(self._rows[index], -1) - once
                both = torch.stack([self._twice[index] / 2, added]).flatten(1).to(wide(added))
                self._sums[index] = both @ both.mT

        return hook

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._block is not None and isinstance(out, Tensor):
            self._heard(self._block, func, (args, kwargs), out)
        return out

    def _heard(self, index: int, func, given: tuple[tuple, dict], out: Tensor) -> None:
        args, kwargs = given
        if func in _LINEAR and not kwargs and len(args) > 1:
            x, matrix = args[:2] if func is F.linear else args[1:3]
            self._matrix(index, x, self._names[index].get(id(matrix)), out)
        elif func is F.scaled_dot_product_attention:
            q, v, scale = args[0], args[2], kwargs.get("scale")
            width = q.shape[-1] ** 0.5
            self._scales.setdefault(index, []).append(1.0 if scale is None else float(scale) * width)
            self._values(index, v)
            self._result = out
        elif func in _PRODUCTS and out.dim() == 4:
            self._product(index, func, [each for each in args if isinstance(each, Tensor)], out)
        elif func in _SOFTMAX and out.dim() == 4:
            self._softmax(index, args[0] if args else kwargs["input"], out)

    def _matrix(self, index: int, x: Tensor, name: str | None, out: Tensor) -> None:
        straight = next((each for each in self._products if each.wider and each.is_read(x)), None)
        if straight is not None and name is not None and name != straight.name:
            self._straight[index] = (straight.name, name)
        if self._result is not None and x.numel() == self._result.numel() and x.dim() == 3:
            self._merged(index, x, self._result)
            self._result = None
        if name is not None:
            self._products.append(_Product(out, out._version, name, out.shape[-1] > x.shape[-1]))

    def _product(self, index: int, func, operands: list[Tensor], out: Tensor) -> None:
        weights = self._weights
        if weights is not None and any(each.data_ptr() == weights.data_ptr() for each in operands):
            heads, length = weights.shape[1:3]
            if out.shape[1:3] == (heads, length) and (func is not torch.einsum or heads != length):
                self._values(index, operands[-1])
                self._result = out
            self._weights = None
        elif weights is None and len(operands) == 2:
            self._scores = out[0].clone(), operands[0].shape[-1]

    def _softmax(self, index: int, scores: Tensor, out: Tensor) -> None:
        if self._scores is not None and self._scores[0].shape == scores.shape[1:]:
            products, width = self._scores
            self._scales.setdefault(index, []).append((_together(products, scores[0]), width**0.5))
        self._scores, self._weights = None, out

    def _values(self, index: int, v: Tensor) -> None:
        """Values (rows, heads, T, head width) that are a matrix's result read in the order of its entries."""
        if v.dim() != 4 or v.shape[1] < 2 or v.shape[2] < 2:
            return
        length = v.shape[2]
        made = [each.out for each in self._products if each.out.dim() == 3 and each.out.shape[1] == length]
        views = [y for y in made if y.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()]
        for y in views or made:
            parts = y.chunk(3, -1) if y.numel() == 3 * v.numel() else (y,) if y.numel() == v.numel() else ()
            if parts:
                entries = torch.stack([part[0].reshape(-1) for part in parts])
                self._ordered(index, "values", entries, v[0])

    def _merged(self, index: int, x: Tensor, result: Tensor) -> None:
        """What attention gave, (rows, heads, T, head width), as the next matrix reads it."""
        one, entries = result[0], x[0].reshape(-1)
        if result.dim() != 4 or one.shape[0] < 2 or one.shape[1] < 2 or one.numel() != entries.numel():
            return
        self._ordered(index, "result", entries[None], one)

    def _ordered(self, index: int, kind: str, entries: Tensor, heads: Tensor) -> None:
        """Note whether some of the rows of entries are those of (heads, T, head width) in this order, or in that of
        locations."""
        same, right = ((entries == each.reshape(-1)).all(-1).any() for each in (heads, heads.transpose(0, 1)))
        self._orders.append((index, kind, same, right))


def _gain(gram: np.ndarray, width: int) -> float | None:
    """⟨x, added⟩/⟨x, x⟩ of the products of the two with each other; None where what is added beside may come to that by
    chance, all locations being alike."""
    (square, product), (_, whole) = gram.tolist()
    if not 0 < square < math.inf or not math.isfinite(whole):
        return None
    gain = product / square
    chance = (max(whole / square - gain**2, 0.0) / width) ** 0.5
    return gain if chance < _CHANCE else None


def _together(products: Tensor, scores: Tensor) -> Tensor:
    """(2, 2), what products of queries and keys and scores vary by and together, over keys that no mask hides."""
    seen = (scores > _HIDDEN) & torch.isfinite(products)
    both = torch.stack([products, scores]).to(wide(scores)).where(seen, 0.0).flatten(1)
    apart = (both - both.sum(-1, keepdim=True) / seen.sum()).where(seen.flatten(), 0.0)
    return apart @ apart.mT


def _slope(gram: np.ndarray, width: float) -> float | None:
    """By what products were multiplied to give scores, times `width`; None where something else was added."""
    (square, product), (_, whole) = gram.tolist()
    if not 0 < square < math.inf or not 0 < whole < math.inf:
        return None
    rest = 1.0 - product**2 / (square * whole)
    return product / square * width if rest < 1 - _FITS else None
