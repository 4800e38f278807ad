"""Hooks that measure a network while it runs: activations as they leave each block, gradients as they come back.

One forward and one backward serve every number. Nothing but numbers is stored of a block once it is passed, and none is
read before both are over, so that a GPU is never waited for.
"""

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from skipless.console import nearest
from skipless.inspection.attention import AttentionStats, AttentionWatch, of_shaped
from skipless.inspection.statistics import ActivationStats, Described, InspectOptions, describe, wide
from skipless.nn.attention import ShapedAttention

_ATTENTION = ("attention", "attn")
_TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find_blocks(model: nn.Module, names: Sequence[str] | str | None = None) -> list[tuple[str, nn.Module]]:
    """(name, module) of every block, first to last.

    names may be one list's name ("model.layers"), the names of the blocks themselves in order, or None: then the
    longest nn.ModuleList or nn.Sequential whose members each hold attention, the first one where two are as long.
    """
    if isinstance(names, str):
        return _members(model, names)
    if names is not None:
        if not names:
            raise ValueError("blocks is empty; name at least one module, or leave it out to have them found")
        return [(name, _module(model, name)) for name in names]
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    found = [(name, module) for name, module in lists if _alike_with_attention(module)]
    if not found:
        raise ValueError(_nothing_found(model, lists))
    name, _ = max(found, key=lambda pair: len(pair[1]))
    return _members(model, name)


def holds_attention(module: nn.Module) -> bool:
    """Whether the module is or contains attention, going by the names of modules and classes."""
    return any(
        word in part
        for name, each in module.named_modules()
        for part in (name.lower(), type(each).__name__.lower())
        for word in _ATTENTION
    )


def _alike_with_attention(group: nn.ModuleList | nn.Sequential) -> bool:
    """Members of one class, or of several (as in networks that mix two kinds of block), each with attention."""
    return len(group) > 0 and all(next(m.children(), None) is not None and holds_attention(m) for m in group)


def _members(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    group = _module(model, name)
    if not isinstance(group, nn.ModuleList | nn.Sequential):
        return [(name, group)]
    return [(f"{name}.{index}" if name else index, member) for index, member in group.named_children()]


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"the model has no module {name!r}; {nearest(name, modules)}")
    return modules[name]


def _nothing_found(model: nn.Module, lists: Sequence[tuple[str, nn.Module]]) -> str:
    seen = ", ".join(f"{name or 'the model itself'} ({len(list(module.children()))})" for name, module in lists[:8])
    return (
        f"{type(model).__name__} has no list of modules that each hold attention (lists seen: {seen or 'none'}); "
        "name its blocks: blocks=['encoder.0', 'encoder.1', …] or blocks='encoder'"
    )


class Recorder:
    """A context in which the given blocks are measured. Outside it the model has no hook of ours.

    live is for a training loop: each block's first run counts, further ones (gradient accumulation, recomputed
    activations) are let pass, and refused says why a batch cannot be measured. Otherwise that is an error, as is a
    block that runs twice, since its numbers would be of two places.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], options: InspectOptions, *, live: bool = False):
        self.blocks, self.options, self.live = list(blocks), options, live
        self.described: list[Described] = []
        self.last: Tensor | None = None
        self.watch = Stopwatch()
        self.current: int | None = None
        self.refused: str | None = None
        self._carries: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._attention: dict[int, Tensor] = {}
        self._swapped = False
        self._entered: Tensor | None = None
        self._open = ExitStack()

    def __enter__(self) -> "Recorder":
        for index, (_, block) in enumerate(self.blocks, start=1):
            before = block.register_forward_pre_hook(self._before(index), with_kwargs=True)
            after = block.register_forward_hook(self._after(index), with_kwargs=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        ours = [self._ask(block, index) for index, (_, block) in enumerate(self.blocks, 1) if self.options.attention]
        if not all(ours):
            self._open.enter_context(AttentionWatch(lambda: self.current, self._attention))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        self._entered, self.current = None, None

    @cached_property
    def stats(self) -> list[ActivationStats]:
        """Of what enters the first block, then of what leaves each."""
        return [each.numbers() for each in self.described]

    @property
    def carries(self) -> dict[int, float]:
        """Mean cosine of a location before and after a block, by block from 1."""
        return {index: float(value) for index, value in self._carries.items()}

    @property
    def gradients(self) -> dict[int, np.ndarray]:
        """Squared norms (rows, T) of the gradient at each block's output, 0 being the first one's input."""
        return {index: value.cpu().numpy() for index, value in self._gradients.items()}

    @property
    def real(self) -> np.ndarray:
        """False at padding, (rows, T), or one True for all."""
        mask = self.options.mask
        return np.array(True) if mask is None else mask.cpu().numpy()

    @property
    def attention(self) -> dict[int, AttentionStats]:
        """By block, from 1; blocks whose attention could not be seen are missing."""
        return {index: AttentionStats.of(sums) for index, sums in self._attention.items()}

    def _ask(self, block: nn.Module, index: int) -> bool:
        """Have this library's attention, if the block has it, tell of itself as it runs; whether it does."""
        own = next((module for module in block.modules() if isinstance(module, ShapedAttention)), None)
        if own is None:
            return False

        def hook(module: nn.Module, args: tuple) -> None:
            cached = any(arg is not None for arg in args[2:])
            if self.current == index and index not in self._attention and not cached:
                self._attention[index] = of_shaped(own, args[0].detach(), *args[1:2])

        self._open.callback(own.register_forward_pre_hook(hook).remove)
        return True

    def _before(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict):
            if not self._first_run(index):
                return None
            x, changed = hidden([*args, *kwargs.values()]), None
            if index == 1:
                if not x.requires_grad and not self.live and torch.is_grad_enabled():
                    lifted = x.detach().requires_grad_()  # frozen embeddings: gradients still have to reach the blocks
                    changed = _exchanged(args, kwargs, x, lifted)
                    x = lifted
                self._swapped = batch_second(x, (block for _, block in self.blocks), self.options.batch_shape)
                if not self._accepts(self._rows(x)):
                    return None
                self._note(0, x)
            self._entered, self.current = x.detach(), index
            return changed

        return hook

    def _after(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            if self.current != index:
                return
            x = hidden(out)
            if self._entered is not None and self._entered.shape == x.shape:
                self._carries[index] = _carry(self._entered, x)
            self.current, self._entered = None, None
            self._note(index, x)
            if index == len(self.blocks) and not self.live:
                self.last = x

        return hook

    def _first_run(self, index: int) -> bool:
        """Whether this run of a block counts; raises where it comes out of turn."""
        expected = max(len(self.described), 1)
        if index == expected and self.refused is None:
            return True
        if self.live:
            return False
        name = self.blocks[index - 1][0]
        if index < expected:
            raise ValueError(f"block {name} ran twice in one forward (shared weights?), so its signal has two depths")
        raise ValueError(f"block {name} ran before {self.blocks[expected - 1][0]}; name blocks in the order they run")

    def _accepts(self, x: Tensor) -> bool:
        rows, mask = self.options.rows, self.options.mask
        if self.live and mask is not None and mask.shape != x.shape[:2]:
            mask = None  # of something else, such as a text without the image before it
            self.options = replace(self.options, mask=None)
        try:
            check_locations(x[:rows], None if mask is None else mask[:rows])
        except ValueError as error:
            if not self.live:
                raise
            self.refused = str(error)
        return self.refused is None

    def _note(self, index: int, x: Tensor) -> None:
        """Measure activations now and their gradient when it comes."""
        options = self.options if index == 0 else replace(self.options, kernel=False)
        with self.watch.around(x.device):
            self.described.append(describe(self._rows(x.detach()), options))
        if x.requires_grad:
            x.register_hook(lambda gradient: self._arrived(index, gradient))

    def _arrived(self, index: int, gradient: Tensor) -> None:
        with self.watch.around(gradient.device):
            norms = torch.linalg.vector_norm(self._rows(gradient.detach()), dim=-1, dtype=wide(gradient)).square()
            self._gradients.setdefault(index, norms)

    def _rows(self, x: Tensor) -> Tensor:
        return rows_first(x, self._swapped)


@torch.no_grad()
def _carry(before: Tensor, after: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean()


def _exchanged(args: tuple, kwargs: dict, old: Tensor, new: Tensor) -> tuple[tuple, dict]:
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )


def hidden(values: Any) -> Tensor:
    """The hidden state among a block's arguments or results: the first floating tensor of two dimensions or more."""
    if isinstance(values, Tensor):
        return values
    found = values.values() if isinstance(values, Mapping) else values
    for value in found:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
    raise ValueError(
        f"a block reads or gives {[type(value).__name__ for value in found]}, with no hidden state among it; name "
        "modules that map (batch, T, width) to the same: blocks=[…]"
    )


def batch_second(x: Tensor, blocks: Iterable[nn.Module], given: tuple[int, int] | None) -> bool:
    """Whether a hidden state that enters or leaves the blocks is (T, rows, width).

    torch's own layers say so. Others may transpose around an attention that has the batch second, so there `given`,
    (rows, T) of the batch's ids or mask, decides; only where it cannot tell, the attention's batch_first does.
    """
    blocks = list(blocks)
    flagged = any(getattr(module, "batch_first", True) is False for block in blocks for module in block.modules())
    shape = tuple(x.shape[:2])
    if not flagged or given is None or all(type(block) in _TORCHS for block in blocks):
        return flagged
    if given[0] != given[1] and shape in (given, given[::-1]):
        return shape != given
    return flagged


def rows_first(x: Tensor, swapped: bool) -> Tensor:
    """(rows, T, width) of a hidden state with or without rows, on a line or on a grid."""
    if x.dim() == 2:
        return x[None]
    x = x.flatten(1, -2)
    return x.transpose(0, 1) if swapped else x


def check_locations(x: Tensor, mask: Tensor | None) -> None:
    """Raise unless every row of (rows, T, width) has two locations to compare and mask, False at padding, fits."""
    if x.shape[1] < 2:
        raise ValueError("the batch has 1 location per row; cosines compare locations, so give at least 2 tokens")
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)} but the first block reads {tuple(x.shape[:2])} locations; "
            "leave the mask out, or give one entry per location"
        )
    if mask is not None and int(mask.sum(-1).min()) < 2:
        raise ValueError("a row of the batch has fewer than 2 tokens outside the padding; leave such rows out")


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None]:
    """In here no module's call is compiled. Where attention is this library's, its kernels still are.

    Elsewhere torch.compile is off altogether, since a compiled function may call blocks from anywhere.
    """
    compiled: list[Any] = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    calls = [module._compiled_call_impl for module in compiled]
    wrapped = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
    ours = any(isinstance(module, ShapedAttention) for module in model.modules())
    for module in compiled:
        module._compiled_call_impl = None
    try:
        with torch.compiler.set_stance("default" if ours and not wrapped else "force_eager"):
            yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


class Stopwatch:
    """Adds up the time of what runs inside `around`: a GPU's own, or the processor's where that is longer."""

    def __init__(self):
        self._host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, device: torch.device) -> Generator[None]:
        """Around one measurement on `device`."""
        started = time.perf_counter()
        began = _mark(device)
        try:
            yield
        finally:
            if began is not None:
                self._events.append((began, cast(torch.cuda.Event, _mark(device))))
            self._host += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """So far. Waits for the measurements on a GPU to be over."""
        if not self._events:
            return self._host
        for _, last in self._events:
            last.synchronize()
        return max(self._host, sum(first.elapsed_time(last) for first, last in self._events) / 1e3)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A moment in the GPU's work, or None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))
