"""Wiring: how a block is put together, seen while a few rows run through it.

torch's calls inside every block are counted, and its products, softmaxes and attention are watched: which result goes
where unchanged, by what a score is multiplied, and what the weights of a query sum to. In a second run the last row of
what each block reads is twice what it was, which tells what its shortcut carries from what its branches add. Nothing is
read off a GPU before both runs are over. Norms are asked by themselves.
"""

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skipless.inspection.attention import SOFTMAX
from skipless.inspection.hooks import exchanged
from skipless.inspection.stacks import hidden, is_called, listening
from skipless.inspection.statistics import fetched, wide

_LINEAR = (F.linear, torch.addmm)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "mish", "softplus", "hardswish")
INPUT = " of the block's input"  # of calls that read it
# Calls that compute nothing, as of hooks that only listen.
_ASKING = ("__get__", "size", "dim", "numel", "is_floating_point", "__len__", "data_ptr", "stride")
_ASKING += ("detach", "cpu", "numpy", "item", "tolist")
_HIDDEN = -1e4  # scores below this are of keys that a mask hides
_CHANCE = 0.08  # of a gain: far below the difference between a shortcut that is there and one that is not
_IDLE = 0.2  # by how much what a norm gives may change with a location's size; 1 or more where it does nothing
_SIZES = (4.0, 16.0, 64.0)  # by which three locations are multiplied to see that
_NOT_BY_LOCATION = ("batch", "group", "instance", "sync", "nonorm", "2d", "3d", "weightnorm", "spectral")
_FITS = 0.999  # share of the scores' variance that products of queries and keys explain where nothing else is added


@dataclass
class Wired:
    """One block. scale: by what products of queries and keys are multiplied, times the root of the head's width; None
    where that was not seen. mixed: "result" or "values" where these are cut into heads without moving the axis of
    heads, so that heads are taken for locations. straight: two matrices of which the first makes the stream wider and
    the second reads just that. gain: what is added to the output when the input is doubled, in units of the input: 1
    with a plain shortcut whose branches are normalised, 0 where the shortcut is. sums: the least and the largest sum of
    the weights by which a query takes values, where these come from no softmax. behind: an activation that reads what
    the last matrix of a branch gives. operations: how often the block calls each of torch's functions. head_width of
    queries and keys and heads, how many: where the scale was seen. open_gate: two matrices that make the stream wider
    and whose results are multiplied as they are. double: whether a softmax reads a softmax."""

    scale: float | None = None
    mixed: str = ""
    straight: tuple[str, str] | None = None
    gain: float | None = None
    sums: tuple[float, float] | None = None
    behind: tuple[str, str] | None = None
    operations: Counter[str] = field(default_factory=Counter)
    head_width: int = 0
    heads: int = 1
    open_gate: tuple[str, str] | None = None
    double: bool = False


@dataclass(frozen=True, eq=False)
class _Product:
    """What a matrix gave; version tells whether it was changed in place since."""

    out: Tensor
    version: int
    name: str
    wider: bool
    narrower: bool

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
        self._wired = [Wired() for _ in self.blocks]  # without what is read off a GPU in the end
        self._scales: dict[int, list[float | tuple[Tensor, float]]] = {}
        self._orders: list[tuple[int, str, Tensor, Tensor]] = []
        self._bounds: dict[int, Tensor] = {}
        self._twice: dict[int, Tensor] = {}
        self._once: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._block: int | None = None
        self._width = self._input = 0
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
        bounds = [*self._bounds.values()]
        numbers = iter(fetched([*(gram for gram, _ in measured), *orders, *self._sums.values(), *bounds]))
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
        sums = {index: (float(low), float(high)) for index, (low, high) in zip(self._bounds, numbers, strict=True)}
        return [
            replace(
                each, scale=scales.get(index), mixed=mixed.get(index, ""), gain=gains.get(index), sums=sums.get(index)
            )
            for index, each in enumerate(self._wired)
        ]

    def _forget(self) -> None:
        self._products: list[_Product] = []
        self._scores: tuple[Tensor, int] | None = None
        self._asked = False  # whether queries and keys were multiplied
        self._weights: Tensor | None = None
        self._result: Tensor | None = None

    def _before(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._block = None
            self._forget()
            x = hidden([*args, *kwargs.values()])
            if is_called(module) and x.dim() > 2:
                self._twice[index] = 2 * x.select(self._rows[index], -1)
            self._block, self._width, self._input = index, x.shape[-1], x.data_ptr()

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
        if self._block is not None and func.__name__ not in _ASKING:
            self._wired[self._block].operations[f"{_called(func, args, kwargs)}{self._reads(args)}"] += 1
            if isinstance(out, Tensor):
                self._heard(self._block, func, (args, kwargs), out)
        return out

    def _reads(self, args: tuple) -> str:
        """Whether a call reads the block's input itself."""
        read = any(isinstance(each, Tensor) and each.data_ptr() == self._input for each in args)
        return INPUT if read else ""

    def _heard(self, index: int, func, given: tuple[tuple, dict], out: Tensor) -> None:
        args, kwargs = given
        if func in _LINEAR and not kwargs and len(args) > 1:
            x, matrix = args[:2] if func is F.linear else args[1:3]
            self._matrix(index, x, self._names[index].get(id(matrix)), out)
        elif func is F.scaled_dot_product_attention:
            q, v, scale = args[0], args[2], kwargs.get("scale")
            width = q.shape[-1] ** 0.5
            self._heads(index, q.shape[-1], q.shape[1] if q.dim() == 4 else 1)
            self._scales.setdefault(index, []).append(1.0 if scale is None else float(scale) * width)
            self._values(index, v)
            self._result = out
        elif func in _PRODUCTS and out.dim() == 4:
            # einsum may be given a tuple, and matmul its operands by name
            lists = [arg if isinstance(arg, tuple | list) else (arg,) for arg in (*args, *kwargs.values())]
            operands = [each for one in lists for each in one if isinstance(each, Tensor)]
            self._product(index, func, operands, out)
        elif func in SOFTMAX and out.dim() == 4:
            axis = args[1] if len(args) > 1 else kwargs.get("dim")
            self._softmax(index, args[0] if args else kwargs["input"], out if axis in (-1, 3) else None)
        elif _plain(func) == "mul" and len(args) == 2 and all(isinstance(each, Tensor) for each in args):
            made = [next((p.name for p in self._products if p.wider and p.is_read(each)), "") for each in args]
            if all(made) and made[0] != made[1]:
                self._wired[index].open_gate = (made[0], made[1])
        elif _plain(func) in ACTIVATIONS and args and isinstance(args[0], Tensor):
            last = next((each for each in self._products if each.narrower and each.is_read(args[0])), None)
            if last is not None:
                self._wired[index].behind = (last.name, _plain(func))

    def _matrix(self, index: int, x: Tensor, name: str | None, out: Tensor) -> None:
        straight = next((each for each in self._products if each.wider and each.is_read(x)), None)
        if straight is not None and name is not None and name != straight.name:
            self._wired[index].straight = (straight.name, name)
        if self._result is not None and x.numel() == self._result.numel() and x.dim() == 3:
            self._merged(index, x, self._result)
            self._result = None
        if name is not None:
            read, given = x.shape[-1], out.shape[-1]
            narrower = read > given == self._width  # back to the stream's width
            self._products.append(_Product(out, out._version, name, given > read, narrower))

    def _product(self, index: int, func, operands: list[Tensor], out: Tensor) -> None:
        weights = self._weights
        if weights is not None and any(each.data_ptr() == weights.data_ptr() for each in operands):
            heads, length = weights.shape[1:3]
            if out.shape[1:3] == (heads, length) and (func is not torch.einsum or heads != length):
                self._values(index, operands[-1])
                self._result = out
            self._weights = None
        elif (self._asked or weights is not None) and _is_square(operands[0]) and not _is_square(out):
            self._weighted(index, operands[0])
        elif weights is None and len(operands) == 2:
            self._scores, self._asked = (out[0].clone(), operands[0].shape[-1]), True

    def _heads(self, index: int, width: int, heads: int) -> None:
        """Of a block's first attention."""
        own = self._wired[index]
        if own.head_width == 0:
            own.head_width, own.heads = width, heads

    def _weighted(self, index: int, weights: Tensor) -> None:
        """Values are taken by weights (rows, heads, T, T) that are no softmax over keys, nor a part of one."""
        softmax = self._weights
        if softmax is None or weights.untyped_storage().data_ptr() != softmax.untyped_storage().data_ptr():
            sums = weights[0].to(wide(weights)).sum(-1)
            self._bounds.setdefault(index, torch.stack(sums.aminmax()))

    def _softmax(self, index: int, scores: Tensor, out: Tensor | None) -> None:
        if self._weights is not None and scores.data_ptr() == self._weights.data_ptr():
            self._wired[index].double = True
        if self._scores is not None and self._scores[0].shape == scores.shape[1:]:
            products, width = self._scores
            self._heads(index, width, scores.shape[1])
            self._scales.setdefault(index, []).append((_covariance(products, scores[0]), width**0.5))
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


@torch.no_grad()
def idle_norms(groups: Sequence[Iterable[tuple[str, nn.Module]]]) -> list[tuple[str, ...]]:
    """By group of modules, as of a block, the names of norms that do not bring every location to one size, whatever it
    was.

    Each is given three locations, and the same three multiplied by 4, 16 and 64. A norm over channels gives the same
    for both; one over locations, one that does nothing and one with a large epsilon do not. One that gives the same for
    all locations does not either, unless that is zero. Where a norm refuses these, it is not asked.
    """
    inputs: dict[tuple, Tensor] = {}
    given: dict[tuple, list[tuple[int, str, Tensor]]] = {}
    for index, group in enumerate(groups):
        for name, norm, weight in _norms(group):
            key = (weight.numel(), weight.dtype, weight.device)
            if key not in inputs:
                x = torch.randn(1, len(_SIZES), weight.numel(), generator=torch.Generator().manual_seed(0))
                inputs[key] = torch.cat([x, x * torch.tensor(_SIZES)[:, None]], dim=1).to(weight)
            try:
                out = norm(inputs[key])
            except Exception:  # it reads something else
                continue
            if isinstance(out, Tensor) and out.shape == inputs[key].shape:
                given.setdefault(key, []).append((index, name, out))
    changes = []
    for every in given.values():
        plain, larger = torch.stack([out for *_, out in every]).float().chunk(2, dim=2)
        sizes, apart = (each.flatten(1).norm(dim=1) for each in (plain, plain - plain[:, :, :1]))
        changed = (larger - plain).flatten(1).norm(dim=1) / sizes
        changes.append(changed.where((apart > 0) | (sizes == 0), math.inf))
    idle: list[list[str]] = [[] for _ in groups]
    for every, shares in zip(given.values(), fetched(changes), strict=True):
        for (index, name, _), share in zip(every, shares, strict=True):
            if share > _IDLE:  # 0/0 where it gives zeros, as at a start that is meant
                idle[index].append(name)
    return [tuple(names) for names in idle]


def _norms(group: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(name, norm, its weight) of those that are to normalise each location by itself."""
    for name, module in group:
        kind, weight = type(module).__name__.lower(), next(module.parameters(recurse=False), None)
        by_location = "norm" in kind and not any(word in kind for word in _NOT_BY_LOCATION)
        leaf = next(module.children(), None) is None and getattr(module, "data_format", "") != "channels_first"
        if by_location and leaf and weight is not None and weight.dim() == 1 and weight.numel() > 1:
            yield name, module, weight


def _is_square(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[-1] == x.shape[-2] > 1


def _plain(func) -> str:
    """The name of a function of torch: one for add, add_, __add__, __radd__ and __iadd__."""
    name = func.__name__.strip("_")
    return name[1:] if name[:1] in ("r", "i") and name[1:] in _ARITHMETIC else name


_ARITHMETIC = ("add", "sub", "mul", "truediv", "matmul", "pow")


def _called(func, args: tuple, kwargs: dict) -> str:
    """The same with the numbers and truth values that it is given."""
    given = [*_numbers(args), *(f"{word}={value}" for word in sorted(kwargs) for value in _numbers([kwargs[word]]))]
    return f"{_plain(func)}({', '.join(given)})"


def _numbers(values: Iterable) -> Iterator[str]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _numbers(value)
        elif isinstance(value, float):
            yield f"{value:.6g}"
        elif isinstance(value, bool | int | torch.dtype):
            yield str(value).removeprefix("torch.")


def _gain(gram: np.ndarray, width: int) -> float | None:
    """⟨x, added⟩/⟨x, x⟩ of the products of the two with each other; None where what is added beside may come to that by
    chance, all locations being alike."""
    (square, product), (_, whole) = gram.tolist()
    if not 0 < square < math.inf or not math.isfinite(whole):
        return None
    gain = product / square
    chance = (max(whole / square - gain**2, 0.0) / width) ** 0.5
    return gain if chance < _CHANCE else None


def _covariance(products: Tensor, scores: Tensor) -> Tensor:
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
