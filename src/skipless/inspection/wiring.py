"""Wiring: how a block is put together, seen while a few rows run through it.

torch's products, softmaxes and attention calls inside every block are watched: which result goes where unchanged, and
by what a score is multiplied. After each block it runs once more on twice its input, which tells what its shortcut
carries from what its branches add.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skipless.inspection.hooks import exchanged, hidden
from skipless.inspection.spans import is_called, listening

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
    """While `around` is open, `found` is filled, a Wired for each of the given blocks.

    busy is True while a block runs once more: hooks of others are to let that pass.
    """

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks, self.busy = list(blocks), False
        self.found = [Wired() for _ in blocks]
        self._names = [{id(p): name for name, p in block.named_parameters()} for block in blocks]
        self._block: int | None = None
        self._forget()

    @contextmanager
    def around(self) -> Generator[None]:
        """Around one run of the model, without gradients."""
        with listening(self.blocks, self._before, self._after), self:
            yield
        self._forget()

    def _forget(self) -> None:
        self._products: list[_Product] = []
        self._scores: tuple[Tensor, int] | None = None
        self._weights: Tensor | None = None
        self._result: Tensor | None = None

    def _before(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self.busy:
                self._block = index
                self._forget()

        return hook

    def _after(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            if self.busy:
                return
            self._block = None
            self._forget()
            if not is_called(module):
                return
            given = [*args, *kwargs.values()]
            x, y = hidden(given), hidden(out)
            if x.shape != y.shape or any("Cache" in type(each).__name__ for each in given):
                return  # a second run would add to the cache
            self.busy = True
            try:
                more, named = exchanged(args, kwargs, x, 2 * x)
                twice = hidden(module(*more, **named))
            finally:
                self.busy = False
            self._note(index, gain=_gain(x.double(), (twice - y).double()))

        return hook

    def _note(self, index: int, **fields: Any) -> None:
        self.found[index] = replace(self.found[index], **fields)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._block is not None and not self.busy and isinstance(out, Tensor):
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
            self._scaled(index, 1.0 if scale is None else scale * width)
            self._values(index, v)
            self._result = out
        elif func in _PRODUCTS and out.dim() == 4:
            self._product(index, func, [each for each in args if isinstance(each, Tensor)], out)
        elif func in _SOFTMAX and out.dim() == 4:
            self._softmax(index, args[0] if args else kwargs["input"], out)

    def _matrix(self, index: int, x: Tensor, name: str | None, out: Tensor) -> None:
        straight = next((each for each in self._products if each.wider and each.is_read(x)), None)
        if straight is not None and name is not None and name != straight.name:
            self._note(index, straight=(straight.name, name))
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
            slope = _slope(products, scores[0])
            if slope is not None:
                self._scaled(index, slope * width**0.5)
        self._scores, self._weights = None, out

    def _scaled(self, index: int, scale: float) -> None:
        if self.found[index].scale is None:  # a decoder's second attention may be built otherwise
            self._note(index, scale=scale)

    def _values(self, index: int, v: Tensor) -> None:
        """Values (rows, heads, T, head width) that are a matrix's result read in the order of its entries."""
        if v.dim() != 4 or v.shape[1] < 2 or v.shape[2] < 2:
            return
        length = v.shape[2]
        for each in self._products:
            y = each.out
            if y.dim() != 3 or y.shape[1] != length:
                continue
            parts = y.chunk(3, -1) if y.numel() == 3 * v.numel() else (y,) if y.numel() == v.numel() else ()
            if any(torch.equal(part[0].reshape(-1), v[0].reshape(-1)) for part in parts):
                right = any(torch.equal(part[0].reshape(-1), v[0].transpose(0, 1).reshape(-1)) for part in parts)
                self._note(index, mixed="" if right else "values")

    def _merged(self, index: int, x: Tensor, result: Tensor) -> None:
        """What attention gave, (rows, heads, T, head width), as the next matrix reads it."""
        one, entries = result[0], x[0].reshape(-1)
        if result.dim() != 4 or one.shape[0] < 2 or one.shape[1] < 2 or one.numel() != entries.numel():
            return
        right = torch.equal(entries, one.transpose(0, 1).reshape(-1))
        if not right and torch.equal(entries, one.reshape(-1)):
            self._note(index, mixed="result")


def _gain(x: Tensor, added: Tensor) -> float | None:
    """⟨x, added⟩/⟨x, x⟩; None where what is added beside may come to that by chance, all locations being alike."""
    gain = (added * x).sum() / x.square().sum()
    chance = (added - gain * x).norm() / x.norm() / x.shape[-1] ** 0.5
    return float(gain) if bool(chance < _CHANCE) else None


def _slope(products: Tensor, scores: Tensor) -> float | None:
    """By what products were multiplied to give scores; None where something else was added."""
    seen = (scores > _HIDDEN) & torch.isfinite(products)
    x, y = products[seen].double(), scores[seen].double()
    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / x.square().sum())
    rest = float((y - slope * x).square().sum() / y.square().sum())
    return slope if math.isfinite(rest) and rest < 1 - _FITS else None
